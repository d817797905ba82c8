"""Owns the choice of the process group's backend, which all ranks have to make alike.

Owns the CUDA device of a rank: which of those it sees it takes, and what tells devices apart.
"""

import dataclasses
import json
import logging
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from prefect_torch_ddp.protocol.rank import RankLaunch

logger = logging.getLogger(__name__)

BOTH = "cpu:gloo,cuda:nccl"


@dataclass(frozen=True)
class Claim:
    """What a rank tells the others before they agree."""

    rank: int
    host: str
    device: str | None
    """Equal for two ranks on one GPU; None for the CPU."""
    sees: str
    """How many devices it sees, for people."""


def own_backend(backend: str) -> str:
    """Turn `auto` into what this machine can do, and refuse a backend that it lacks.

    With CUDA, `auto` is nccl for CUDA tensors and gloo for CPU tensors, as torch itself
    chooses.

    Raises:
        RuntimeError: names the backend and what is missing.
    """
    has_cuda = torch.cuda.is_available()
    if backend == "auto":
        return BOTH if has_cuda and dist.is_nccl_available() else "gloo"
    if backend == "nccl" and not (has_cuda and dist.is_nccl_available()):
        missing = (
            "this build of torch has no NCCL"
            if not dist.is_nccl_available()
            else "torch sees no CUDA device"
        )
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "unset")
        msg = (
            f"backend 'nccl' can't be used on {socket.gethostname()}: {missing} "
            f"(torch {torch.__version__}, CUDA_VISIBLE_DEVICES {visible}); use backend='auto' or 'gloo'"
        )
        raise RuntimeError(msg)
    return backend


def why_not_nccl(claims: Sequence[Claim]) -> str | None:
    """Say what keeps these ranks from talking by NCCL; None when nothing does. Pure.

    Args:
        claims: of all ranks, in rank order.
    """
    lacking = [claim for claim in claims if claim.device is None]
    if lacking:
        return f"{_ranks(lacking)} on {lacking[0].host} can't use it"
    by_device: dict[str, list[Claim]] = {}
    for claim in claims:
        by_device.setdefault(str(claim.device), []).append(claim)
    for sharing in by_device.values():
        if len(sharing) > 1:
            return f"{_ranks(sharing)} on {sharing[0].host} share one device ({sharing[0].sees}), which NCCL refuses"
    return None


def agree_on_backend(launch: RankLaunch, store: dist.Store) -> str:
    """Return the backend that all ranks of the gang take; each has to call this.

    `auto` is gloo for all where NCCL can't be: a rank without CUDA, or several ranks on one
    device.

    Raises:
        RuntimeError: `nccl` was asked for and can't be; says which ranks, which host and how
            many devices it has.
    """
    own = own_backend(launch.backend)
    if launch.backend == "gloo":
        return own
    claims = _exchange(launch, store, device_name(current_device()) if own != "gloo" else None)
    reason = why_not_nccl(claims)
    if reason is None:
        return own
    if launch.backend == "nccl":
        msg = f"backend 'nccl' can't be used: {reason}; start no more ranks than there are devices, or use backend='gloo'"
        raise RuntimeError(msg)
    if launch.place.rank == 0 and any(claim.device for claim in claims):
        logger.warning("the ranks talk by gloo and not by NCCL: %s", reason)
    return "gloo"


def _exchange(launch: RankLaunch, store: dist.Store, device: str | None) -> list[Claim]:
    rank, world_size = launch.place.rank, launch.shape.world_size
    sees = num_devices_seen() if device is not None else ""
    store.set(
        f"claim/{rank}",
        json.dumps(dataclasses.asdict(Claim(rank, launch.place.host, device, sees))),
    )
    return [
        Claim(**json.loads(text))
        for text in store.multi_get([f"claim/{rank}" for rank in range(world_size)])
    ]


def _ranks(claims: Sequence[Claim]) -> str:
    numbers = [str(claim.rank) for claim in claims]
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    return f"ranks {', '.join(numbers[:-1])} and {numbers[-1]}"


_device = torch.device("cpu")


def device_index(position: int | None, local_rank: int, num_devices: int) -> int:
    """Return the CUDA device of a rank. Pure.

    Args:
        position: which of the names in its CUDA_VISIBLE_DEVICES was chosen for it; None where
            that isn't set.
        local_rank: the rank's number on its host.
        num_devices: devices that torch sees; of several MIG instances that is one.
    """
    return (local_rank if position is None else position) % num_devices


def choose_device(launch: RankLaunch) -> None:
    """Choose the rank's device and make it the current one, whatever the backend; the CPU where
    there is no CUDA device.
    """
    global _device  # noqa: PLW0603 - one process is one rank
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_devices == 0:
        return
    index = device_index(launch.place.device_position, launch.place.local_rank, num_devices)
    torch.cuda.set_device(index)
    _device = torch.device("cuda", index)


def current_device() -> torch.device:
    """Return the device chosen for this rank; the CPU where nobody chose."""
    return _device


def device_name(device: torch.device) -> str | None:
    """Return what two ranks on one GPU have in common, as NCCL sees it: machine and bus; None
    for the CPU.
    """
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    try:
        bus = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}"  # type: ignore[attr-defined]
    except AttributeError:
        bus = str(properties.uuid)
    return f"{_machine()} {bus}"


def num_devices_seen() -> str:
    """Say how many CUDA devices this process sees, and by which setting."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "unset")
    return f"{torch.cuda.device_count()} CUDA devices are visible there, CUDA_VISIBLE_DEVICES {visible}"


def _machine() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()
