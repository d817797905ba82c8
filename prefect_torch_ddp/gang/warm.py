"""Warming a cluster: its workers load torch before the first gang, while data is prepared.

This module is also a preload of Dask's: `dask worker --preload prefect_torch_ddp.gang.warm`.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from distributed import Client, Worker

from prefect_torch_ddp.gang.caller.sent.preload import preload_of
from prefect_torch_ddp.gang.checks import check_client
from prefect_torch_ddp.protocol.rank import TORCH_ALONE, Preload

if TYPE_CHECKING:
    from concurrent.futures import Future

logger = logging.getLogger(__name__)


def warm(
    client: Client,
    code: Callable[..., Any] | str | None = None,
    preload: Sequence[str] | None = None,
) -> None:
    """Have every Dask worker load torch now, in its fork server, so that gangs start fast.

    Doesn't wait for it, nor for workers that join later, which the next gang warms. An idle fork
    server lives for 1800 s. Where it can't be done, ranks start slower. Calling it again is free.

    Args:
        client: a synchronous Dask client.
        code: the function, the script or the workload of the next gang: the libraries that are
            loaded ahead for it are loaded too.
        preload: the libraries that the next gang names; see `GangParams`.

    Raises:
        InvalidParamsError: the client isn't synchronous, or not connected; `preload` names a
            module of your own.
    """
    check_client(client)
    loop = client.loop.asyncio_loop  # type: ignore[union-attr]
    wanted = TORCH_ALONE
    if code is not None or preload is not None:
        wanted = preload_of(code or "", preload)
    asyncio.run_coroutine_threadsafe(_warm(client, wanted), loop).add_done_callback(_note)


async def dask_setup(worker: Worker) -> None:
    """Warm this worker as it starts; Dask calls this in a preload."""
    from prefect_torch_ddp.gang.worker.rpc import register_rpc  # noqa: PLC0415 - it imports much

    await register_rpc(worker, TORCH_ALONE)


async def _warm(client: Client, preload: Preload) -> None:
    from prefect_torch_ddp.gang.caller import workers  # noqa: PLC0415 - it imports much

    await workers.identify(client, list(await workers.running_workers(client)), warm=preload)


def _note(done: "Future[None]") -> None:
    if not done.cancelled() and (error := done.exception()) is not None:
        logger.info("the cluster's workers are not warmed: %r", error)
