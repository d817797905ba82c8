"""A run loses its train task's worker, or its scheduler."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any
from uuid import UUID

import psutil
import pytest
from prefect import flow, unmapped
from prefect.futures import as_completed, wait
from prefect_dask import DaskTaskRunner

from prefect_torch_ddp import (
    CheckpointParams,
    ClusterParams,
    NotEnoughWorkersError,
    RankContext,
    SchedulerLostError,
    TrainParams,
    ddp_task,
    train_flow,
)
from prefect_torch_ddp.errors import SupervisorLostError
from prefect_torch_ddp.records.run_record import list_run_records
from prefect_torch_ddp.storage.directory import DirectoryStorage
from tests.support.runs import (
    flow_run_id_of,
    newest_flow_run,
    report_of,
    train_states,
    wait_until_said,
)
from tests.support.separate_cluster import SeparateCluster, end, separate_cluster, stop
from tests.support.waiting import HANG_S, wait_until
from tests.workloads import write_pid

pytestmark = [
    pytest.mark.long,
    pytest.mark.usefixtures("prefect_api", "short_liveness"),
]


def params_of(tmp_path: Path, how: str, world_size: int, **more: object) -> TrainParams:
    """Let rank 0 go wrong in the first attempt once a checkpoint is there; one retry is
    left."""
    (tmp_path / "mark").mkdir()
    fault = {"how": how, "step": 12, "rank": 0, "attempts": [1], "mark": str(tmp_path / "mark")}
    return TrainParams(
        workload="tests.workloads.tiny",
        storage=str(tmp_path / "store"),
        world_size=world_size,
        options={"fault": fault},
        retries=1,
        retry_delay_s=0.1,
        stop_grace_s=3.0,  # a rank that pauses uses it up
        checkpoint=CheckpointParams(every_s=None, every_steps=5),
        **more,
    )


def lose_the_worker_of_the_train_task(tmp_path: Path, how: str) -> None:
    """Expect that a new one is started, the task run is Crashed, and the training resumes."""
    report = train_flow(params_of(tmp_path, how, world_size=1))
    assert report.training.attempt == 2
    assert report.training.resumed_from_step in (5, 10)
    assert train_states(flow_run_id_of(report.flow_run_url)) == ["Completed", "Crashed"]


def test_the_worker_of_the_train_task_is_lost(tmp_path: Path) -> None:
    """The train task's own Dask worker gets SIGKILL; chaos stops it instead."""
    lose_the_worker_of_the_train_task(tmp_path, "kill_grandparent")


def test_a_run_that_is_lost_for_good_has_failed(tmp_path: Path) -> None:
    """Its record and its page say so, and how to continue, though the task can't."""
    params = params_of(tmp_path, "kill_grandparent", world_size=1)
    with pytest.raises(SupervisorLostError) as raised:
        train_flow(params.model_copy(update={"retries": 0}))
    (record,) = list_run_records(DirectoryStorage(tmp_path / "store"))
    assert record.state == "failed"
    assert record.cause.startswith("SupervisorLostError: Dask worker ")
    assert f'to continue: resume_from="{record.run_id}"' in raised.value.__notes__
    assert record.flow_run_id is not None
    top = report_of(UUID(record.flow_run_id)).partition("\n## ")[0]
    assert top.startswith("# tiny: failed")
    assert "died while it ran the task itself" in top
    assert f'resume_from="{record.run_id}"' in top


def test_a_run_whose_retry_never_begins_has_failed(tmp_path: Path) -> None:
    """It stayed 'failed, tried again' by its first failure, though no worker was left to try."""
    params = params_of(tmp_path, "raise", 1, max_restarts=0, workers_timeout_s=3.0)
    with separate_cluster(tmp_path / "cluster", 1) as cluster, ThreadPoolExecutor(1) as pool:
        (nanny,) = cluster.nannies
        changes = {"cluster": ClusterParams(address=cluster.address), "retry_delay_s": HANG_S}
        killing = pool.submit(_kill_when_tried_again, nanny, tmp_path / "store")
        with pytest.raises(NotEnoughWorkersError) as raised:
            train_flow(params.model_copy(update=changes))
        killing.result()
    (record,) = list_run_records(DirectoryStorage(tmp_path / "store"))
    assert (record.state, record.is_tried_again) == ("failed", False)
    assert record.cause.startswith("NotEnoughWorkersError: the cluster has had no worker for 3 s")
    assert [each.cause.rpartition(": ")[2] for each in record.attempts] == ["told to fail"]
    assert f'to continue: resume_from="{record.run_id}"' in raised.value.__notes__
    assert record.flow_run_id is not None
    top = report_of(UUID(record.flow_run_id)).partition("\n## ")[0]
    assert "the cluster has had no worker" in top
    assert "told to fail" not in top


