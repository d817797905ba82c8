"""Stopped processes are noticed only by their silence, here of 12 s."""

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from distributed import Client
from prefect import flow
from prefect.client.orchestration import get_client
from prefect_dask import DaskTaskRunner

from prefect_torch_ddp import (
    CheckpointParams,
    ClusterParams,
    RankContext,
    SchedulerLostError,
    TrainParams,
    TrainReport,
    WorkerLostError,
    ddp_task,
    run_gang,
    train_flow,
)
from prefect_torch_ddp.checkpoint.manifest import list_manifests
from prefect_torch_ddp.storage.directory import DirectoryStorage
from tests.integration.tasks.test_cancel import flow_process as flow_process_of
from tests.integration.tasks.test_flow_loss import lose_the_worker_of_the_train_task, params_of
from tests.support.flow_watches import is_watch
from tests.support.gangs import all_gone, pids_in, sleeping_gang, workers_of
from tests.support.runs import flow_run_id_of, newest_flow_run, steered, train_states
from tests.support.separate_cluster import SeparateCluster, end, separate_cluster, stop
from tests.support.waiting import HANG_S, wait_until
from tests.workloads import failing, plain, write_pid
from tests.workloads import flows as retried_flow
from tests.workloads.tiny import dask_worker_of

SILENT = "was silent for 12 s while it ran the task itself"
pytestmark = [pytest.mark.timeout(400), pytest.mark.usefixtures("short_liveness")]


@pytest.fixture
def others(tmp_path: Path) -> Iterator[SeparateCluster]:
    """Run a cluster of separate processes."""
    with separate_cluster(tmp_path / "cluster", 3) as cluster:
        yield cluster


def _call_gang(address: str, folder: str) -> None:
    with Client(address) as client:
        try:
            run_gang(client, failing.sleep_for_ever, args=(folder,), world_size=2)
        except WorkerLostError as error:
            write_pid(folder, "error", error)


@pytest.fixture
def caller(dask_client: Client, tmp_path: Path) -> Iterator[psutil.Process]:
    """Run a gang from another process, its ranks there."""
    args = dask_client.scheduler.address, str(tmp_path)
    process = multiprocessing.get_context("spawn").Process(target=_call_gang, args=args)
    process.start()
    assert process.pid is not None
    try:
        pids_in(tmp_path, 2)
        yield psutil.Process(process.pid)
    finally:
        if process.is_alive():
            end(psutil.Process(process.pid))
        process.join(HANG_S)


def test_a_stopped_caller(dask_client: Client, caller: psutil.Process, tmp_path: Path) -> None:
    """The ranks of a stopped caller end; once continued, it reports this and no cancel."""
    ranks = [psutil.Process(pid) for pid in pids_in(tmp_path, 2)]
    stop(caller)
    wait_until(lambda: all_gone(ranks))
    assert run_gang(dask_client, plain.sum_of_ones, world_size=2, queue_timeout_s=30) == [2.0, 2.0]
    caller.resume()
    wait_until((tmp_path / "error").exists)
    assert "had heard nothing from the caller for 12 s" in (tmp_path / "error").read_text()


def test_a_stopped_scheduler(others: SeparateCluster, tmp_path: Path) -> None:
    """A stopped scheduler is named after its silence, and the ranks end by themselves."""
    with (
        Client(others.address, timeout=10) as client,
        sleeping_gang(client, tmp_path / "pids") as (gang, ranks),
    ):
        stop(others.scheduler)
        try:
            error = gang.exception(HANG_S)
            assert isinstance(error, SchedulerLostError)
            assert f"the scheduler {others.address} was silent for 12 s" in str(error)
            wait_until(lambda: all_gone(ranks))
        finally:
            others.scheduler.resume()


def test_a_gang_leaves_a_silent_worker_out(others: SeparateCluster) -> None:
    """Two ranks run on the two workers that answer, without the stopped one."""
    with Client(others.address) as client:
        stop(next(iter(workers_of(client).values())))
        assert run_gang(client, plain.sum_of_ones, world_size=2) == [2.0, 2.0]


