"""The tasks beside the training: prepare a dataset, evaluate a checkpoint on it, publish it all."""

from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.context import TaskRunContext
from prefect.logging import get_run_logger
from prefect.utilities.context import get_task_and_flow_run_ids

from prefect_torch_ddp.checkpoint.attempts import refuse_superseded
from prefect_torch_ddp.data.dataset_store import find_dataset
from prefect_torch_ddp.errors import CheckpointError
from prefect_torch_ddp.gang.restarts import CallAttemptLog
from prefect_torch_ddp.gang.run import run_gang
from prefect_torch_ddp.params import GangOptions, TrainParams
from prefect_torch_ddp.protocol.events import Progress
from prefect_torch_ddp.rank.config import RankConfig
from prefect_torch_ddp.records.ledger import read_ledger
from prefect_torch_ddp.records.metrics import (
    epoch_rows,
    read_new_records,
    reported,
    surviving_records,
)
from prefect_torch_ddp.records.rank_log import LogFolder
from prefect_torch_ddp.records.run_record import previous_run
from prefect_torch_ddp.records.timing import newest_lines
from prefect_torch_ddp.results import (
    CheckpointRef,
    DatasetReport,
    LedgerReport,
    Report,
    TrainingSummary,
    TrainReport,
)
from prefect_torch_ddp.storage.protocol import Storage
from prefect_torch_ddp.tasks.cluster import current_client
from prefect_torch_ddp.tasks.report.artifacts import ArtifactWriter, key
from prefect_torch_ddp.tasks.report.checkpoints import kept_checkpoints
from prefect_torch_ddp.tasks.report.curves import MetricCurves
from prefect_torch_ddp.tasks.report.headline import RunView
from prefect_torch_ddp.tasks.report.markdown import count, size
from prefect_torch_ddp.tasks.report.progress import TrainingProgress
from prefect_torch_ddp.tasks.report.report import render_page
from prefect_torch_ddp.tasks.run import RUN_STAGE, Run, log_to_run
from prefect_torch_ddp.tasks.watch.cancel import or_cancelled
from prefect_torch_ddp.tasks.watch.terminal import Teller
from prefect_torch_ddp.tracking.description import complete_record, draft_record
from prefect_torch_ddp.tracking.runs import goodput_so_far


def _cache_key(_context: TaskRunContext, parameters: dict[str, Any]) -> str:
    run: Run = parameters["run"]
    return f"train-ddp/prepare/{run.storage.uri}/{run.dataset_id}"


# The flow sets refresh_cache where somebody deleted the data that a cached result refers to.
@task(name="prepare", cache_key_fn=_cache_key, persist_result=True, result_serializer="json")
def prepare(run: Run) -> DatasetReport:
    """Run the workload's `prepare` on one rank and publish its dataset, unless it exists."""
    there = find_dataset(run.storage, run.dataset_id)
    if there is None:
        return or_cancelled(_prepare, run)
    get_run_logger().info(
        "dataset %s is already at %s: nothing to prepare", there.dataset_id, there.uri
    )
    return there


def _prepare(run: Run) -> DatasetReport:
    config = run.rank_config("prepare", attempt=1)
    made = DatasetReport.model_validate(_run_stage(run, config, 1, "logs/prepare"))
    words = "prepared dataset %s (%s files, %s) at %s"
    extent = count(made.num_files), size(made.num_bytes)
    get_run_logger().info(words, made.dataset_id, *extent, made.uri)
    return made


def chosen_checkpoint(run: Run, training: TrainingSummary) -> CheckpointRef:
    """Return the checkpoint that the parameters ask to evaluate.

    Raises:
        CheckpointError: there is none; says why.
    """
    if run.params.evaluate_on == "last":
        chosen = training.last_checkpoint
        why = "the training tracked nothing: call ctx.track(model=...) in train"
    else:
        chosen = training.best_checkpoint
        metric = run.params.checkpoint.best_metric
        why = f"no checkpoint has the metric {metric!r}: does train report it?"
    if chosen is None:
        msg = f"run {run.run_id} has no {run.params.evaluate_on} checkpoint to evaluate; {why}"
        raise CheckpointError(msg)
    return chosen


@task(name="evaluate")
def evaluate(run: Run, checkpoint: CheckpointRef, world_size: int) -> Report:
    """Run the workload's `evaluate` on a gang with a checkpoint's weights; exact on every rank.

    Args:
        run: what was chosen.
        checkpoint: whose weights.
        world_size: how many ranks the training ended with; no others are waited for.
    """
    return or_cancelled(_evaluate, run, checkpoint, world_size)


