"""Owns the process group of a rank: its store, its start and end, and the refusal to initialise
it twice.
"""

import contextlib
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from prefect_torch_ddp.protocol.rank import RankLaunch
from prefect_torch_ddp.rank.distributed.backend import agree_on_backend
from prefect_torch_ddp.rank.distributed.network import use_interface

_RULE = 'run_gang and ddp_task initialise the process group themselves; for a function that does it, give process_group="user"'


_store: dist.Store | None = None
"""Kept to the process's end: rank 0 serves it, and its peers may make new groups after rank 0's
function has returned."""


@contextmanager
def process_group(launch: RankLaunch) -> Iterator[None]:
    """Bring the process group up as the mode says; it is left to the process's end to take it
    down.
    """
    use_interface(launch)
    if launch.process_group != "default":
        yield
        return
    timeout = timedelta(seconds=launch.rendezvous_timeout_s)
    place, shape = launch.place, launch.shape
    tcp = dist.TCPStore(
        launch.master_addr,
        launch.master_port,
        shape.world_size,
        is_master=place.rank == 0,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=launch.store_fd,
    )
    global _store  # noqa: PLW0603 - one process is one rank
    _store = tcp
    store = dist.PrefixStore(f"attempt-{launch.attempt}", tcp)
    name = agree_on_backend(launch, dist.PrefixStore(f"attempt-{launch.attempt}-backend", tcp))
    dist.init_process_group(name, store=store, rank=place.rank, world_size=shape.world_size)
    _refuse_second_initialisation()
    yield


def close_connections() -> None:
    """Close this rank's connections, so that a peer that waits for it in a collective fails
    instead of waiting for ever.
    """
    # Not for NCCL: its teardown waits for the peers.
    if not dist.is_initialized() or dist.get_backend() != "gloo":
        return
    for group in list(dist.distributed_c10d._world.pg_names):
        with contextlib.suppress(RuntimeError):  # a backend without it
            group.abort()  # else the next line waits for ever for a collective that this rank began and peers never joined
    dist.destroy_process_group()


def _refuse_second_initialisation() -> None:
    original = dist.init_process_group

    @functools.wraps(original)
    def refuse(*args: Any, **kwargs: Any) -> None:
        if dist.is_initialized():
            msg = f"init_process_group was called, but the process group is already up: {_RULE}"
            raise RuntimeError(msg)
        original(*args, **kwargs)

    dist.init_process_group = refuse
    dist.distributed_c10d.init_process_group = refuse
