"""Owns the process group of a rank: its backend, device and store, and the refusal to initialise it twice."""

import functools
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist

from prefect_torch_ddp.messages import RankLaunch

_RULE = 'run_gang and ddp_task initialise the process group themselves; for a function that does it, give process_group="user"'


def device_index(local_rank: int, slot: int, num_devices: int, *, rotated: bool) -> int:
    """Return the CUDA device of a rank.

    Args:
        local_rank: the rank's number on its host.
        slot: the rank's number on its Dask worker.
        num_devices: devices visible to the rank.
        rotated: whether each worker of the host sees another device first (dask-cuda), so that counting starts there.
    """
    return (slot if rotated else local_rank) % num_devices


_device = torch.device("cpu")
_store: dist.Store | None = None
"""Kept to the process's end: rank 0 serves it, and its peers may make new groups after rank 0's function has returned."""


def choose_device(launch: RankLaunch) -> None:
    """Choose the rank's device and make it the current one."""
    global _device  # noqa: PLW0603 - one process is one rank
    if launch.backend == "gloo" or not torch.cuda.is_available():
        return
    place = launch.place
    index = device_index(place.local_rank, place.slot, torch.cuda.device_count(), rotated=launch.rotated_devices)
    torch.cuda.set_device(index)
    _device = torch.device("cuda", index)


def current_device() -> torch.device:
    """Return the device chosen for this rank; the CPU where nobody chose."""
    return _device


def backend_name(backend: str) -> str:
    """Turn `auto` into what torch is told, and refuse a backend that this machine lacks.

    With CUDA, `auto` is nccl for CUDA tensors and gloo for CPU tensors, as torch itself chooses.

    Raises:
        RuntimeError: names the backend and what is missing.
    """
    has_cuda = torch.cuda.is_available()
    if backend == "auto":
        return "cpu:gloo,cuda:nccl" if has_cuda and dist.is_nccl_available() else "gloo"
    if backend == "nccl" and not (has_cuda and dist.is_nccl_available()):
        missing = "this build of torch has no NCCL" if not dist.is_nccl_available() else "torch sees no CUDA device"
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "unset")
        msg = (
            f"backend 'nccl' can't be used on {socket.gethostname()}: {missing} "
            f"(torch {torch.__version__}, CUDA_VISIBLE_DEVICES {visible}); use backend='auto' or 'gloo'"
        )
        raise RuntimeError(msg)
    return backend


@contextmanager
def process_group(launch: RankLaunch) -> Iterator[None]:
    """Bring the process group up as the mode says; it is left to the process's end to take it down."""
    _choose_interface(launch)
    if launch.process_group != "default":
        yield
        return
    name = backend_name(launch.backend)
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
    dist.init_process_group(name, store=store, rank=place.rank, world_size=shape.world_size)
    _refuse_second_initialisation()
    yield


def close_connections() -> None:
    """Close this rank's connections, so that a peer that waits for it in a collective fails instead of waiting for ever."""
    # Not for NCCL: its teardown waits for the peers.
    if dist.is_initialized() and dist.get_backend() == "gloo":
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


def _choose_interface(launch: RankLaunch) -> None:
    """Tell gloo and NCCL the interface that Dask uses too, unless the user chose one.

    Left alone gloo takes the one that the host's own name resolves to, which on Debian is loopback.
    """
    name = _interface_of("127.0.0.1" if launch.shape.num_nodes == 1 else launch.place.host)
    if name is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        if launch.shape.num_nodes > 1:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def _interface_of(address: str) -> str | None:
    wanted = "127.0.0.1" if address.startswith("127.") else address
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.split("%")[0] == wanted for entry in addresses):
            return name
    return None