def _kill_when_tried_again(nanny: psutil.Process, store: Path) -> None:
    """Kill a Dask worker for good when the failure of its train task is on record."""
    wait_until(
        lambda: any(each.is_tried_again for each in list_run_records(DirectoryStorage(store)))
    )
    end(nanny)


def test_the_worker_of_the_evaluate_task_is_lost(tmp_path: Path) -> None:
    """It gets SIGKILL once the training is over, which is evaluated again."""
    params = TrainParams(
        workload="tests.workloads.tiny",
        storage=str(tmp_path / "store"),
        world_size=1,
        options={"fail_evaluation_once": str(tmp_path / "failed"), "kills_worker": True},
        retries=1,
    )
    report = train_flow(params)
    assert report.evaluation.num_samples == 21
    assert report.training.attempt == 1
    flow_run_id = flow_run_id_of(report.flow_run_url)
    assert train_states(flow_run_id, "evaluate") == ["Completed", "Crashed"]
    wait_until_said(flow_run_id, "died while it ran the task itself; the model is evaluated again")


def test_the_worker_of_the_prepare_task_is_lost(tmp_path: Path) -> None:
    """It gets SIGKILL while Dask computes the dataset, which is then prepared again."""
    params = TrainParams(
        workload="tests.workloads.dask_table",
        storage=str(tmp_path / "store"),
        world_size=1,
        data_options={"hold": str(tmp_path)},
        retries=1,
    )
    with ThreadPoolExecutor(1) as pool:
        killing = pool.submit(_kill_only_worker, tmp_path)
        report = train_flow(params)
        killing.result()
    assert report.training.value["rows"] == 500
    flow_run_id = flow_run_id_of(report.flow_run_url)
    assert train_states(flow_run_id, "prepare") == ["Completed", "Crashed"]
    wait_until_said(flow_run_id, "died while it ran the task itself; the data is prepared again")
    files = list((tmp_path / "store/datasets").rglob("*.parquet"))
    assert len(files) == report.dataset.num_files == 5


def _kill_only_worker(folder: Path) -> None:
    """Kill the Dask worker that computes a partition; let the next one compute all."""
    wait_until(lambda: any(folder.glob("begun-*[0-9]")))
    mark = next(folder.glob("begun-*[0-9]"))
    psutil.Process(int(mark.read_text())).kill()
    (folder / "release").touch()


def test_the_scheduler_is_killed(others: SeparateCluster, tmp_path: Path) -> None:
    """The flow reports a killed shared scheduler at once, and no task run stays Running."""
    params = params_of(tmp_path, "pause", 2, cluster=ClusterParams(address=others.address))
    with ThreadPoolExecutor(1) as pool:
        killing = pool.submit(_kill_when_marked, others.scheduler, tmp_path / "mark" / "0")
        with pytest.raises(SchedulerLostError):
            train_flow(params)
        killing.result()
    assert "Running" not in train_states(newest_flow_run().id)


def _kill_when_marked(scheduler: psutil.Process, mark: Path) -> None:
    """Kill the scheduler when the training has come far enough; expect rank 0 to end."""
    wait_until(mark.exists)
    rank = psutil.Process(int(mark.read_text()))
    scheduler.kill()
    wait_until(lambda: not rank.is_running())


def hold(ctx: RankContext, folder: str, name: str) -> None:
    """Leave the rank's pid, and wait until its worker is lost."""
    write_pid(Path(folder), name)
    Event().wait()


@pytest.mark.parametrize("how", ["mapped", "as completed", "with a limit", "for its state"])
def test_the_worker_of_a_submitted_task_is_stopped(
    others: SeparateCluster, tmp_path: Path, how: str
) -> None:
    """Whoever waits for mapped calls, or for a call's state, hears of it as with `result`."""
    train: Any = ddp_task(world_size=1, storage=str(tmp_path / "store"))(hold)

    @flow(task_runner=DaskTaskRunner(address=others.address))
    def waits() -> None:
        if how == "mapped":
            train.map(unmapped(str(tmp_path)), ["rank"]).result()
        if how == "as completed":
            for each in as_completed(train.map(unmapped(str(tmp_path)), ["rank"])):
                each.result()
        if how == "with a limit":
            # Far below the 300 s after which Dask itself drops the worker.
            done, left = wait(train.map(unmapped(str(tmp_path)), ["rank"]), timeout=2 * HANG_S)
            assert not left
            done.pop().result()
        state = train.submit(str(tmp_path), "rank", return_state=True)
        assert state.is_crashed()
        raise SupervisorLostError(state.message)

    with ThreadPoolExecutor(1) as pool:
        stopping = pool.submit(_stop_worker_of, tmp_path / "rank")
        with pytest.raises(SupervisorLostError, match="was silent for"):
            waits()
        stopping.result()


def _stop_worker_of(pid: Path) -> None:
    """Stop the Dask worker of a rank."""
    wait_until(lambda: pid.exists() and pid.read_text())
    stop(psutil.Process(int(pid.read_text())).parents()[1])
