"""Samples that are None, which a `collate_fn` leaves out: a batch of fewer than were planned."""

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from prefect_torch_ddp.errors import InvalidParamsError

logger = logging.getLogger(__name__)


def counted(
    samples: tuple[int, ...], left_out: Collection[int], *, may_lack: bool
) -> tuple[int, ...]:
    """Return the ids of a batch's samples without those that collate_fn left out.

    Raises:
        InvalidParamsError: it left one out, and the batch's mean counts by the planned number.
    """
    if not left_out:
        return samples
    if not may_lack:
        msg = (
            f"sample {min(left_out)} of the dataset is None, and collate_fn left it out: the "
            "other samples of its share would count for more than those of other shares, and the "
            "gradient be wrong; leave it out of the dataset, as with torch.utils.data.Subset, or "
            "have the dataset return another sample in its place"
        )
        raise InvalidParamsError(msg)
    _warn_of_nones()
    return tuple(sample for sample in samples if sample not in left_out)


@cache
def _warn_of_nones() -> None:
    """Say it once in a process, not in each epoch."""
    logger.warning(
        "collate_fn leaves out samples that are None: they don't count as used, and a ledger "
        "reports them as missing; on several ranks that is an error"
    )


def nones_of(fetched: Any, samples: Sequence[int]) -> tuple[int, ...]:
    """Return the ids of the fetched samples that are None."""
    if not isinstance(fetched, list):
        return ()
    positions = [at for at, sample in enumerate(fetched) if sample is None]
    # A stand-in for skipped images has no id; a `__getitems__` may give a list of something else.
    if not positions or len(fetched) != len(samples):
        return ()
    return tuple(samples[at] for at in positions)


def is_smaller(batch: Any, num_planned: int, num_nones: int) -> bool:
    """Tell whether a batch has the Nones left out, rather than replaced by something.

    Nothing in it has the size planned, and something that of the samples that are left. Where
    rows are tokens, nodes or points in time, nobody can know.
    """
    num_kept = num_planned - num_nones
    parts = batch if isinstance(batch, tuple | list) else (batch,)
    sizes = {size for part in parts for size in _sizes(part)}
    if not sizes and all(part is None for part in parts):
        sizes = {0}
    is_list_of_kept = parts is batch and len(parts) == num_kept
    return num_planned not in sizes and (num_kept in sizes or is_list_of_kept)


def _sizes(item: Any) -> Iterator[int]:
    """Yield the size of each tensor, by its first dimension, and of each tuple and list."""
    if isinstance(item, torch.Tensor):
        yield from item.shape[:1]
    elif isinstance(item, Mapping):
        for value in item.values():
            yield from _sizes(value)
    elif isinstance(item, tuple | list):
        yield len(item)
        for value in item:
            yield from _sizes(value)
