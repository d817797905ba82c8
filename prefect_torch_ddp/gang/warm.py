"""Warming a cluster: its workers load torch before the first gang, while data is prepared.

This module is also a preload of Dask's: `dask worker --preload prefect_torch_ddp.gang.warm`.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from distributed import Client, Worker

from prefect_torch_ddp.lazy import exported_by
from prefect_torch_ddp.protocol.rank import TORCH_ALONE, Preload

if TYPE_CHECKING:
    from concurrent.futures import Future

logger = logging.getLogger(__name__)

PRELOAD = __name__
"""What Dask's preload is called: this module."""


@exported_by("prefect_torch_ddp")
def warm(
    client: Client,
    code: Callable[..., Any] | str | None = None,
    preload: Sequence[str] | None = None,
) -> None:
    """Have every Dask worker load torch now, in its fork server, so that gangs start fast.

    The call returns at once. Workers that join later are warmed by the next gang. An idle fork
    server ends after 1800 s. If warming fails, ranks only start slower. You may call this again at
    no cost.

    Args:
        client: a synchronous Dask client.
        code: the function, script or workload of the next gang. The libraries that are preloaded
            for it are loaded too.
        preload: the `preload` option of the next gang: names of packages.

    Raises:
        InvalidParamsError: the client isn't synchronous or isn't connected, or `preload` names one
            of your own modules.

    Example:
        Load torch on the workers while you prepare the data:

            from prefect_torch_ddp import run_gang, warm

            warm(client)
            prepare_data()
            run_gang(client, fn, world_size=2)
    """
    # Not at the top: a worker that starts would load them before its fork server.
    from prefect_torch_ddp.gang.caller.sent.preload import preload_of  # noqa: PLC0415
    from prefect_torch_ddp.gang.checks import check_client  # noqa: PLC0415

    check_client(client)
    loop = client.loop.asyncio_loop  # type: ignore[union-attr]
    wanted = TORCH_ALONE
    if code is not None or preload is not None:
        wanted = preload_of(code or "", preload)
    asyncio.run_coroutine_threadsafe(_warm(client, wanted), loop).add_done_callback(_note)


async def dask_setup(worker: Worker) -> None:
    """Warm this worker as it starts; Dask calls this in a preload."""
    from prefect_torch_ddp.gang.worker.fork_client import fork_client  # noqa: PLC0415

    # First, since torch takes longest: the rest loads here while torch loads there.
    fork_client(worker.address).warm_up(TORCH_ALONE)
    from prefect_torch_ddp.gang.worker.rpc import register_rpc  # noqa: PLC0415 - it imports much

    await register_rpc(worker)


async def _warm(client: Client, preload: Preload) -> None:
    from prefect_torch_ddp.gang.caller import workers  # noqa: PLC0415 - it imports much

    await workers.identify(client, list(await workers.running_workers(client)), warm=preload)


def _note(done: "Future[None]") -> None:
    if not done.cancelled() and (error := done.exception()) is not None:
        logger.info("the cluster's workers could not be warmed up: %r", error)
