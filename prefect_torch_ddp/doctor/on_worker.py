"""The checks that the doctor runs on each Dask worker with `Client.run`; all are short."""

import asyncio
import logging
import os
import resource
import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from distributed import Worker

from prefect_torch_ddp.errors import ObjectNotFoundError, StorageError
from prefect_torch_ddp.gang.worker.child import has_pidfd
from prefect_torch_ddp.storage.protocol import Storage

CONNECT_S = 3.0
SHARE = "use a folder that all hosts mount under one path, or S3"
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - where DataLoader workers put their batches

_listening: list[socket.socket] = []


@dataclass(frozen=True)
class WorkerFacts:
    """What a Dask worker's process and machine have."""

    num_cores: int
    can_fork: bool
    """Whether its ranks are forked, which starts them in a tenth of a second."""
    max_open_files: int
    shared_memory_bytes: int
    """Free in /dev/shm."""


def look() -> WorkerFacts:
    """Return the facts of this process and its machine."""
    try:
        shared_bytes = shutil.disk_usage(SHARED_MEMORY).free
    except OSError:
        shared_bytes = 0  # there is none
    return WorkerFacts(
        num_cores=len(os.sched_getaffinity(0)),
        can_fork=has_pidfd(),
        max_open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        shared_memory_bytes=shared_bytes,
    )


def fails_to_use(storage: Storage, key: str) -> str:
    """Return why this process can't use the storage as ranks do; empty if it can.

    Args:
        storage: where ranks write checkpoints and records.
        key: an object that the doctor has written.
    """
    try:
        storage.read(key)
    except ObjectNotFoundError:
        return f"doesn't see what was written here to {storage.uri}: {SHARE}"
    except StorageError as error:
        return f"can't read what was written here to {storage.uri}: {error}"
    try:
        storage.check_writable()
    except StorageError as error:
        return f"can't write to {storage.uri}: {error}"
    return ""


def listen(hosts: Mapping[str, str], dask_worker: Worker) -> tuple[str, int]:
    """Open a port at this worker's address; nobody is answered there. `close` closes it."""
    host = hosts[dask_worker.address]
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    _listening.append(socket.create_server((host, 0), family=family))
    return host, _listening[-1].getsockname()[1]


async def unreachable(addresses: Mapping[str, tuple[str, int]]) -> dict[str, str]:
    """Return the workers that can't be reached from here, and why."""

    async def why(address: tuple[str, int]) -> str:
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(*address), CONNECT_S)
        except TimeoutError:
            return f"no answer from {address[0]} in {CONNECT_S:g} s: is a firewall between them?"
        except OSError as error:
            return f"{os.strerror(error.errno)}: {address[0]}" if error.errno else str(error)
        writer.close()
        return ""

    found = await asyncio.gather(*map(why, addresses.values()))
    return {worker: reason for worker, reason in zip(addresses, found, strict=True) if reason}


def close() -> None:
    """Close what `listen` opened."""
    while _listening:
        _listening.pop().close()


def hush() -> None:
    """Keep this worker from logging as it ends.

    Otherwise a heartbeat that is under way when the scheduler closes logs a traceback.
    """
    logging.getLogger("distributed.worker").setLevel(logging.CRITICAL)
