"""Gangs and train_flow run on shared clusters, and on a cluster class with its arguments."""

import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import dask
import psutil
import pytest
from dask.system import CPU_COUNT
from distributed import Client, LocalCluster, Lock, Worker
from distributed.scheduler import KilledWorker
from prefect import flow, task
from prefect.client.orchestration import get_client
from prefect_dask import DaskTaskRunner

from prefect_torch_ddp import (
    CheckpointParams,
    ClusterParams,
    InvalidParamsError,
    NotEnoughWorkersError,
    RankContext,
    TrainParams,
    TrainReport,
    ddp_task,
    evaluate_flow,
    run_gang,
    train_flow,
)
from prefect_torch_ddp.errors import SupervisorLostError
from prefect_torch_ddp.gang.worker.nanny import LOG_LEVEL
from prefect_torch_ddp.tasks.clusters import current
from prefect_torch_ddp.tasks.clusters.local_cluster import HEARTBEAT_S, local_cluster
from prefect_torch_ddp.tasks.watch.task_watch import TaskWatch
from prefect_torch_ddp.tasks.watch.watched_task import follow
from tests.integration.tasks.test_run_record import events_of, only_record
from tests.support.gangs import all_gone, extra_worker, pids_in
from tests.support.runs import flow_run_id_of, steered, task_runs_of, wait_until_said
from tests.support.separate_cluster import separate_cluster
from tests.support.waiting import HANG_S, wait_until
from tests.workloads import plain

pytestmark = [pytest.mark.extended, pytest.mark.usefixtures("prefect_api")]


def check(report: TrainReport, prepared: str = "Completed") -> None:
    """Expect a whole run: trained, evaluated, all four tasks and the run itself Completed, both
    ranks heard."""
    training = report.training
    found = (training.world_size, training.num_epochs, report.evaluation.num_samples)
    assert found == (2, 3, 21)
    assert Path(str(report.model_uri)).exists()
    flow_run_id = flow_run_id_of(report.flow_run_url)
    with get_client(sync_client=True) as client:
        assert client.read_flow_run(flow_run_id).state_name == "Completed"
    rest = dict.fromkeys(("train", "evaluate", "publish"), "Completed")
    runs = task_runs_of(flow_run_id, "prepare", *rest)
    states = {name: run.state_name for name, run in runs.items()}
    assert states == {"prepare": prepared, **rest}
    for rank in (0, 1):
        wait_until_said(flow_run_id, f"[rank {rank}] step 1")


@pytest.mark.long
def test_scheduler_and_workers_of_others(tmp_path: Path) -> None:
    """Runs on a cluster by its address, or the flow's own runner, complete; the cluster stays."""
    with separate_cluster(tmp_path / "cluster") as cluster:
        with Client(cluster.address) as client:
            before = sorted(client.scheduler_info(n_workers=-1)["workers"])
            for function in (plain.sum_of_ones, "tests.workloads.plain:sum_of_ones"):
                assert run_gang(client, function, world_size=2) == [2.0, 2.0]
        params = TrainParams(
            workload="tests.workloads.tiny",
            storage=str(tmp_path / "store"),
            cluster=ClusterParams(address=cluster.address),
        )
        own: Any = DaskTaskRunner(address=cluster.address)
        by_its_runner = train_flow.with_options(task_runner=own)
        first = train_flow(params)
        could_grow = params.model_copy(update={"cluster": ClusterParams(), "max_world_size": 3})
        second = by_its_runner(could_grow)
        check(first)
        check(second, prepared="Cached")
        assert first.evaluation == second.evaluation
        again = evaluate_flow(f"{tmp_path / 'store'}/runs/{second.run_id}")  # on one of its own
        assert again.metrics == second.evaluation.metrics
        with Client(cluster.address) as client:
            assert sorted(client.scheduler_info(n_workers=-1)["workers"]) == before
            assert not any(client.processing().values())


@pytest.mark.parametrize(
    "described", [{"cluster_kwargs": {"n_workers": 4}}, {"adapt_kwargs": {"maximum": 4}}], ids=str
)
def test_a_cluster_that_an_open_client_would_replace_is_refused(
    described: dict[str, Any], tmp_path: Path
) -> None:
    """prefect-dask takes the open client's cluster, and would make that one adaptive."""
    params = TrainParams(
        workload="tests.workloads.tiny", storage=str(tmp_path), cluster=ClusterParams(**described)
    )
    with (
        LocalCluster(n_workers=1, processes=False, dashboard_address=None) as cluster,
        Client(cluster),
        pytest.raises(InvalidParamsError, match=f"client of {cluster.scheduler_address} is open"),
    ):
        train_flow(params)


