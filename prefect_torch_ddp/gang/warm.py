"""Warming a cluster: its workers load torch before the first gang, while data is prepared.

This module is also a preload of Dask's: `dask worker --preload prefect_torch_ddp.gang.warm`.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from distributed import Client, Worker, WorkerPlugin

from prefect_torch_ddp.gang.caller.code import preload_of
from prefect_torch_ddp.gang.checks import check_client
from prefect_torch_ddp.protocol.rank import TORCH_ALONE, Preload

if TYPE_CHECKING:
    from concurrent.futures import Future

logger = logging.getLogger(__name__)

PLUGIN_NAME = "prefect-torch-ddp-warm"


def warm(client: Client, code: Callable[..., Any] | str | None = None) -> None:
    """Have every Dask worker load torch now, in its fork server, so that gangs start fast.

    Doesn't wait for it. Workers that join later are warmed as well, for as long as an idle fork
    server lives: 1800 s. Where it can't be done, ranks start slower. Calling it again is free.

    Args:
        client: a synchronous Dask client.
        code: the function, the script or the workload of the next gang: the libraries that it
            imports are loaded too.

    Raises:
        InvalidParamsError: the client isn't synchronous, or not connected.
    """
    check_client(client)
    loop = client.loop.asyncio_loop  # type: ignore[union-attr]
    preload = TORCH_ALONE if code is None else preload_of(code)
    asyncio.run_coroutine_threadsafe(_register(client, preload), loop).add_done_callback(_note)


async def dask_setup(worker: Worker) -> None:
    """Warm this worker as it starts; Dask calls this in a preload."""
    from prefect_torch_ddp.gang.worker.rpc import register_rpc  # noqa: PLC0415 - it imports much

    await register_rpc(worker, TORCH_ALONE)


async def _register(client: Client, preload: Preload) -> None:
    # On the client's own loop it returns an awaitable.
    await client.register_plugin(_plugin(time.time(), preload), PLUGIN_NAME)


def _plugin(asked_s: float, preload: Preload) -> WorkerPlugin:
    # Within a function and of plain values, so that it is pickled by value: a worker that joins
    # and can't unpickle a plugin of its scheduler's does not start, and there may be workers
    # without this package.
    imports, shadowed_by = preload.imports, preload.shadowed_by

    class Warm(WorkerPlugin):
        async def setup(self, worker: Worker) -> None:
            try:
                from prefect_torch_ddp.gang.worker.fork_client import IDLE_S  # noqa: PLC0415
                from prefect_torch_ddp.gang.worker.rpc import register_rpc  # noqa: PLC0415
                from prefect_torch_ddp.protocol.rank import Preload  # noqa: PLC0415
            except ImportError:  # a gang says so, by name
                return
            # The scheduler keeps the plugin when its client is long gone; a fork server for
            # nobody would be 200 MB on each new worker.
            if time.time() - asked_s < IDLE_S:
                await register_rpc(worker, Preload(imports, shadowed_by))

    return Warm()


def _note(done: "Future[None]") -> None:
    if not done.cancelled() and (error := done.exception()) is not None:
        logger.info("the cluster's workers are not warmed: %r", error)
