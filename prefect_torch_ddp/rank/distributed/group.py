"""The process group of a rank and its CUDA device: the backend that all agree on, start and end."""

import contextlib
import json
import logging
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from prefect_torch_ddp.protocol.rank import RankLaunch
from prefect_torch_ddp.rank.distributed.network import use_interface

logger = logging.getLogger(__name__)

BOTH = "cpu:gloo,cuda:nccl"
_device = torch.device("cpu")
_store: dist.Store | None = None
"""Kept to the process's end: rank 0 serves it, and its peers may make new groups after rank 0's
function has returned."""


@contextmanager
def process_group(launch: RankLaunch) -> Iterator[None]:
    """Bring the process group up, as the mode says; it lasts to the process's end."""
    use_interface(launch)
    if launch.process_group != "default":
        yield
        return
    tcp = dist.TCPStore(
        launch.master_addr,
        launch.master_port,
        launch.shape.world_size,
        is_master=launch.place.rank == 0,
        timeout=timedelta(seconds=launch.rendezvous_timeout_s),
        wait_for_workers=False,
        master_listen_fd=launch.store_fd,
    )
    global _store  # noqa: PLW0603 - one process is one rank
    _store = tcp
    store = dist.PrefixStore(f"attempt-{launch.attempt}", tcp)
    backend = agree_on_backend(launch, dist.PrefixStore(f"attempt-{launch.attempt}-backend", tcp))
    dist.init_process_group(
        backend, store=store, rank=launch.place.rank, world_size=launch.shape.world_size
    )
    yield


def close_connections() -> None:
    """Close this rank's connections, so that a peer waiting in a collective fails at once."""
    # Not for NCCL: its teardown waits for the peers.
    if not dist.is_initialized() or dist.get_backend() != "gloo":
        return
    # Nothing public lists the groups.
    for group in list(dist.distributed_c10d._world.pg_names):  # noqa: SLF001
        with contextlib.suppress(RuntimeError):  # a backend without it
            # Else the next line waits forever for a collective that peers never joined.
            group.abort()
    dist.destroy_process_group()


@dataclass(frozen=True)
class Claim:
    """What a rank sends to the others before they agree on a backend."""

    rank: int
    host: str
    device: str | None
    """Equal for two ranks on one GPU; None for the CPU."""
    sees: str
    """How many devices it sees, for people."""


def agree_on_backend(launch: RankLaunch, store: dist.Store) -> str:
    """Return the backend that all ranks of the gang take; each has to call this.

    `auto` is gloo for all where NCCL can't work: a rank without CUDA, or several on one device.
    Then `nccl` is a RuntimeError that names the ranks, their host and its devices.
    """
    own = own_backend(launch.backend)
    if launch.backend == "gloo":
        return own
    claims = _exchange(launch, store, device_name(current_device()) if own != "gloo" else None)
    reason = why_not_nccl(claims)
    if reason is None:
        return own
    if launch.backend == "nccl":
        msg = (
            f"backend 'nccl' can't be used: {reason}; start no more ranks than there are devices, "
            "or use backend='gloo'"
        )
        raise RuntimeError(msg)
    if launch.place.rank == 0 and any(claim.device for claim in claims):
        logger.warning("the ranks talk by gloo and not by NCCL: %s", reason)
    return "gloo"


def own_backend(backend: str) -> str:
    """Turn `auto` into what this machine can do, or say what the backend asked for lacks here."""
    has_cuda, has_nccl = torch.cuda.is_available(), dist.is_nccl_available()
    if backend == "auto":
        return BOTH if has_cuda and has_nccl else "gloo"
    if backend == "nccl" and not (has_cuda and has_nccl):
        missing = "torch sees no CUDA device" if has_nccl else "this build of torch has no NCCL"
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "unset")
        msg = (
            f"backend 'nccl' can't be used on {socket.gethostname()}: {missing} (torch "
            f"{torch.__version__}, CUDA_VISIBLE_DEVICES {visible}); use backend='auto' or 'gloo'"
        )
        raise RuntimeError(msg)
    return backend


def why_not_nccl(claims: Sequence[Claim]) -> str | None:
    """Say what keeps these ranks, in rank order, from using NCCL; None when nothing does."""
    lacking = [claim for claim in claims if claim.device is None]
    if lacking:
        return f"{_ranks(lacking)} on {lacking[0].host} can't use it"
    by_device: dict[str, list[Claim]] = {}
    for claim in claims:
        by_device.setdefault(str(claim.device), []).append(claim)
    for sharing in by_device.values():
        if len(sharing) > 1:
            where = f"{_ranks(sharing)} on {sharing[0].host}"
            return f"{where} share one device ({sharing[0].sees}), which NCCL refuses"
    return None


def _exchange(launch: RankLaunch, store: dist.Store, device: str | None) -> list[Claim]:
    place = launch.place
    claim = Claim(place.rank, place.host, device, num_devices_seen() if device else "")
    store.set(f"claim/{place.rank}", json.dumps(asdict(claim)))
    keys = [f"claim/{rank}" for rank in range(launch.shape.world_size)]
    return [Claim(**json.loads(text)) for text in store.multi_get(keys)]


def _ranks(claims: Sequence[Claim]) -> str:
    *others, last = [str(claim.rank) for claim in claims]
    return f"ranks {', '.join(others)} and {last}" if others else f"rank {last}"


def device_index(position: int | None, local_rank: int, num_devices: int) -> int:
    """Return the CUDA device of a rank, by the position in its CUDA_VISIBLE_DEVICES if that is set.

    Of several MIG instances torch sees one device.
    """
    return (local_rank if position is None else position) % num_devices


def choose_device(launch: RankLaunch) -> None:
    """Make the rank's CUDA device the current one, whatever the backend; without CUDA the CPU."""
    global _device  # noqa: PLW0603 - one process is one rank
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_devices == 0:
        return
    index = device_index(launch.place.device_position, launch.place.local_rank, num_devices)
    torch.cuda.set_device(index)
    _device = torch.device("cuda", index)


def current_device() -> torch.device:
    """Return the device chosen for this rank; the CPU where none was chosen."""
    return _device


def device_name(device: torch.device) -> str | None:
    """Return machine and bus, by which NCCL tells GPUs apart; None for the CPU."""
    if device.type != "cuda":
        return None
    properties: Any = torch.cuda.get_device_properties(device)  # torch's stubs lack what is used
    numbers = properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id
    machine = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{machine} {numbers[0]:04x}:{numbers[1]:02x}:{numbers[2]:02x}"


def num_devices_seen() -> str:
    """Say how many CUDA devices this process sees, and by which setting."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "unset")
    count = torch.cuda.device_count()
    return f"{count} CUDA devices are visible there, CUDA_VISIBLE_DEVICES {visible}"