def test_a_cluster_object_that_prefect_drops_is_refused(tmp_path: Path) -> None:
    """A flow run's task runner hasn't got it, and would start a local cluster in its place."""
    in_threads = {"n_workers": 1, "processes": False, "dashboard_address": None}
    with LocalCluster(**in_threads) as cluster:
        own: Any = DaskTaskRunner(cluster=cluster)

        @ddp_task(world_size=1, storage=str(tmp_path))
        def fit(ctx: RankContext) -> None:
            """Train nothing."""

        @flow(task_runner=own)
        def called() -> None:
            fit()

        @flow(task_runner=own)
        def submitted() -> None:
            fit.submit()

        @task
        def submits() -> None:
            fit.submit()

        trains = train_flow.with_options(task_runner=own)
        params = TrainParams(workload="tests.workloads.tiny", storage=str(tmp_path))
        says = f"never hands .*DaskTaskRunner.address='{cluster.scheduler_address}'.*or open a"
        for run in (called, submitted, flow(task_runner=own)(submits), partial(trains, params)):
            with pytest.raises(InvalidParamsError, match=says):
                run()


class HandsOn(DaskTaskRunner):
    """A task runner that hands its cluster to each flow run's."""

    def duplicate(self) -> Any:
        """Return one of the same cluster."""
        return type(self)(cluster=self._cluster)


def test_a_cluster_object_that_the_run_uses_trains_what_is_called(tmp_path: Path) -> None:
    """Through an open client of it, or a runner that hands it on; what is submitted would pickle
    it."""
    given: dict[str, Any] = {"n_workers": 1, "dashboard_address": "127.0.0.1:0"}
    with LocalCluster(**given) as cluster, LocalCluster(**given, processes=False) as another:

        @ddp_task(world_size=1, storage=str(tmp_path))
        def fit(ctx: RankContext) -> list[int]:
            return [each.pid for each in psutil.Process().parents()]

        def called() -> None:
            assert cluster.workers[0].pid in fit()

        def submitted() -> None:
            fit.submit()

        def refused(run: Any, says: str) -> None:
            own: Any = DaskTaskRunner(cluster=cluster)
            with pytest.raises(InvalidParamsError, match=says):
                flow(task_runner=own)(run)()

        for at in (cluster, cluster.scheduler_address):
            with Client(at):
                own: Any = DaskTaskRunner(cluster=cluster)
                flow(task_runner=own)(called)()
                refused(submitted, "most clusters can't be pickled: write DaskTaskRunner.address=")
        hands_on: Any = HandsOn(cluster=cluster)
        flow(task_runner=hands_on)(called)()
        with Client(another):
            refused(called, f"never hands .* would use {another.scheduler_address}")


def test_the_workers_of_an_open_client_are_not_the_runs_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other work may run there, so a silent one isn't the run's to restart."""
    asked: list[bool] = []

    def noted(*args: Any, owns_workers: bool, **options: Any) -> None:
        asked.append(owns_workers)
        follow(*args, owns_workers=owns_workers, **options)

    monkeypatch.setattr(current, "follow", noted)
    in_threads = {"n_workers": 1, "processes": False, "dashboard_address": None}

    @flow(task_runner=DaskTaskRunner(cluster_kwargs=in_threads))  # type: ignore[arg-type]
    def once() -> int:
        return current.result_of(task(lambda: 7).submit(), TrainParams())

    assert once() == 7
    with LocalCluster(**in_threads) as cluster, Client(cluster):
        assert once() == 7
    assert asked == [True, False]


def test_the_ranks_of_a_local_cluster_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks have as many threads as there are cores, and the cluster changes no setting here."""
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("DASK_LOGGING__DISTRIBUTED")
    with (
        local_cluster(n_workers=2, ranks_per_worker=CPU_COUNT) as cluster,
        Client(cluster) as client,
    ):
        for name, told in (("OMP_NUM_THREADS", "1"), ("DASK_LOGGING__DISTRIBUTED", "warning")):
            assert list(client.run(os.getenv, name).values()) == [told, told]
        assert "DASK_LOGGING__DISTRIBUTED" not in os.environ


