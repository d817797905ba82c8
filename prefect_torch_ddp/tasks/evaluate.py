"""Owns the task that evaluates a checkpoint on held-out data."""

from prefect import task
from prefect.logging import get_run_logger

from prefect_torch_ddp.errors import CheckpointError
from prefect_torch_ddp.gang.run import run_gang
from prefect_torch_ddp.results import CheckpointRef, Report, TrainingSummary
from prefect_torch_ddp.tasks.cluster import current_client
from prefect_torch_ddp.tasks.run import RUN_STAGE, Run, log_to_run
from prefect_torch_ddp.tasks.watch.cancel import or_cancelled


def chosen_checkpoint(run: Run, training: TrainingSummary) -> CheckpointRef:
    """Return the checkpoint that the parameters ask to evaluate.

    Raises:
        CheckpointError: there is none; says why.
    """
    if run.params.evaluate_on == "last":
        chosen, why = (
            training.last_checkpoint,
            "the training tracked nothing: call ctx.track(model=...) in train",
        )
    else:
        metric = run.params.checkpoint.best_metric
        chosen, why = (
            training.best_checkpoint,
            f"no checkpoint has the metric {metric!r}: does train report it?",
        )
    if chosen is None:
        msg = f"run {run.run_id} has no {run.params.evaluate_on} checkpoint to evaluate; {why}"
        raise CheckpointError(msg)
    return chosen


@task(name="evaluate")
def evaluate(run: Run, checkpoint: CheckpointRef, world_size: int) -> Report:
    """Run the workload's `evaluate` on a gang with the checkpoint's weights; every rank has the
    same exact report.

    Args:
        run: what was chosen.
        checkpoint: whose weights.
        world_size: how many ranks the training ended with: workers that it did without are not
            waited for.
    """
    return or_cancelled(_evaluate, run, checkpoint, world_size)


def _evaluate(run: Run, checkpoint: CheckpointRef, world_size: int) -> Report:
    with current_client() as client:
        reports = run_gang(
            client,
            RUN_STAGE,
            args=(
                run.rank_config("evaluate", checkpoint.attempt, restore_step=checkpoint.step),
                run.params.workload,
            ),
            world_size=world_size,
            min_world_size=min(run.params.min_world_size or world_size, world_size),
            ranks_per_worker=run.params.ranks_per_worker,
            name=f"{run.run_id} evaluate",
            on_event=log_to_run(),
            progress_timeout_s=run.params.progress_timeout_s,
            **run.gang_options(),
        )
    report = Report.model_validate(reports[0])
    get_run_logger().info(
        "evaluated step %d on %d samples: accuracy %s",
        checkpoint.step,
        report.num_samples,
        report.accuracy,
    )
    return report
