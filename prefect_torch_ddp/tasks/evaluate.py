"""The task that evaluates a checkpoint on held-out data, and which checkpoint that is."""

from prefect import task
from prefect.logging import get_run_logger

from prefect_torch_ddp.checkpoint.keys import CheckpointId
from prefect_torch_ddp.errors import CheckpointError
from prefect_torch_ddp.records.saved_files import attempt_folder, evaluation_folder
from prefect_torch_ddp.results import CheckpointRef, Report, TrainingSummary, values_in_words
from prefect_torch_ddp.tasks.cancel.states import or_cancelled
from prefect_torch_ddp.tasks.gangs.stage import run_stage
from prefect_torch_ddp.tasks.train_run import Run


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
def evaluate(
    run: Run, checkpoint: CheckpointRef, world_size: int, attempt: int | None = None
) -> Report:
    """Run the workload's `evaluate` on a gang with a checkpoint's weights; exact on every rank.

    Args:
        run: what was chosen.
        checkpoint: whose weights.
        world_size: how many ranks the training ended with; no others are waited for.
        attempt: the one with which the training ended, if this is the evaluation that is
            published: what it saves is then the run's. None: it saves to its own folder.
    """
    return or_cancelled(_evaluate, run, checkpoint, world_size, attempt)


def _evaluate(run: Run, checkpoint: CheckpointRef, world_size: int, attempt: int | None) -> Report:
    chosen = CheckpointId(checkpoint.step, checkpoint.attempt)
    folder = evaluation_folder(checkpoint.step)
    # A best checkpoint may be of an attempt before the last: read_result reads the newest's files.
    results = folder if attempt is None else attempt_folder(attempt)
    config = run.rank_config("evaluate", checkpoint.attempt, chosen, results)
    report = Report.model_validate(run_stage(run, config, world_size, f"logs/{folder}"))
    words = "evaluated step %d on %d samples: %s"
    found = values_in_words(report.scores) or "no score"
    get_run_logger().info(words, checkpoint.step, report.num_samples, found)
    return report