def test_what_is_given_to_a_local_cluster_is_added_to_what_makes_it_safe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Variables of the user's and options of the scheduler; and all workers share the cores."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    given = {"env": {"MINE": "1"}, "scheduler_kwargs": {"idle_timeout": "1h"}}
    with local_cluster(n_workers=2, **given) as cluster, Client(cluster) as client:
        assert set(client.run(os.getenv, "MINE").values()) == {"1"}
        threads = set(client.run(os.getenv, "OMP_NUM_THREADS").values())
        assert threads == {str(max(1, CPU_COUNT // 2))}
        assert cluster.scheduler.allowed_failures == 0
    with local_cluster() as cluster, Client(cluster) as client:
        threads = client.run(os.getenv, "OMP_NUM_THREADS").values()
        assert sum(map(int, threads)) <= CPU_COUNT


README = (Path(__file__).parents[4] / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("level", ["", "info"], ids=lambda level: level or "nothing")
def test_a_task_logs_no_lines_of_dask_unless_the_user_wants_them(
    tmp_path: Path, level: str
) -> None:
    """The README's task, in a flow with a local cluster of this package."""
    blocks = README.split("```python\n")
    (program,) = (each.partition("\n```")[0] for each in blocks if "@ddp_task(" in each)
    (tmp_path / "line.py").write_text(program, encoding="utf-8")
    home = {"HOME": str(tmp_path)}  # whose storage is the default one
    environment = os.environ | home | {"PREFECT_LOGGING_LEVEL": "INFO", LOG_LEVEL: level}
    if not level:
        del environment[LOG_LEVEL]
    command = [sys.executable, "line.py"]
    run = {"cwd": tmp_path, "env": environment, "text": True, "timeout": 240}
    done = subprocess.run(command, check=True, capture_output=True, **run)
    assert "attempt 1 trains" in done.stderr
    of_dask = re.findall(r"^.*\bINFO\b.* distributed\.\w+ - .*$", done.stderr, re.MULTILINE)
    assert bool(of_dask) == bool(level), done.stderr


def test_the_workers_of_a_local_cluster_send_few_heartbeats() -> None:
    """Few heartbeats take little time of the cores on which ranks train."""

    def interval_ms(dask_worker: Worker) -> float:
        return dask_worker.periodic_callbacks["heartbeat"].callback_time

    with local_cluster(n_workers=1) as cluster, Client(cluster) as client:
        wait_until(lambda: [*client.run(interval_ms).values()] == [1000 * HEARTBEAT_S])


def test_a_local_cluster_frees_the_lock_of_a_killed_worker_soon() -> None:
    """With Dask's own settings the next who needs it waits 30 s and more."""

    def die_with_it() -> None:
        Lock("one").acquire()
        os.kill(os.getpid(), signal.SIGKILL)

    with local_cluster(n_workers=1) as cluster, Client(cluster) as client:
        with pytest.raises(KilledWorker):
            client.submit(die_with_it).result(timeout=HANG_S)
        assert Lock("one").acquire(timeout=20)


def test_the_workers_of_a_local_cluster_load_torch_as_they_start() -> None:
    """The first gang's ranks are forked from a server that started with the worker."""

    def servers() -> list[int]:
        children = psutil.Process().children()
        return [each.pid for each in children if each.name() == "ddp-fork-server"]

    with local_cluster(n_workers=1) as cluster, Client(cluster) as client:
        wait_until(lambda: len(*client.run(servers).values()) == 1)
        ((ahead,),) = client.run(servers).values()
        assert run_gang(client, os.getppid, world_size=1) == [ahead]


UNGUARDED = """
import os, sys, time
print("the script runs", flush=True)
from distributed import Client
from prefect_torch_ddp.tasks.clusters.local_cluster import local_cluster
cluster = local_cluster(n_workers=1)
client = Client(cluster)
both = lambda: list(client.run(lambda: (os.getpid(), os.getppid())).values())
print(*both()[0], flush=True)
for _ in sys.stdin:
    found = []
    while not found:
        try:
            found = both()
        except Exception:
            time.sleep(0.1)
    print(*found[0], flush=True)
client.close()
cluster.close()
"""


def test_workers_never_run_the_callers_script(tmp_path: Path) -> None:
    """No worker runs the script, at the start or as a replacement, and none outlives the caller."""
    script, pipe = tmp_path / "unguarded.py", subprocess.PIPE
    script.write_text(UNGUARDED, encoding="utf-8")
    command = [sys.executable, str(script)]
    with (
        subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1) as caller,
        ExitStack() as ending,
    ):
        assert caller.stdin is not None
        assert caller.stdout is not None
        ending.callback(caller.kill)  # or a test that fails would wait for it
        assert caller.stdout.readline() == "the script runs\n"
        worker, nanny = (psutil.Process(int(pid)) for pid in caller.stdout.readline().split())
        for victim in (worker, nanny):
            victim.kill()
            wait_until(partial(all_gone, [worker]))
            caller.stdin.write("again\n")
            pids = map(int, caller.stdout.readline().split())
            worker, nanny = (psutil.Process(pid) for pid in pids)
        assert all(process.is_running() for process in (worker, nanny))
        caller.kill()
        wait_until(partial(all_gone, [worker, nanny]))
        assert caller.stdout.read() == ""


def test_a_worker_whose_replacement_takes_long_is_not_given_up() -> None:
    """Dask's own cluster closes it for ever, by default if the other isn't there after 15 s."""
    with (
        dask.config.set({"distributed.deploy.lost-worker-timeout": "10 ms"}),
        local_cluster(n_workers=1) as cluster,
        Client(cluster) as client,
    ):
        (pid,) = client.run(os.getpid).values()
        psutil.Process(pid).kill()
        wait_until(lambda: not client.scheduler_info()["workers"])
        wait_until(lambda: len(client.scheduler_info()["workers"]) == 1)
        assert list(cluster.workers) == [0], "it isn't closed"
        assert client.submit(os.getpid).result(HANG_S) != pid


def test_a_cluster_without_any_worker_is_not_waited_for_without_end(tmp_path: Path) -> None:
    """The run fails after `workers_timeout_s`, and says what it waited for."""
    with LocalCluster(n_workers=0, dashboard_address="127.0.0.1:0") as cluster:
        params = TrainParams(
            workload="tests.workloads.tiny",
            storage=str(tmp_path / "store"),
            cluster=ClusterParams(address=cluster.scheduler_address),
            workers_timeout_s=1.5,
        )
        with pytest.raises(NotEnoughWorkersError, match=r"no worker for 1.5 s \(workers_timeout"):
            train_flow(params)


def test_a_worker_that_cant_be_replaced_at_once_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says so, and no connection to the killed workers stays open."""

    def nannies() -> list[int]:
        try:
            return [*client.run(os.getppid).values()]
        except OSError:  # its end is not known yet
            return []

    def connections() -> int:
        return len(psutil.Process().net_connections("unix"))

    with local_cluster(n_workers=1) as cluster, Client(cluster) as client:
        num_before, (killed,) = connections(), nannies()
        with monkeypatch.context() as broken:
            broken.setattr(sys, "executable", "/nowhere/python")
            psutil.Process(killed).kill()
            wait_until(lambda: "a killed worker could not be replaced" in caplog.text)
        wait_until(lambda: any(pid != killed for pid in nannies()))
        wait_until(lambda: connections() == num_before)


class QueuedCluster(LocalCluster):
    """A cluster as a batch system's: it is made at once, and its first job starts later."""

    made: ClassVar[list["QueuedCluster"]] = []

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(n_workers=0, threads_per_worker=1, dashboard_address="127.0.0.1:0")
        self.made.append(self)


@pytest.mark.long
def test_a_first_worker_that_comes_late_is_waited_for_if_the_run_made_the_cluster(
    tmp_path: Path,
) -> None:
    """A job may queue for longer than `workers_timeout_s`."""
    limit_s = 0.5
    params = TrainParams(
        workload="tests.workloads.tiny",
        storage=str(tmp_path / "store"),
        cluster=ClusterParams(cluster_class=f"{__name__}.{QueuedCluster.__name__}"),
        workers_timeout_s=limit_s,
        world_size=1,
    )
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(train_flow, params)
        try:
            wait_until(lambda: QueuedCluster.made or running.done())
            began_s = time.monotonic()
            wait_until(lambda: running.done() or time.monotonic() - began_s > 10 * limit_s)
            assert not running.done()
        finally:
            QueuedCluster.made.pop().scale(1)
        assert running.result().training.world_size == 1


def test_a_cluster_that_is_emptied_under_a_task_is_a_loss_of_the_task() -> None:
    """The flow submits the task again if the cluster once had workers."""
    options = {"n_workers": 1, "threads_per_worker": 1, "dashboard_address": "127.0.0.1:0"}
    with LocalCluster(**options) as cluster, Client(cluster) as client:
        future = client.submit(time.sleep, HANG_S)
        wait_until(lambda: any(client.processing().values()))
        watch = TaskWatch(client, future, owns_workers=False, workers_timeout_s=0.5)
        watch.look()
        cluster.scale(0)
        with pytest.raises(SupervisorLostError, match="the cluster lost all its workers"):
            wait_until(watch.look)


@pytest.mark.long
def test_cluster_class_with_arguments(tmp_path: Path) -> None:
    """A run makes a cluster from an import path and arguments, and closes it at the end."""
    import dask

    kwargs = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": "127.0.0.1:0"}
    kwargs |= {"security": True}  # TLS, by certificates of its own
    cluster = ClusterParams(cluster_class="distributed.LocalCluster", cluster_kwargs=kwargs)
    params = TrainParams(
        workload="tests.workloads.tiny", storage=str(tmp_path / "store"), cluster=cluster
    )
    # Else Dask leaves the workers' OMP_NUM_THREADS and more in this process.
    with dask.config.set({"distributed.nanny.pre-spawn-environ": {}}):
        check(train_flow(params))


def test_a_folder_that_a_workers_host_does_not_share(tmp_path: Path) -> None:
    """Before it prepares, the flow notices that a worker's host has another folder there."""
    storage = tmp_path / "store"
    storage.mkdir()
    mount = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs none "{storage}" && exec "$@"']
    if subprocess.run([*mount, "sh", "true"], check=False, capture_output=True).returncode:
        pytest.skip("mount namespaces need root")
    command = ["worker", "--no-nanny", "--no-dashboard", "--host", "127.0.0.2"]
    with LocalCluster(n_workers=0, dashboard_address="127.0.0.1:0") as cluster:
        address = cluster.scheduler_address
        worker = subprocess.Popen(
            [*mount, "sh", sys.executable, "-m", "dask", *command, address], cwd=tmp_path
        )
        try:
            with Client(cluster) as client:
                client.wait_for_workers(1, timeout=HANG_S)
            params = TrainParams(
                workload="tests.workloads.tiny",
                storage=str(storage),
                cluster=ClusterParams(address=address),
            )
            says = rf"the hosts don't share the storage .*{storage}: 127\.0\.0\.2 don't see there"
            with pytest.raises(InvalidParamsError, match=says):
                train_flow(params)
        finally:
            worker.kill()
            worker.wait()
    assert not any(storage.glob("**/*.json"))


@pytest.mark.long
def test_a_worker_that_joins_makes_a_run_larger(tmp_path: Path) -> None:
    """`max_world_size` adds a worker at the next checkpoint, without a restart or a failure."""
    folder = tmp_path / "marks"
    folder.mkdir()
    with (
        local_cluster(n_workers=1) as cluster,
        ExitStack() as stack,
        ThreadPoolExecutor(1) as pool,
    ):

        def join() -> None:
            pids_in(folder, 1)
            stack.enter_context(extra_worker(cluster, 2))
            pids_in(folder, 2)
            (folder / "enough").touch()

        params = steered(
            folder,
            storage=str(tmp_path / "store"),
            checkpoint=CheckpointParams(every_s=1.0),
            world_size=1,
            max_world_size=2,
            retries=0,
            max_restarts=0,
            cluster=ClusterParams(address=cluster.scheduler_address),
        )
        joins = pool.submit(join)
        report = train_flow(params)
        joins.result()
        stack.close()  # the worker that joined
        run = f"{tmp_path / 'store'}/runs/{report.run_id}"
        cannot_grow = ClusterParams(address=cluster.scheduler_address)
        assert evaluate_flow(run, cluster=cannot_grow).num_samples == 21
    training = report.training
    assert (training.attempt, training.world_size, report.evaluation.num_samples) == (2, 2, 21)
    assert training.resumed_from_step
    assert training.failures == ()
    (first, _) = only_record(tmp_path / "store").attempts
    assert (first.world_size, first.step) == (1, training.resumed_from_step)
    names = [event["event"] for event in events_of(flow_run_id_of(report.flow_run_url))]
    assert "prefect-torch-ddp.rank.failed" not in names
