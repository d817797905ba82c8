"""What `dask worker --preload-nanny` loads, so that SIGUSR1 makes a worker leave in good order.

Batch systems send it ahead of a job's end, as Slurm does by `--signal=B:USR1@120`. SIGTERM, which
Dask handles itself, leaves ranks eight seconds to stop and save.
"""

import asyncio
import signal

from distributed import Nanny

LIMIT_S = 3600.0
"""How long the ranks may take as far as the nanny is concerned; the batch system limits it."""

_nannies: list[Nanny] = []
_leaving: set["asyncio.Task[None]"] = set()


async def dask_setup(nanny: Nanny) -> None:
    """Have SIGUSR1 retire the workers of this process, each with a nanny of its own."""
    _nannies.append(nanny)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, _leave)


def _leave() -> None:
    while _nannies:
        task = asyncio.create_task(_retire(_nannies.pop()))
        _leaving.add(task)
        task.add_done_callback(_leaving.discard)


async def _retire(nanny: Nanny) -> None:
    # The scheduler first: what it expects to leave counts as no failure of the tasks there.
    here = [nanny.worker_address]
    await nanny.scheduler.retire_workers(workers=here, close_workers=False, remove=True)
    await nanny.close(timeout=LIMIT_S, reason="SIGUSR1")
