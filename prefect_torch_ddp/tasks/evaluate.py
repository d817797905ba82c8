"""The task that evaluates a checkpoint on held-out data, and which checkpoint that is."""

from prefect import task
from prefect.logging import get_run_logger

from prefect_torch_ddp.checkpoint.keys import CheckpointId
from prefect_torch_ddp.errors import CheckpointError
from prefect_torch_ddp.results import CheckpointRef, Report, TrainingSummary, values_in_words
from prefect_torch_ddp.tasks.gangs.stage import run_stage
from prefect_torch_ddp.tasks.train_run import Run
from prefect_torch_ddp.tasks.watch.cancel import or_cancelled


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
    chosen = CheckpointId(checkpoint.step, checkpoint.attempt)
    config = run.rank_config("evaluate", checkpoint.attempt, restore=chosen)
    logs = f"logs/evaluate/step-{checkpoint.step:08d}"
    report = Report.model_validate(run_stage(run, config, world_size, logs))
    words = "evaluated step %d on %d samples: %s"
    found = values_in_words(report.scores) or "no score"
    get_run_logger().info(words, checkpoint.step, report.num_samples, found)
    return report