@pytest.mark.usefixtures("prefect_api")
def test_the_scheduler_of_a_run_is_stopped(others: SeparateCluster, tmp_path: Path) -> None:
    """A stopped scheduler of a shared cluster is a clear error, and no task run stays Running."""
    params = params_of(tmp_path, "pause", 2, cluster=ClusterParams(address=others.address))
    with ThreadPoolExecutor(1) as pool:
        rank = pool.submit(_stop_when_marked, others.scheduler, tmp_path / "mark" / "0")
        try:
            with pytest.raises(SchedulerLostError, match="was silent for 12 s"):
                train_flow(params)
            ranks = [rank.result()]
            wait_until(lambda: all_gone(ranks))
        finally:
            others.scheduler.resume()
    wait_until(lambda: "Running" not in train_states(newest_flow_run().id))


def stop_own_worker(ctx: RankContext, pid_folder: str) -> None:
    """SIGSTOP the Dask worker that this rank hangs from."""
    write_pid(pid_folder, ctx.rank)
    os.kill(dask_worker_of(os.getpid()), signal.SIGSTOP)
    signal.pause()


@pytest.mark.usefixtures("prefect_api")
def test_a_ddp_task_whose_worker_was_stopped_is_submitted_again(tmp_path: Path) -> None:
    """The next call with the same key resumes the training on other workers."""
    with separate_cluster(tmp_path / "cluster", 3) as cluster, ThreadPoolExecutor(1) as pool:
        often, store = CheckpointParams(every_s=None, every_steps=3), str(tmp_path / "store")
        train = ddp_task(world_size=2, seed=5, checkpoint=often, storage=store)
        training = train(retried_flow.fit).with_options(name="train", run_key="loss")
        stopping = pool.submit(_stop_worker_of_task_when_marked, cluster.address, tmp_path / "mark")

        @flow(task_runner=DaskTaskRunner(address=cluster.address))
        def trains() -> tuple[Any, Any]:
            whole = training(None)
            with pytest.raises(WorkerLostError, match=SILENT):
                training.submit(None, 2, str(tmp_path / "mark")).result()
            return whole, training.submit(None, 2, str(tmp_path / "mark")).result()

        whole, resumed = trains()
        stopping.result()
    assert (resumed["attempt"], resumed["weights"]) == (2, whole["weights"])
    assert resumed["made"][0] in (4, 7)
    assert sorted(train_states(newest_flow_run().id)) == ["Completed", "Completed", "Crashed"]


def _stop_worker_of_task_when_marked(address: str, mark: Path) -> None:
    """Stop the Dask worker that runs the task itself, when its training has come far enough."""
    wait_until(mark.exists)
    with Client(address) as client:
        running = client.processing().items()
        (of_task,) = (at for at, keys in running if any(key.startswith("train-") for key in keys))
        process = psutil.Process(client.run(os.getpid, workers=[of_task])[of_task])
    stop(process)


@pytest.mark.usefixtures("prefect_api")
def test_the_worker_of_a_ddp_task_is_stopped(tmp_path: Path) -> None:
    """The flow learns that the worker is silent, and the task run is Crashed."""
    task = ddp_task(world_size=1, storage=str(tmp_path / "store"))(stop_own_worker)
    stopping = task.with_options(name="train")
    heard = []
    workers = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": ":0"}

    @flow(task_runner=DaskTaskRunner(cluster_kwargs=workers))
    def waiting() -> None:
        with pytest.raises(WorkerLostError, match=SILENT) as error:
            stopping.submit(str(tmp_path)).result()
        heard.append(error.value)
        wait_until(lambda: not psutil.pid_exists(int((tmp_path / "0").read_text())))

    waiting()
    assert heard
    assert train_states(newest_flow_run().id) == ["Crashed"]


def _stop_when_marked(process: psutil.Process, mark: Path) -> psutil.Process:
    """Stop a process when the training has come far enough; return rank 0."""
    wait_until(mark.exists)
    rank = psutil.Process(int(mark.read_text()))
    stop(process)
    return rank


@pytest.mark.usefixtures("prefect_api")
def test_the_worker_of_the_train_task_is_stopped(tmp_path: Path) -> None:
    """A stopped worker has the effects of a killed one, after its silence."""
    lose_the_worker_of_the_train_task(tmp_path, "stop_grandparent")


