"""E5, C3: a gang that is cancelled stops after one step, leaves that step's checkpoint, and
nothing else."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from distributed import Client, Future

from prefect_torch_ddp import GangCancelledError, RankFailedError, run_gang
from prefect_torch_ddp.checkpoint.manifest import list_manifests
from prefect_torch_ddp.errors import GangError
from prefect_torch_ddp.rank.workload import run_with_context
from prefect_torch_ddp.storage.directory import DirectoryStorage
from tests.integration.gang.test_failures import pids_in, wait_until
from tests.workloads import endless, plain

pytestmark = pytest.mark.timeout(120)


def saved_steps(folder: Path) -> list[int]:
    """Return the steps of the run's checkpoints."""
    return [manifest.step for manifest in list_manifests(DirectoryStorage(folder / "store"), "run")]


def start_training(
    client: Client, folder: Path
) -> tuple[threading.Thread, list[GangError], list[int]]:
    """Train in a thread; return it, the list that its error goes to, and the ranks' pids."""
    pids = folder / "pids"
    pids.mkdir()
    errors: list[GangError] = []

    def run() -> None:
        try:
            run_gang(
                client,
                run_with_context,
                args=(endless.config_in(folder), endless.train, (str(pids),)),
                world_size=2,
            )
        except GangError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, errors, pids_in(pids, 2, timeout_s=60)


def test_client_cancel_leaves_a_checkpoint(dask_client: Client, tmp_path: Path) -> None:
    """One agent's key is cancelled: all ranks stop after the same step; the error says which,
    and that it was saved."""
    thread, errors, ranks = start_training(dask_client, tmp_path)
    agent = next(
        future
        for future in dask_client.futures.values()
        if str(future.key).startswith("ddp-agent-")
    )
    dask_client.cancel([Future(agent.key, dask_client)], force=True)
    thread.join(60)
    (error,) = errors
    assert isinstance(error, GangCancelledError)
    assert saved_steps(tmp_path) == [error.step] == [error.checkpoint_step]
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in ranks))
    assert run_gang(dask_client, plain.sum_of_ones, world_size=2) == [2.0, 2.0]


def test_sigterm_of_a_rank_is_its_failure_and_leaves_a_checkpoint(
    dask_client: Client, tmp_path: Path
) -> None:
    """Preemption of one rank: no success and no cancel, so that a retry resumes from the step
    after which all stopped."""
    thread, errors, ranks = start_training(dask_client, tmp_path)
    os.kill(ranks[1], signal.SIGTERM)
    thread.join(60)
    (error,) = errors
    assert isinstance(error, RankFailedError)
    assert (error.rank, error.signal) == (1, signal.SIGTERM)
    (step,) = saved_steps(tmp_path)
    assert f"was ended by SIGTERM (15); all ranks stopped after step {step}" in str(error)


CALLER = """
import sys
from pathlib import Path
from distributed import Client, LocalCluster
from prefect_torch_ddp import run_gang
from prefect_torch_ddp.rank.workload import run_with_context
from tests.workloads import endless
if __name__ == "__main__":
    folder = Path(sys.argv[1])
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster, Client(cluster) as client:
        run_gang(client, run_with_context, args=(endless.config_in(folder), endless.train, (str(folder / "pids"),)), world_size=2)
"""


def test_ctrl_c_in_a_terminal_leaves_a_checkpoint(tmp_path: Path) -> None:
    """The signal reaches the caller's whole process group, its local cluster too: ranks stop,
    save and are gone within 10 s."""
    pids = tmp_path / "pids"
    pids.mkdir()
    script = tmp_path / "caller.py"
    script.write_text(CALLER)
    caller = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path)],
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
    )
    ranks = pids_in(pids, 2, timeout_s=90)
    os.killpg(caller.pid, signal.SIGINT)
    began_s = time.monotonic()
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in ranks), 10)
    _, said = caller.communicate(timeout=40)
    assert caller.returncode != 0, f"after {time.monotonic() - began_s} s"
    (step,) = saved_steps(tmp_path)
    assert (
        f"all ranks stopped after step {step}; the newest checkpoint is of step {step}" in said
    ), said
    assert "KeyboardInterrupt" in said
