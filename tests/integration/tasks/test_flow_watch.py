"""A killed flow is Crashed in Prefect, is resumed by `latest`, and leaves no temporary server."""

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import UUID, uuid4

import psutil
import pytest
from distributed import LocalCluster
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.context import with_context
from prefect.states import Cancelling, Running
from prefect_dask import DaskTaskRunner

from prefect_torch_ddp import ContextParams, InvalidParamsError
from prefect_torch_ddp.checkpoint.manifest import list_manifests
from prefect_torch_ddp.records.run_record import list_run_records
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.tasks.watch.beside_flow import accompany
from prefect_torch_ddp.tasks.watch.flow_watch import END_S, MESSAGE
from tests.integration.tasks.test_cancel import flow_process
from tests.support.flow_watches import is_watch
from tests.support.gangs import all_gone
from tests.support.runs import newest_flow_run, task_runs_of
from tests.support.waiting import HANG_S, wait_until
from tests.support.workers import prefect

pytestmark = pytest.mark.timeout(600)

FLOW = """
from uuid import UUID
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.runtime import flow_run
from prefect.server.api.server import SubprocessASGIServer
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect_torch_ddp.tasks.watch.flow_watch import closed_if_killed

@flow
def run():
    url = str(get_client(sync_client=True).api_url)
    with temporary_settings({PREFECT_API_URL: url}), closed_if_killed(UUID(flow_run.id), 0.0):
        (server,) = SubprocessASGIServer._instances.values()
        print(server.server_process.pid, flush=True)
        input()

run()
"""
WITH_A_FORK = """
import os, signal, sys, time
from uuid import UUID
from prefect_torch_ddp.tasks.watch.flow_watch import closed_if_killed

with closed_if_killed(UUID(sys.argv[1]), 0.0):
    child = os.fork()
    if not child:
        signal.pause()
    print(child, flush=True)
    sys.stdin.readline()
    began_s = time.monotonic()
print(time.monotonic() - began_s, flush=True)
"""
OWN_FLOW = """
import sys
from prefect import flow
from prefect_dask import DaskTaskRunner
from prefect_torch_ddp import CheckpointParams, RankContext, ddp_task, local_cluster
from tests.workloads import hanging

at = {"world_size": 1, "storage": sys.argv[1]}

@ddp_task(**at)
def before(ctx: RankContext) -> None: ...

at |= {"resume_from": sys.argv[3], "checkpoint": CheckpointParams(every_s=None, every_steps=5)}
train = ddp_task(**at)(hanging.train_until_enough).with_options(name="train")
cluster = {"cluster_class": local_cluster, "cluster_kwargs": {"n_workers": 1}}
if sys.argv[4:]:
    cluster = {"address": sys.argv[4]}

@flow(name="own", task_runner=DaskTaskRunner(**cluster))
def own(folder: str) -> None:
    before()
    train.submit(folder).result()

if __name__ == "__main__":
    own(sys.argv[2])
"""


