"""What `dask worker --preload-nanny` loads, so that a job's signals make its worker leave in order.

Batch systems send SIGTERM at a job's end, and Slurm SIGUSR1 ahead of it, by
`--signal=B:USR1@120`. Without this Dask leaves ranks eight seconds after SIGTERM to stop and save,
and takes the worker for a dead one, which costs the task that runs there a retry.
"""

import asyncio
import logging
import signal
from typing import Any

from distributed import Nanny

LIMIT_S = 3600.0
"""How long the ranks may take as far as the nanny is concerned; the batch system limits it."""
RETIRE_S = 10.0

logger = logging.getLogger(__name__)
_nannies: list[Nanny] = []
_leaving: set["asyncio.Task[None]"] = set()


async def dask_setup(nanny: Nanny) -> None:
    """Have both signals retire the workers of this process, each with its own nanny."""
    _nannies.append(nanny)
    for number in (signal.SIGUSR1, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, _leave, number.name)


def _leave(name: str) -> None:
    while _nannies:
        task = asyncio.create_task(_retire(_nannies.pop(), name))
        _leaving.add(task)
        task.add_done_callback(_leaving.discard)


async def _retire(nanny: Nanny, name: str) -> None:
    nanny.close_gracefully(reason=name)  # no new worker
    try:
        await asyncio.wait_for(_announce(nanny, name), RETIRE_S)
    except Exception as error:  # noqa: BLE001 - whatever it is, this worker has to go
        where = nanny.worker_address
        logger.warning("the scheduler could not be told that %s leaves: %r", where, error)
    # First the worker alone: one that hears of its removal closes too, and asks its nanny, which
    # `nanny.close` would have deaf by then. They would wait for each other.
    await nanny.kill(timeout=LIMIT_S, reason=name)
    await nanny.close(reason=name)


async def _announce(nanny: Nanny, name: str) -> None:
    """Have the scheduler expect the end, which then is no failure of the tasks that run there."""
    here: Any = nanny.worker_address
    if here is None:  # it still starts: the scheduler doesn't know it
        return
    options = {"close_workers": False, "remove": True}
    if not await nanny.scheduler.retire_workers(workers=[here], **options):
        # It has results that no other worker can take, since all leave: they are made again.
        reason = f"{name}-without-recipients"
        remove = nanny.scheduler.unregister
        await remove(address=here, stimulus_id=reason, expected=True, close=False)
