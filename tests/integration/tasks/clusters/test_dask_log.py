"""What Dask logs in the process that starts a run's cluster."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from prefect_torch_ddp.gang.worker.nanny import LOG_LEVEL
from tests.support.waiting import HANG_S

CLOSING = """
import asyncio
import logging
import os
import signal
import sys
from distributed import Client, Nanny, Scheduler, rpc
from prefect_torch_ddp.tasks.clusters.dask_log import quiet_dask

quiet_dask()
handler = logging.StreamHandler(sys.stdout)  # none sees what a filter of the logger drops
handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
logging.getLogger("distributed.scheduler").addHandler(handler)

async def close_while_a_worker_leaves():
    scheduler = await Scheduler(port=0, dashboard_address=":0")
    nannies = [await Nanny(scheduler.address, nthreads=1) for _ in range(2)]
    leaves, stays = (nanny.worker_address for nanny in nannies)
    async with Client(scheduler.address, asynchronous=True) as client:
        kept = await client.scatter(1, workers=[leaves])
        os.kill(nannies[1].pid, signal.SIGSTOP)  # it never takes what the other one has
        async with rpc(scheduler.address) as there:
            asked = asyncio.ensure_future(there.retire_workers(workers=[leaves], remove=True))
            while scheduler.workers[leaves].status.name != "closing_gracefully":
                await asyncio.sleep(0.01)
            await scheduler.close()
            (error,) = await asyncio.gather(asked, return_exceptions=True)
            print("asked:", type(error).__name__)
    os.kill(nannies[1].pid, signal.SIGCONT)
    for nanny in nannies:
        await nanny.close()

if __name__ == "__main__":
    asyncio.run(close_while_a_worker_leaves())
"""


@pytest.mark.extended
@pytest.mark.parametrize("level", [None, "info"])
def test_a_scheduler_that_closes_logs_no_request_that_it_cancels(
    tmp_path: Path, level: str | None
) -> None:
    """A worker asks to be retired meanwhile, as Slurm's jobs do at their end; other errors, and the
    level that the user set, stay."""
    (tmp_path / "closing.py").write_text(CLOSING, encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name != LOG_LEVEL}
    environment |= {LOG_LEVEL: level} if level else {}
    command = [sys.executable, str(tmp_path / "closing.py")]
    run = {"env": environment, "capture_output": True, "text": True, "timeout": 2 * HANG_S}
    done = subprocess.run(command, check=False, **run)
    assert done.returncode == 0, done.stderr
    assert "asked: CommClosedError" in done.stdout
    assert "CancelledError" not in done.stdout
    assert "ERROR Removing worker" in done.stdout, "its data is lost"
    assert ("INFO Retire worker" in done.stdout) is (level is not None)
