"""What `dask worker --preload-nanny` loads, so that a job's signals make its worker leave in order.

Batch systems send SIGTERM at a job's end, and Slurm SIGUSR1 ahead of it, by
`--signal=B:USR1@120`. Without this Dask leaves ranks eight seconds after SIGTERM to stop and save,
and takes the worker for a dead one, which costs the task that runs there a retry.
"""

import asyncio
import logging
import signal

from distributed import Nanny

LIMIT_S = 3600.0
"""How long the ranks may take as far as the nanny is concerned; the batch system limits it."""
RETIRE_S = 10.0

logger = logging.getLogger(__name__)
_nannies: list[Nanny] = []
_leaving: set["asyncio.Task[None]"] = set()


async def dask_setup(nanny: Nanny) -> None:
    """Have both signals retire the workers of this process, each with a nanny of its own."""
    _nannies.append(nanny)
    for number in (signal.SIGUSR1, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, _leave, number.name)


def _leave(name: str) -> None:
    while _nannies:
        task = asyncio.create_task(_retire(_nannies.pop(), name))
        _leaving.add(task)
        task.add_done_callback(_leaving.discard)


async def _retire(nanny: Nanny, name: str) -> None:
    # What the scheduler expects to leave counts as no failure of the tasks that run there.
    here = [nanny.worker_address]
    retire = nanny.scheduler.retire_workers(workers=here, close_workers=False, remove=True)
    try:
        await asyncio.wait_for(retire, RETIRE_S)
    except (OSError, TimeoutError) as error:
        logger.warning("the scheduler could not be told that %s leaves: %r", here[0], error)
    await nanny.close(timeout=LIMIT_S, reason=name)
