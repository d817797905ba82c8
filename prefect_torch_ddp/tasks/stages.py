"""The tasks beside the training: one prepares the dataset, one evaluates a checkpoint on it."""

from typing import Any

from prefect import task
from prefect.context import TaskRunContext
from prefect.logging import get_run_logger

from prefect_torch_ddp.data.dataset_store import find_dataset
from prefect_torch_ddp.errors import CheckpointError
from prefect_torch_ddp.gang.restarts import CallAttemptLog
from prefect_torch_ddp.gang.run import run_gang
from prefect_torch_ddp.params import GangOptions, TrainParams
from prefect_torch_ddp.rank.config import RankConfig
from prefect_torch_ddp.records.rank_log import LogFolder
from prefect_torch_ddp.results import CheckpointRef, DatasetReport, Report, TrainingSummary
from prefect_torch_ddp.tasks.cluster import current_client
from prefect_torch_ddp.tasks.report.markdown import count, size
from prefect_torch_ddp.tasks.run import RUN_STAGE, Run, log_to_run
from prefect_torch_ddp.tasks.watch.cancel import or_cancelled


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
