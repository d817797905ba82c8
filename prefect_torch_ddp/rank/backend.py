"""Owns the choice of the process group's backend, which all ranks have to make alike."""

import dataclasses
import json
import logging
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from prefect_torch_ddp.messages import RankLaunch
from prefect_torch_ddp.rank.device import current_device, device_name, num_devices_seen

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

    With CUDA, `auto` is nccl for CUDA tensors and gloo for CPU tensors, as torch itself chooses.

    Raises:
        RuntimeError: names the backend and what is missing.
    """
    has_cuda = torch.cuda.is_available()
    if backend == "auto":
        return BOTH if has_cuda and dist.is_nccl_available() else "gloo"
    if backend == "nccl" and not (has_cuda and dist.is_nccl_available()):
        missing = "this build of torch has no NCCL" if not dist.is_nccl_available() else "torch sees no CUDA device"
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

    `auto` is gloo for all where NCCL can't be: a rank without CUDA, or several ranks on one device.

    Raises:
        RuntimeError: `nccl` was asked for and can't be; says which ranks, which host and how many devices it has.
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
    store.set(f"claim/{rank}", json.dumps(dataclasses.asdict(Claim(rank, launch.place.host, device, sees))))
    return [Claim(**json.loads(text)) for text in store.multi_get([f"claim/{rank}" for rank in range(world_size)])]


def _ranks(claims: Sequence[Claim]) -> str:
    numbers = [str(claim.rank) for claim in claims]
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    return f"ranks {', '.join(numbers[:-1])} and {numbers[-1]}"
