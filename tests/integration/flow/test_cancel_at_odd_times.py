"""E5: a cancel that comes early, late, twice or to another flow: always state Cancelled, never
a retry, nothing left."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO
from uuid import UUID

import psutil
import pytest
from distributed import Client
from prefect.client.orchestration import get_client

from prefect_torch_ddp import ClusterParams
from tests.integration.flow.test_cancel import FLOW, newest_run, params_of
from tests.integration.gang.test_failures import pids_in, wait_until
from tests.integration.runs import states_of, task_runs_of
from tests.integration.separate_cluster import separate_cluster

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("prefect_api")]

USER_FLOW = """
import sys
from prefect import flow
from prefect_dask import DaskTaskRunner
from prefect_torch_ddp import CheckpointParams, ddp_task
from tests.workloads import endless

train = ddp_task(
    world_size=2, storage=sys.argv[2], checkpoint=CheckpointParams(every_steps=50, every_s=None), retries=3
)(endless.train).with_options(name="train")

CLUSTER = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": ":0"}

@flow(name="of-a-user", task_runner=DaskTaskRunner(cluster_kwargs=CLUSTER))
def of_a_user(folder: str) -> None:
    train.submit(folder).result()

if __name__ == "__main__":
    of_a_user(sys.argv[1])
"""


def slow_cluster(mark: str) -> None:
    """Stand for a cluster class that takes its time to start: a queue of a batch system, for
    instance."""
    Path(mark).touch()
    while True:
        signal.pause()


@contextmanager
def flow_process(
    folder: Path, *arguments: str, text: str = FLOW, said: TextIO | int = subprocess.PIPE
) -> Iterator["subprocess.Popen[str]"]:
    """Run a flow's script in a process group of its own."""
    script = folder / "flow.py"
    script.write_text(text)
    process = subprocess.Popen(
        [sys.executable, str(script), *arguments],
        start_new_session=True,
        stdout=said,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def ends(process: "subprocess.Popen[str]", timeout_s: float) -> str:
    """Wait until the flow's process has ended, not well; return what it said."""
    said, _ = process.communicate(timeout=timeout_s)
    assert process.returncode != 0
    return said


def check_flow_cancelled(message: str) -> UUID:
    """Expect the newest flow run in state Cancelled with these words; return its id."""
    flow_run_id, _ = newest_run()
    with get_client(sync_client=True) as client:
        wait_until(lambda: client.read_flow_run(flow_run_id).state_name == "Cancelled", 40)
        state = client.read_flow_run(flow_run_id).state
    assert state is not None
    assert message in (state.message or "")
    return flow_run_id


def train_states(flow_run_id: UUID) -> list[str]:
    """Return the names of the states of the train task run."""
    return [name for name, _ in states_of(task_runs_of(flow_run_id)["train"])]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_while_the_cluster_starts(tmp_path: Path, how: signal.Signals) -> None:
    """Nothing has begun: the flow is Cancelled at once."""
    mark = tmp_path / "mark"
    cluster = ClusterParams(
        cluster_class=f"{__name__}.slow_cluster", cluster_kwargs={"mark": str(mark)}
    )
    params = params_of(tmp_path, cluster=cluster)
    with flow_process(tmp_path, params.model_dump_json()) as process:
        wait_until(mark.exists, 60)
        process.send_signal(how)
        ends(process, 60)
    assert not task_runs_of(check_flow_cancelled("cancelled"))


def test_before_the_task_has_begun(tmp_path: Path) -> None:
    """The workers of others are busy, so Prefect hasn't heard of the task yet: it is taken
    back, and never runs."""
    with separate_cluster(tmp_path / "cluster") as cluster, Client(cluster.address) as client:
        release = str(tmp_path / "release")
        busy = [
            client.submit(_until_there, release, i, workers=[address], pure=False)
            for i, address in enumerate(client.nthreads())
        ]
        params = params_of(tmp_path, cluster=ClusterParams(address=cluster.address))
        with flow_process(tmp_path, params.model_dump_json()) as process:
            wait_until(lambda: len(client.run_on_scheduler(_unready)) > len(busy), 60)
            process.terminate()
            ends(process, 60)
        flow_run_id = check_flow_cancelled("its task had not begun")
        Path(release).touch()
        client.gather(busy)
        wait_until(lambda: not client.run_on_scheduler(_unready), 30)
    assert not task_runs_of(flow_run_id)


def _until_there(path: str, _number: int) -> None:
    wait_until(Path(path).exists, 200)


def _unready(dask_scheduler: object) -> list[str]:
    tasks = dask_scheduler.tasks  # type: ignore[attr-defined]
    return [
        str(key)
        for key, task in tasks.items()
        if task.state not in ("memory", "forgotten", "erred", "released")
    ]


def test_while_a_retry_waits(tmp_path: Path) -> None:
    """Between two attempts nothing runs: no grace is waited for, and the retry doesn't come."""
    params = params_of(tmp_path, retries=2, retry_delay_s=200.0, max_restarts=0)
    params.options["fault"] = {"how": "raise", "step": 60, "rank": 1, "attempts": [1]}
    with flow_process(tmp_path, params.model_dump_json()) as process:
        pids_in(tmp_path / "pids", 2, timeout_s=150)
        flow_run_id, _ = newest_run()
        wait_until(lambda: train_states(flow_run_id)[-1] == "AwaitingRetry", 60)
        process.terminate()
        ends(process, 60)
    assert check_flow_cancelled("its task waited for a retry") == flow_run_id
    assert train_states(flow_run_id)[-1] == "Cancelled"
    assert "Retrying" not in train_states(flow_run_id)


def test_ctrl_c_twice(tmp_path: Path) -> None:
    """A rank that never ends its step uses the grace up; who presses again doesn't wait for
    it."""
    params = params_of(tmp_path, stop_grace_s=250.0, progress_timeout_s=None)
    (tmp_path / "marks").mkdir()
    params.options["fault"] = {
        "how": "hang",
        "step": 60,
        "rank": 1,
        "attempts": [1],
        "mark": str(tmp_path / "marks"),
    }
    with (
        (tmp_path / "said").open("w") as said,
        flow_process(tmp_path, params.model_dump_json(), said=said) as process,
    ):
        ranks = pids_in(tmp_path / "pids", 2, timeout_s=150)
        wait_until((tmp_path / "marks" / "1").exists, 60)
        os.killpg(process.pid, signal.SIGINT)
        wait_until(lambda: "Ctrl-C again ends it at once" in (tmp_path / "said").read_text(), 60)
        flow_run_id, _ = newest_run()
        assert all(psutil.pid_exists(pid) for pid in ranks)
        os.killpg(process.pid, signal.SIGINT)
        process.wait(60)
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in ranks), 25)
    check_flow_cancelled("cancelled")
    assert train_states(flow_run_id)[-1] == "Cancelled"
    assert not {"AwaitingRetry", "Retrying"} & set(train_states(flow_run_id))


@pytest.mark.parametrize(("how", "to_group"), [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_a_users_flow_with_a_ddp_task(tmp_path: Path, how: signal.Signals, to_group: bool) -> None:
    """Its ranks stop after one step, with a checkpoint, before the flow's cluster closes; the
    task run is Cancelled."""
    (tmp_path / "pids").mkdir()
    with flow_process(
        tmp_path, str(tmp_path / "pids"), str(tmp_path / "store"), text=USER_FLOW
    ) as process:
        ranks = pids_in(tmp_path / "pids", 2, timeout_s=150)
        wait_until(lambda: list((tmp_path / "store").rglob("manifest.json")), 60)
        (os.killpg if to_group else os.kill)(process.pid, how)
        ends(process, 60)
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in ranks), 25)
    flow_run_id, _ = newest_run()
    name, message = states_of(task_runs_of(flow_run_id)["train"])[-1]
    assert name == "Cancelled"
    assert "all ranks stopped after step" in message
    assert "the newest checkpoint is of step" in message
