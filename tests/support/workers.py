"""Prefect's commands as a person types them, and a worker of the work pool train-ddp."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
from prefect.client.orchestration import get_client

ROOT = Path(__file__).parents[2]
PREFECT = [sys.executable, "-m", "prefect", "--no-prompt"]
POOL = "train-ddp"


def prefect(*command: str) -> str:
    """Run a Prefect command in the repository's root and return what it printed."""
    run = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 120}
    done = subprocess.run([*PREFECT, *command], **run, check=False)
    if done.returncode != 0:
        pytest.fail(f"{command}: {done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return done.stdout


@contextmanager
def worker_running(terminal: Path | None = None) -> Iterator[None]:
    """Run a worker of the pool, which is made if there is none.

    Args:
        terminal: a file that gets what it and its runs print, if given.

    At the end the pool goes too: a run that was never worked off would occupy one of its slots,
    and the next test on this server would find fewer.
    """
    with get_client(sync_client=True) as client:
        if POOL not in {pool.name for pool in client.read_work_pools()}:
            prefect("work-pool", "create", POOL, "--type", "process")
    command = [*PREFECT, "worker", "start", "--pool", POOL, "--type", "process"]
    with terminal.open("wb") if terminal else nullcontext() as out:
        worker = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out)
    try:
        yield
    finally:
        worker.terminate()
        try:
            worker.wait(60)
        except subprocess.TimeoutExpired:  # it waits for the run that a failed test has left
            worker.kill()
            worker.wait()
        with get_client(sync_client=True) as client:
            client.delete_work_pool(POOL)