@pytest.mark.usefixtures("prefect_api")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("where", ["ours", "others"])
def test_a_rank_of_a_run_loses_its_worker(how: signal.Signals, where: str, tmp_path: Path) -> None:
    """The training resumes once after the worker of rank 0 is killed or stopped."""
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(1) as pool:
        more = {}
        if where == "others":
            cluster = stack.enter_context(separate_cluster(tmp_path / "cluster", 3))
            more = {"cluster": ClusterParams(address=cluster.address)}
        hurt = pool.submit(_hurt_worker_when_marked, how, tmp_path / "mark" / "0")
        report = train_flow(params_of(tmp_path, "pause", 2, **more))
        hurt.result()
    check_resumed_once(report)


def _hurt_worker_when_marked(how: signal.Signals, mark: Path) -> None:
    wait_until(mark.exists)
    os.kill(dask_worker_of(int(mark.read_text())), how)


def check_resumed_once(report: TrainReport) -> None:
    """Expect a second attempt that resumed from the first one's checkpoint, and no task run
    that is still Running."""
    assert report.training.attempt == 2
    assert report.training.resumed_from_step in (5, 10)
    states = train_states(flow_run_id_of(report.flow_run_url))
    assert states in (["Completed"], ["Completed", "Crashed"])


@contextlib.contextmanager
def flow_in_a_process(params: TrainParams, folder: Path, mark: Path) -> Iterator[psutil.Process]:
    """Run train_flow from a separate process, as a script does; yield it when the training
    has left its mark."""
    with flow_process_of(folder, params.model_dump_json()) as process:
        wait_until(mark.exists, 200)
        yield psutil.Process(process.pid)


@pytest.fixture
def flow_process(prefect_api: str, tmp_path: Path) -> Iterator[psutil.Process]:
    """Run train_flow on a local cluster; it pauses once a checkpoint is there."""
    params, mark = params_of(tmp_path, "pause", 2), tmp_path / "mark" / "0"
    with flow_in_a_process(params, tmp_path, mark) as process:
        yield process


def test_the_flow_process_is_killed(flow_process: psutil.Process, tmp_path: Path) -> None:
    """A flow that is killed with its local cluster leaves nothing, and no state stays Running."""
    family = flow_process.children(recursive=True)
    assert any(member.pid == int((tmp_path / "mark" / "0").read_text()) for member in family)
    working = [member for member in family if not is_watch(member)]
    flow_process.kill()
    wait_until(lambda: all_gone(working))
    wait_until(lambda: all_gone(family))
    assert train_states(newest_flow_run().id) == ["Crashed"]
    assert flow_state() == "Crashed"


@pytest.mark.usefixtures("prefect_api")
def test_the_flow_process_is_killed_beside_a_cluster_of_others(
    others: SeparateCluster, tmp_path: Path
) -> None:
    """On a shared cluster the ranks of a killed flow stop with a checkpoint."""
    params = steered(tmp_path, world_size=2, cluster=ClusterParams(address=others.address))
    with flow_in_a_process(params, tmp_path, tmp_path / "step") as process:
        ranks = [psutil.Process(pid) for pid in pids_in(tmp_path, 2)]
        watch = [child for child in process.children() if is_watch(child)]
        process.kill()
        wait_until(lambda: all_gone(ranks))
        wait_until(lambda: all_gone(watch))
    assert train_states(newest_flow_run().id) == ["Cancelled"]
    assert flow_state() == "Crashed"
    (run,) = (tmp_path / "store" / "runs").iterdir()
    assert list_manifests(DirectoryStorage(tmp_path / "store"), run.name)
    with Client(others.address) as client:
        assert run_gang(client, plain.sum_of_ones, world_size=2) == [2.0, 2.0]


def flow_state() -> str | None:
    """Return the state of the flow run that began last."""
    with get_client(sync_client=True) as client:
        return client.read_flow_run(newest_flow_run().id).state_name


def test_the_flow_process_is_stopped(flow_process: psutil.Process, tmp_path: Path) -> None:
    """The ranks of a stopped flow end; once continued, the run resumes and completes."""
    rank = psutil.Process(int((tmp_path / "mark" / "0").read_text()))
    stop(flow_process)
    wait_until(lambda: all_gone([rank]))
    flow_process.resume()
    flow_process.wait(200)
    output = (tmp_path / "said").read_text()
    assert "attempt 2 10" in output or "attempt 2 5" in output, output[-3000:]
    assert "Running" not in train_states(newest_flow_run().id)
