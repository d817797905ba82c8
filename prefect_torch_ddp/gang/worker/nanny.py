"""A Dask nanny in its own process, for the local cluster that a run makes for itself.

Its worker is spawned from here, at the first start and after each death. A nanny in the process of
the flow would have each worker import the flow's script as its main module: seconds for loading
Prefect, and a second flow run if the script has no `if __name__ == "__main__":`.

SIGTERM and SIGINT are left to the flow, which closes this process once the ranks have saved:
`systemctl stop` and `scancel` send them to every process.
"""

import asyncio
import contextlib
import os
import pickle
import signal
import socket
import sys
from types import FrameType
from typing import Any

CLOSE = b"close"
START_S = 10.0
"""How long a worker may take to start that is to be closed as soon as it has started."""
LOG_LEVEL = "DASK_LOGGING__DISTRIBUTED"
QUIET = {
    # Not Dask's own: its MALLOC_TRIM_THRESHOLD_ slows steps down, and threads are the cluster's.
    "distributed.nanny.pre-spawn-environ": {LOG_LEVEL: os.environ.get(LOG_LEVEL, "warning")},
    # Of the two cores of a small machine an idle cluster of two takes 0.08 with Dask's
    # defaults, 0.017 with these.
    "distributed.worker.profile.enabled": False,
    "distributed.admin.tick.interval": "2s",
    "distributed.worker.memory.monitor-interval": "2s",
    "distributed.admin.system-monitor.interval": "5s",
}
"""Dask's configuration in such a process and its worker."""


def main(fd: int) -> None:
    """Serve the process at the other end of a socket, which has sent what to start."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave_it_to_the_flow)  # not SIG_IGN, which ranks would inherit
    connection = socket.socket(fileno=fd)
    with connection.makefile("rb") as given:
        sys.path[:] = pickle.load(given)  # before Dask and the user's own classes are looked for
        config, scheduler, options = pickle.load(given)
    asyncio.run(_serve(connection, config, scheduler, options))


def _leave_it_to_the_flow(number: int, frame: FrameType | None) -> None:
    pass


async def _serve(
    connection: socket.socket, config: dict[str, Any], scheduler: str, options: dict[str, Any]
) -> None:
    """Run the nanny until it is closed. Ends at once, and its worker with it, with the flow."""
    import dask  # noqa: PLC0415 - spawned workers import this module too

    dask.config.update(dask.config.config, config)
    dask.config.set(QUIET)
    reader, writer = await asyncio.open_connection(sock=connection)
    told = asyncio.ensure_future(_told(reader))
    starts = asyncio.ensure_future(_start(scheduler, options))
    await asyncio.wait([told, starts], return_when=asyncio.FIRST_COMPLETED)
    if told.done():
        # Its worker, which watches this process, would look for a scheduler that is gone.
        if told.result() != CLOSE:
            os._exit(1)
        # Killed as it starts, it leaves semaphores, and Python prints that they leaked.
        await asyncio.wait([starts], timeout=START_S)
        if not starts.done():
            os._exit(0)
    try:
        nanny = starts.result()
    except Exception as error:  # noqa: BLE001 - who waits for it says so
        writer.write(f"{type(error).__name__}: {error}".encode())
        writer.write_eof()
        await writer.drain()
        os._exit(1)
    writer.write(b"\n")
    ended = asyncio.ensure_future(_end(nanny))
    await asyncio.wait([told, ended], return_when=asyncio.FIRST_COMPLETED)
    if told.done() and told.result() != CLOSE:
        os._exit(1)  # the flow was killed: its worker watches this process, and ends
    with contextlib.suppress(Exception):
        await nanny.close()
    os._exit(0)


async def _start(scheduler: str, options: dict[str, Any]) -> Any:
    from distributed import Nanny  # noqa: PLC0415

    return await Nanny(scheduler, **options)


async def _told(reader: asyncio.StreamReader) -> bytes:
    """Return the flow's order; nothing once the flow is gone."""
    try:
        return await reader.read(len(CLOSE))
    except OSError:  # it had not read the answer
        return b""


async def _end(nanny: Any) -> None:
    await nanny.finished()


if __name__ == "__main__":
    main(int(sys.argv[1]))
