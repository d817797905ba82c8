"""All processes of a run's own cluster get signals: ranks save, and nothing remains."""

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import psutil
import pytest
from distributed import Client

from prefect_torch_ddp import RankFailedError
from prefect_torch_ddp.tasks.clusters.local_cluster import local_cluster
from tests.integration.gang.test_cancel import saved_steps, training
from tests.support.gangs import all_gone, workers_of
from tests.support.waiting import HANG_S, wait_until

pytestmark = pytest.mark.extended

CALLER = """
import sys
from distributed import Client
from prefect_torch_ddp.tasks.clusters.local_cluster import local_cluster
print("begins", flush=True)
if __name__ == "__main__":
    with local_cluster(n_workers=1) as cluster, Client(cluster):
        print("started", flush=True)
        sys.stdin.read()
"""

TERMINATED = """
import signal
class Terminated(BaseException):
    pass
def terminate(*_):
    raise Terminated
signal.signal(signal.SIGTERM, terminate)  # as Prefect does
"""


def test_sigterm_of_every_process_leaves_a_checkpoint(tmp_path: Path) -> None:
    """Nannies, workers and fork servers ignore SIGTERM, so that the ranks have time to save."""
    with local_cluster(n_workers=2) as cluster, Client(cluster) as client:
        nannies = [psutil.Process(worker.ppid()) for worker in workers_of(client).values()]
        with training(client, tmp_path) as (gang, ranks):
            processes = [
                *nannies,
                *(each for top in nannies for each in top.children(recursive=True)),
            ]
            assert set(ranks) < {process.pid for process in processes}
            for process in processes:
                process.send_signal(signal.SIGTERM)
            error = gang.exception(HANG_S)
        assert isinstance(error, RankFailedError), error
        assert error.signal == signal.SIGTERM
        (step,) = saved_steps(tmp_path)
        assert f"all ranks stopped after step {step}" in str(error)
        assert not any(all_gone([nanny]) for nanny in nannies)
    wait_until(partial(all_gone, processes))


@pytest.mark.parametrize("when", ["as_it_starts", "once_it_runs"])
def test_a_cluster_that_got_signals_ends_with_its_killed_flow(tmp_path: Path, when: str) -> None:
    """Processes that ignored SIGTERM and SIGINT end when the flow is killed."""
    script, pipe = tmp_path / "caller.py", subprocess.PIPE
    script.write_text(CALLER, encoding="utf-8")
    command = [sys.executable, str(script)]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as caller:
        assert caller.stdout is not None
        assert caller.stdout.readline() == "begins\n"
        flow = psutil.Process(caller.pid)

        def below() -> list[psutil.Process]:
            return flow.children(recursive=True)

        def workers() -> list[psutil.Process]:
            return [each for each in below() if "spawn_main" in " ".join(each.cmdline())]

        if when == "as_it_starts":
            wait_until(lambda: bool(workers()))
        else:
            assert caller.stdout.readline() == "started\n"
            wait_until(lambda: "ddp-fork-server" in [each.name() for each in below()])
        (worker,) = workers()
        (nanny,) = worker.parents()[:1]
        processes = below()
        for process in (nanny, *worker.children()):
            for number in (signal.SIGTERM, signal.SIGINT):
                os.kill(process.pid, number)
        assert nanny.is_running()
        caller.kill()
        wait_until(partial(all_gone, processes))


@pytest.mark.parametrize("when", ["at_once", "as_its_worker_starts"])
@pytest.mark.parametrize(
    ("number", "raised"), [(signal.SIGINT, "KeyboardInterrupt"), (signal.SIGTERM, "Terminated")]
)
def test_a_signal_as_a_cluster_starts_prints_nothing_of_dask(
    tmp_path: Path, number: signal.Signals, raised: str, when: str
) -> None:
    """The start is given up, its processes end, and stderr has only the signal's traceback."""
    script, pipe = tmp_path / "caller.py", subprocess.PIPE
    script.write_text(TERMINATED + CALLER, encoding="utf-8")
    command = [sys.executable, str(script)]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as caller:
        assert caller.stdout is not None
        assert caller.stdout.readline() == "begins\n"
        flow = psutil.Process(caller.pid)
        part = "nanny" if when == "at_once" else "spawn_main"

        def begun() -> list[psutil.Process]:
            below = flow.children(recursive=True)
            return below if any(part in " ".join(each.cmdline()) for each in below) else []

        wait_until(lambda: bool(begun()))
        processes = begun()
        flow.send_signal(number)
        out, stderr = caller.communicate(timeout=HANG_S)
    assert out == ""
    assert stderr.endswith(f"\n{raised}\n"), stderr
    assert stderr.count("Traceback") == 1, stderr
    wait_until(partial(all_gone, processes))
