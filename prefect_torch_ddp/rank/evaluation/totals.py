"""Totals over all ranks: the one way in which meters communicate."""

import logging

import torch
import torch.distributed as dist

from prefect_torch_ddp.errors import InvalidParamsError

logger = logging.getLogger(__name__)


def summed(value: torch.Tensor) -> torch.Tensor:
    """Return the sum over all ranks, each of which must call it; alone, a copy."""
    if place()[1] == 1:
        return value.clone()
    # A rank that never updated still holds CPU zeros, which NCCL would refuse while its peers
    # wait.
    device = torch.device("cpu")
    if dist.get_backend() == "nccl":
        device = torch.device("cuda", torch.cuda.current_device())
    total = value.to(device, copy=True)
    dist.all_reduce(total)
    return total


def place() -> tuple[int, int]:
    """Return this process's rank and the number of ranks."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def refuse_nothing(num: int, what: str = "samples") -> None:
    """Raise where no rank counted anything; on every rank, since all have the same total.

    Raises:
        InvalidParamsError: it is 0.
    """
    if num == 0:
        nothing = f"nothing was evaluated: there were 0 {what} on all ranks together"
        msg = f"{nothing}; check the evaluated split"
        raise InvalidParamsError(msg)


def non_finite(num: int, what: str, left_out: str) -> dict[str, float]:
    """Return the metric that counts values that are no numbers, and warn of them once."""
    if num and place()[0] == 0:
        words = "%d evaluated %s are nan or infinite; the report has no %s"
        logger.warning(words, num, what, left_out)
    return {f"non_finite_{what}": num} if num else {}
