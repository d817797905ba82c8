"""The flow train-ddp, level 3: from parameters to a published, evaluated model."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar
from uuid import UUID

from prefect import Task, flow
from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from prefect.settings import PREFECT_UI_URL
from prefect.utilities.urls import url_for
from prefect_dask import DaskTaskRunner

from prefect_torch_ddp.checkpoint.resume_point import ResumePoint
from prefect_torch_ddp.gang.policy import TASK_LOSS_ERRORS, Action, TaskLoss, decide
from prefect_torch_ddp.params import ClusterParams, TrainParams
from prefect_torch_ddp.results import DatasetReport, Report, TrainReport
from prefect_torch_ddp.server import flow_server
from prefect_torch_ddp.tasks.calls.called_flow import checked_first, quietly, refuse_early
from prefect_torch_ddp.tasks.clusters.current import cluster_lives, connect, on_worker, result_of
from prefect_torch_ddp.tasks.evaluate import chosen_checkpoint, evaluate
from prefect_torch_ddp.tasks.prepare import prepare
from prefect_torch_ddp.tasks.publish import failure_published, publish
from prefect_torch_ddp.tasks.train import train
from prefect_torch_ddp.tasks.train_run import Run
from prefect_torch_ddp.tasks.watch.beside_flow import flow_watched
from prefect_torch_ddp.tasks.watch.terminal import Display
from prefect_torch_ddp.tasks.watch.tracker_feed import trackers_fed

DEFAULTS = TrainParams()
PREPARED_AGAIN = "the data is prepared again"
EVALUATED_AGAIN = "the model is evaluated again"
RESUMED = "the training is submitted again and resumes from its newest checkpoint"

P = ParamSpec("P")
R = TypeVar("R")


# Its futures are PrefectDaskFutures.
@checked_first(refuse_early)
@flow(name="train-ddp", task_runner=DaskTaskRunner())  # type: ignore[arg-type]
def train_flow(params: TrainParams = DEFAULTS) -> TrainReport:
    """Prepare data, train with DDP on a Dask cluster, evaluate on held-out data, publish it all.

    Args:
        params: the parameters of the run; see TrainParams.

    Raises:
        InvalidParamsError: a parameter is invalid; raised before a rank starts.
        StorageError: the storage can't be used; also raised before a rank starts.
        RankFailedError: a rank failed in the last attempt. The message names the rank, host,
            attempt and cause.
        GangError: the gang failed in another way, such as GangHungError or NotEnoughWorkersError.
        CheckpointError: a checkpoint can't be written or restored, or `train` tracked nothing.
        CancelledRun: the run was cancelled by Ctrl-C, SIGTERM or Prefect. All ranks stopped after
            the same step and wrote its checkpoint.

    Example:
        Two ranks on this machine, the weights and the scores in `~/prefect-torch-ddp`:

            from prefect_torch_ddp import TrainParams, train_flow

            if __name__ == "__main__":
                params = TrainParams(workload="prefect_torch_ddp.examples.digits", world_size=2)
                report = train_flow(params)
                print(report.evaluation.accuracy, report.model_uri)
    """
    return quietly(lambda: _run(Run.from_params(params)))


@checked_first()
@flow(name="evaluate-checkpoint", task_runner=DaskTaskRunner())  # type: ignore[arg-type]
def evaluate_flow(
    checkpoint: str, storage: str | None = None, cluster: ClusterParams | None = None
) -> Report:
    """Evaluate a checkpoint of a train_flow run on held-out data. The run may still be training.

    Args:
        checkpoint: the checkpoint's URI, as given in the report and in the event
            prefect-torch-ddp.checkpoint.committed; or a run's URI, s3://bucket/prefix/runs/ID,
            for its newest checkpoint.
        storage: the block of the run's storage, if the storage needs its own credentials.
        cluster: the Dask cluster to evaluate on. None: one like the run's.

    Raises:
        InvalidParamsError: there is no record of such a run, or it isn't a run of train_flow.
        CheckpointError: the checkpoint no longer exists, or is damaged.
        CancelledRun: the run was cancelled by Ctrl-C, SIGTERM or Prefect.

    Example:
        Score the newest checkpoint of a run that may still train:

            from prefect_torch_ddp import evaluate_flow

            if __name__ == "__main__":
                print(evaluate_flow(f"runs/runs/{run_id}").accuracy)
    """
    return quietly(lambda: _evaluated(*Run.from_checkpoint(checkpoint, storage, cluster)))


def _evaluated(run: Run, point: ResumePoint) -> Report:
    params = run.params
    with _served(params):
        connect(params, run.storage)
        # The newest now, if it was given a run that still trains.
        chosen = point.checkpoint()
        return on_worker(evaluate, params, run, chosen, params.world_size)


def _run(run: Run) -> TrainReport:
    params = run.params
    with _served(params):
        with Display("cluster") as display:
            display.show("starting, or connecting to it")
            display.turn()
            is_here = connect(params, run.storage)
        with failure_published(run):
            dataset = _prepared(run, is_here=is_here)
        train_now = train.with_options(
            retries=params.retries, retry_delay_seconds=params.retry_delay_s
        )
        with trackers_fed(params, run.storage, run.experiment):
            with failure_published(run, by_task=True):
                training = _resubmitted(RESUMED, train_now, params, run, dataset)
            with failure_published(run):
                checkpoint = chosen_checkpoint(run, training)
                scored = run, checkpoint, training.world_size, training.attempt
                evaluation = _resubmitted(EVALUATED_AGAIN, evaluate, params, *scored)
                found = run, dataset, training, evaluation, checkpoint
                report: TrainReport
                if is_here:
                    with Display("publish"):
                        report = publish(*found)
                else:
                    report = result_of(publish.submit(*found), params)
    # The embedded server has no UI.
    url = url_for("flow-run", obj_id=flow_run.id) if PREFECT_UI_URL.value() else None
    for what, where in (("run in Prefect", url), ("report", report.report_uri)):
        if where is not None:
            get_run_logger().info("the %s: %s", what, where)
    return report.model_copy(update={"flow_run_url": url})


def _prepared(run: Run, *, is_here: bool) -> DatasetReport:
    # The result at each hop: a failed task's future would hide the cause from the next
    # (UnfinishedRun). Next to the cluster, what needs no ranks is done here: a Dask worker takes
    # 0.1 s to begin a task.
    there = run.find_dataset()
    prepare_now = prepare.with_options(refresh_cache=there is None)
    if there is None or not is_here:
        return _resubmitted(PREPARED_AGAIN, prepare_now, run.params, run)
    prepare_now(run)  # a result that Prefect kept may describe deleted data
    return there


@contextmanager
def _served(params: TrainParams) -> Iterator[None]:
    """Have all tasks use the flow run's server, and end should the flow's process be killed."""
    run_id, is_ours = UUID(flow_run.id), not params.cluster.is_running
    with flow_watched(run_id, params.stop_grace_s, ends_with_flow=is_ours), flow_server():
        yield


def _resubmitted(
    then: str, task: Task[P, R], params: TrainParams, *args: P.args, **kwargs: P.kwargs
) -> R:
    """Run a task on a Dask worker, and again if it is lost; `then` is what the log says of that."""
    # A Dask worker that dies under the task itself is out of reach of Prefect's retries, and costs
    # one of them all the same.
    left = params.retries
    while True:
        try:
            return on_worker(task, params, *args, **kwargs)
        except TASK_LOSS_ERRORS as error:
            # A cluster that is lost may take a minute to tell: not asked in vain.
            loss = TaskLoss(error, cluster_lives=left > 0 and cluster_lives())
            if decide(loss, None, left).action is Action.RAISE:
                raise
            left -= 1
            get_run_logger().warning("%s; %s", error, then)