def _evaluate(run: Run, checkpoint: CheckpointRef, world_size: int) -> Report:
    config = run.rank_config("evaluate", checkpoint.attempt, restore_step=checkpoint.step)
    logs = f"logs/evaluate/step-{checkpoint.step:08d}"
    report = Report.model_validate(_run_stage(run, config, world_size, logs))
    scores = {"accuracy": report.accuracy, "loss": report.loss, **report.metrics}
    shown = [f"{name} {score:.4g}" for name, score in scores.items() if score is not None]
    words = "evaluated step %d on %d samples: %s"
    found = ", ".join(shown) or "no score"
    get_run_logger().info(words, checkpoint.step, report.num_samples, found)
    return report


def options_of_stage(params: TrainParams, world_size: int) -> GangOptions:
    """Return the options of a gang of so many ranks that doesn't train."""
    options = params.options_of_gang()
    # An evaluation doesn't wait for ranks that a training had once grown to.
    least = params.min_world_size or params.world_size
    options["min_world_size"] = min(least, world_size)
    options["max_world_size"], options["max_restarts"] = None, 0  # a training alone resumes
    return options


def _run_stage(run: Run, config: RankConfig, world_size: int, logs: str) -> Any:
    """Run a stage's function on a gang, once; return what rank 0's returned."""
    options = options_of_stage(run.params, world_size)
    if config.stage == "prepare":  # it makes no steps and no collectives
        options["progress_timeout_s"] = None
    with current_client() as client:
        values = run_gang(
            client,
            RUN_STAGE,
            args=(config, run.params.workload),
            world_size=world_size,
            process_group="none" if config.stage == "prepare" else "default",
            name=f"{run.run_id} {config.stage}",
            attempt_log=CallAttemptLog(logs=LogFolder(run.storage, run.run_id, logs)),
            on_event=log_to_run(),
            **options,
        )
    return values[0]


# The storage may hold credentials: no cache key is made of the inputs.
@task(name="publish", cache_policy=NO_CACHE)
# Each is another task's result, and Prefect draws the run's graph by them.
def publish(  # noqa: PLR0913, PLR0917
    params: TrainParams,
    storage: Storage,
    experiment: str,
    dataset: DatasetReport,
    training: TrainingSummary,
    evaluation: Report,
    checkpoint: CheckpointRef,
) -> TrainReport:
    """Publish what a run found, as artifacts to browse, and return it.

    Raises:
        SupersededError: a newer attempt has begun.
    """
    Teller()
    refuse_superseded(storage, training.run_id, training.attempt)
    new_records = read_new_records(storage, training.run_id, set())
    all_records = reported(new_records)
    records = surviving_records(all_records)
    report = TrainReport(
        run_id=training.run_id,
        flow_run_url=None,
        dataset=dataset,
        training=training,
        epochs=epoch_rows(records),
        evaluation=evaluation,
        checkpoint=checkpoint,
        ledger=_checked_ledger(storage, training.run_id) if params.ledger else None,
    )
    record = complete_record(storage, training.run_id, experiment, evaluation, checkpoint)
    if record is None:
        about = {"workload": params.workload, "dataset": dataset}
        record = draft_record(params, training.run_id, experiment, storage, **about)
    steps, epochs = training.num_steps, training.num_epochs
    newest = Progress(steps, epochs, steps, total_epochs=epochs)
    view = RunView(
        record,
        TrainingProgress(training.world_size, training.attempt, "finished", newest=newest),
        curves=MetricCurves(new_records).snapshot(),
        checkpoints=kept_checkpoints(storage, training.run_id),
        previous=previous_run(storage, record),
        report=report,
        ranks=newest_lines(storage, training.run_id),
        goodput=goodput_so_far(storage, training.run_id),
        logs=LogFolder(storage, training.run_id).uri,
    )
    with get_client(sync_client=True) as client:
        writer = ArtifactWriter(client, *get_task_and_flow_run_ids())
        page, title = render_page(view), f"Run {training.run_id}, finished"
        writer.put("markdown", key("report", experiment), page, title)
    words = "published the report of %s from %d records"
    get_run_logger().info(words, training.run_id, len(all_records))
    return report


def _checked_ledger(storage: Storage, run_id: str) -> LedgerReport:
    ledger = read_ledger(storage, run_id)
    if ledger.is_clean:
        words = "the ledger of %d epochs is clean: each sample that was due was trained on once"
        get_run_logger().info(words, len(ledger.epochs))
    else:
        get_run_logger().error("the ledger of run %s is not clean:\n%s", run_id, ledger)
    return ledger