@pytest.mark.long
def test_a_killed_flow_leaves_no_temporary_server(tmp_path: Path) -> None:
    """The watch that closes the run also ends the server that the flow had started."""
    own = ("PREFECT_API_URL", "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE")
    environment = {name: value for name, value in os.environ.items() if name not in own}
    environment |= {"PREFECT_HOME": str(tmp_path), "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "true"}
    environment["PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"] = "120"
    command, pipe = [sys.executable, "-c", FLOW], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as process:
        assert process.stdout is not None
        server = psutil.Process(int(process.stdout.readline()))
        process.kill()
    wait_until(lambda: all_gone([server]))


@contextmanager
def watched_with_a_fork(flow_run_id: UUID) -> Iterator[tuple["subprocess.Popen[str]", int]]:
    """Run a process that has a watch, and a forked child that outlives it; give it and its pid."""
    command, pipe = [sys.executable, "-c", WITH_A_FORK, str(flow_run_id)], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            yield process, child
        finally:
            process.kill()
            os.kill(child, signal.SIGKILL)


@pytest.mark.usefixtures("prefect_api")
def test_a_forked_child_hides_no_death_of_its_flow() -> None:
    """It holds the pipe to the watch, which waited for its end: the flow run stayed Running."""
    with get_client(sync_client=True) as client:
        run = client.create_flow_run(flow(watches, name="forks"), state=Running())
        with watched_with_a_fork(run.id) as (process, child):
            (watch,) = filter(is_watch, psutil.Process(process.pid).children())
            process.kill()
            process.wait()
            wait_until(lambda: all_gone([watch]), 60)
            assert psutil.pid_exists(child)
        state = client.read_flow_run(run.id).state
    assert state is not None
    assert (state.name, state.message) == ("Crashed", MESSAGE)


def test_a_forked_child_does_not_delay_the_end_of_its_flow() -> None:
    """The flow waited until it had given the watch up, and killed it."""
    with watched_with_a_fork(uuid4()) as (process, child):
        (watch,) = filter(is_watch, psutil.Process(process.pid).children())
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert float(process.stdout.readline()) < END_S
        wait_until(lambda: all_gone([watch]))
        assert psutil.pid_exists(child)


def own_flow_killed(folder: Path, *address: str, with_all: bool = False) -> tuple[UUID, str, int]:
    """Kill a flow once it has a checkpoint, perhaps with all that it started, its watch included.

    Returns the ids of its flow run and of its training's run, and the last step that was saved.
    """
    store = DirectoryStorage(folder / "store")
    with own_flow(folder, "first", "latest", *address) as process:
        wait_until(lambda: any((folder / "store").rglob("manifest.json")), 200, "a checkpoint")
        family = psutil.Process(process.pid).children(recursive=True)
        assert sum(map(is_watch, family)) == 1, "its two tasks have one watch"
        process.kill()
        for each in family if with_all else ():
            with suppress(psutil.NoSuchProcess):
                each.kill()
    wait_until(lambda: all_gone(family))
    ((run_id, saved),) = (
        (record.run_id, found[-1].step)
        for record in list_run_records(store)
        if (found := list_manifests(store, record.run_id))
    )
    return newest_flow_run().id, run_id, saved


@contextmanager
def own_flow(
    folder: Path, name: str, reference: str, *address: str
) -> Iterator["subprocess.Popen[bytes]"]:
    """Run the flow of one's own, which writes where it is into the folder of this name."""
    (folder / name).mkdir()
    given = str(folder / "store"), str(folder / name), reference, *address
    with flow_process(folder, *given, text=OWN_FLOW) as process:
        yield process


def first_step(folder: Path, name: str, reference: str = "latest") -> int:
    """Run that flow from what the reference names; return the step that it begins with."""
    with own_flow(folder, name, reference) as process:
        wait_until(lambda: any((folder / name).glob("1-0-from-*")), 200, "its training")
        (folder / name / "enough").touch()
        assert process.wait(HANG_S) == 0
    (found,) = (folder / name).glob("1-0-from-*")
    return int(found.name.rpartition("-")[2])


def watches() -> int:
    """Return how many flow watches this process has."""
    return sum(map(is_watch, psutil.Process().children()))


@pytest.mark.usefixtures("prefect_api")
def test_only_the_flows_own_process_has_a_watch_and_feeds_trackers(
    dask_cluster: LocalCluster, tmp_path: Path
) -> None:
    """Another that has its context may end before it: its watch would set a healthy flow Crashed.

    Its trackers' feed would be one more for the same runs.
    """
    fed = ContextParams(trackers=["tensorboard"])

    def begin(params: ContextParams) -> int:
        accompany(params, str(tmp_path), lambda: "experiment")
        return watches()

    @flow(task_runner=DaskTaskRunner(address=dask_cluster.scheduler_address))
    def user_flow() -> tuple[int, int]:
        in_helper = with_context(begin)  # as in a process of multiprocessing's
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(in_helper, ContextParams()).result(HANG_S)
            with pytest.raises(InvalidParamsError, match="or in another process of the flow"):
                pool.submit(in_helper, fed).result(HANG_S)
        return found, begin(ContextParams())

    assert user_flow() == (0, 1)
    assert watches() == 0


@pytest.mark.long
@pytest.mark.usefixtures("prefect_api")
def test_latest_resumes_a_killed_flow_of_ones_own(tmp_path: Path) -> None:
    """It is Crashed. It stayed Running, so `latest` passed it over, for ever."""
    killed, _, saved = own_flow_killed(tmp_path)
    check_closed(killed, train="Crashed")
    assert first_step(tmp_path, "second") == saved + 1


@pytest.mark.long
@pytest.mark.more
@pytest.mark.usefixtures("prefect_api")
def test_latest_resumes_a_killed_flow_of_ones_own_beside_a_cluster_of_others(
    dask_cluster: LocalCluster, tmp_path: Path
) -> None:
    """There its training has the time to stop with a checkpoint, and is Cancelled."""
    killed, _, saved = own_flow_killed(tmp_path, dask_cluster.scheduler_address)
    check_closed(killed, train="Cancelled")
    assert first_step(tmp_path, "second") == saved + 1


def check_closed(killed: UUID, train: str) -> None:
    """Expect that a killed flow is Crashed, that its training is in a state, and the rest as it
    was."""
    states = {name: run.state_name for name, run in task_runs_of(killed).items()}
    assert states == {"train": train, "before": "Completed"}
    assert newest_flow_run().state_name == "Crashed"


@pytest.mark.long
@pytest.mark.usefixtures("prefect_api")
def test_latest_warns_of_a_killed_flow_that_nobody_closed(tmp_path: Path) -> None:
    """It trained from scratch, and said that there is no such run.

    The warning names the run, which can be resumed by its id, and a command that closes its flow.
    """
    killed, run_id, saved = own_flow_killed(tmp_path, with_all=True)
    assert first_step(tmp_path, "second") == 1
    said = (tmp_path / "said").read_text()
    (warned,) = (line for line in said.splitlines() if "passes over run" in line)
    for words in (run_id, f"flow run {killed} is Running in Prefect", f"resume_from='{run_id}'"):
        assert words in warned
    assert "has no such run in" in said
    assert first_step(tmp_path, "third", run_id) == saved + 1
    with get_client(sync_client=True) as client:
        assert client.read_flow_run(killed).state_name == "Running"
        client.set_flow_run_state(killed, Cancelling())  # nobody will notice
        (command,) = re.findall("`(.+)`", warned)
        name, *arguments = shlex.split(command)
        assert name == "prefect"
        prefect(*arguments)
        assert client.read_flow_run(killed).state_name == "Crashed"
