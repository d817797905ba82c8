"""What a loader is given: which datasets and choices can work, and why the others can't."""

import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence, Sized
from itertools import islice
from typing import Any, Literal, TypeAlias, TypeGuard, get_args

import numpy as np
import torch
from torch.multiprocessing import get_sharing_strategy
from torch.utils.data import Dataset, IterableDataset

from prefect_torch_ddp.data.fetching import may_skip
from prefect_torch_ddp.data.shards import ReadByPosition, Sharded
from prefect_torch_ddp.errors import InvalidParamsError

Weights: TypeAlias = Sequence[float] | torch.Tensor | np.ndarray[Any, Any]
"""How often each sample is drawn, in relation to the others."""
Order: TypeAlias = Callable[[int], Sequence[int] | torch.Tensor | np.ndarray[Any, Any]]
"""Returns the indices of the samples of an epoch, which counts from 0."""
NoneSamples: TypeAlias = Literal["refuse", "keep"]
"""What becomes of a sample that is None in a step."""
OURS = frozenset({"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "generator"})

MAX_FOLDER_BYTES = 75
"""Of the 107 bytes that a socket's path may have, "/pymp-" and "/listener-", each with eight
characters, take 32."""

MAX_SPLITS = 5
"""Names in an error."""
WAYS_OUT = (
    "use a map-style dataset (with __len__ and __getitem__; of Hugging Face's: load_dataset "
    "without streaming=True, or Dataset.from_generator; for Parquet files, "
    "prefect_torch_ddp.data.table; for Zarr, prefect_torch_ddp.data.array); "
    "or give it shards: the methods shards() -> Sequence, num_samples(shard) -> int and "
    "iter_shard(shard) -> Iterator; or pass your own DataLoader to ctx.steps(loader, total=5000), "
    "which counts steps and leaves the order to you"
)
"""For a dataset that is only read in sequence."""


def refuse_clashes(dataloader_kwargs: dict[str, Any], rank: int, world_size: int) -> None:
    """Refuse what the loader decides itself, and what would break the order."""
    if not 0 <= rank < world_size:
        sizes = f"rank is {rank} and world_size is {world_size}"
        msg = f"{sizes}; ranks count from 0 to world_size - 1"
        raise InvalidParamsError(msg)
    clashes = sorted(OURS & dataloader_kwargs.keys())
    if clashes:
        msg = (
            f"{', '.join(clashes)} can't be passed to the DataLoader: the loader decides the "
            "order and the batches itself, so that each sample is used once; "
            "use global_batch_size, shuffle, drop_last and seed of the loader, its weights in "
            "place of a WeightedRandomSampler, and its order in place of any other sampler"
        )
        raise InvalidParamsError(msg)
    if not dataloader_kwargs.get("in_order", True):
        msg = (
            "in_order=False can't be passed to the DataLoader: batches would come in another "
            "order than they are counted in, and be lost or repeated at a resume; leave it out"
        )
        raise InvalidParamsError(msg)


def refuse_orders_of(
    dataset: Any, *, shuffle: bool, weights: object | None, order: object | None
) -> None:
    """Refuse weights of a dataset that isn't drawn from at random, and an order that can't be."""
    if order is not None:
        _refuse_order_of(dataset, order, has_weights=weights is not None)
    elif weights is not None and (has_own_order(dataset) or not shuffle):
        what = _kind_of(dataset) if has_own_order(dataset) else "shuffle=False"
        msg = f"weights draw samples in a random order, and can't be used with {what}"
        raise InvalidParamsError(msg)


def _refuse_order_of(dataset: Any, order: object, *, has_weights: bool) -> None:
    """Refuse an order of the user's own that can't be kept."""
    if has_own_order(dataset) or has_weights or not callable(order):
        is_own = has_own_order(dataset)
        what = f"with {_kind_of(dataset)}" if is_own else "together with weights"
        what = what if callable(order) else f"as a {type(order).__name__}"
        msg = (
            f"order can't be given {what}: it is a function of the epoch, from 0, that returns "
            "the indices of the samples of that epoch"
        )
        raise InvalidParamsError(msg)


def checked_weights(weights: Weights, num_samples: int) -> np.ndarray[Any, Any]:
    """Return the weights as float64 [num_samples], a copy."""
    try:
        given = torch.as_tensor(weights).detach().to("cpu", torch.float64, copy=True)
    except (TypeError, ValueError, RuntimeError) as error:
        msg = f"weights of ctx.loader have to be numbers, one for each sample: {error}"
        raise InvalidParamsError(msg) from error
    if given.shape != (num_samples,):
        what = f"weights have the shape {list(given.shape)}"
        msg = f"{what}, and there are {num_samples} samples: give one number for each sample"
        raise InvalidParamsError(msg)
    if not (given.isfinite().all() and (given >= 0).all() and given.any()):
        msg = "weights of ctx.loader have to be finite, none of them negative and not all 0"
        raise InvalidParamsError(msg)
    values: np.ndarray[Any, Any] = given.contiguous().numpy()
    return values


def check_choices(
    dataset: object, seed_samples: object, none_samples: object, *, is_virtual: bool
) -> None:
    """Refuse choices that are unknown, or that don't go together."""
    if none_samples not in get_args(NoneSamples):
        msg = f"none_samples is {none_samples!r}; choose 'refuse' or 'keep'"
        raise InvalidParamsError(msg)
    if not isinstance(seed_samples, bool) and seed_samples != "torch":
        msg = f"seed_samples is {seed_samples!r}; choose True, 'torch' or False"
        raise InvalidParamsError(msg)
    if may_skip(dataset) and is_virtual:
        msg = (
            "on_error='skip' can't be used with determinism='elastic': "
            "pass on_error='raise', and replace what can't be read"
        )
        raise InvalidParamsError(msg)
    if seed_samples is not True and (is_virtual or has_own_order(dataset)):
        msg = (
            f"seed_samples={seed_samples!r} can't be used with determinism='elastic', "
            "a dataset in shards or a table: leave it out"
        )
        raise InvalidParamsError(msg)


def is_sharded(dataset: object) -> TypeGuard[Sharded]:
    """Tell whether a dataset is read shard by shard."""
    # It has no items of its own: torch's base class has a method that only raises.
    own = getattr(type(dataset), "__getitem__", None)
    has_items = own is not None and own is not Dataset.__getitem__ and isinstance(dataset, Sized)
    return isinstance(dataset, Sharded) and (isinstance(dataset, IterableDataset) or not has_items)


def has_own_order(dataset: object) -> bool:
    """Tell whether a dataset is read by position, in an order that isn't the sampler's."""
    return isinstance(dataset, ReadByPosition) or is_sharded(dataset)


def _kind_of(dataset: object) -> str:
    if isinstance(dataset, ReadByPosition):
        return "a table or an array, read in windows (a table's local_copy=True allows it)"
    return "a dataset in shards"


def count_samples(dataset: object) -> int:
    """Return the length of a map-style dataset; refuse another one."""
    name = type(dataset).__name__
    if isinstance(dataset, Mapping) and 0 not in dataset:  # Hugging Face's load_dataset gives it
        some = ", ".join(map(repr, islice(dataset, MAX_SPLITS)))
        msg = f"a {name} of {some} isn't one dataset: pass one of its values to ctx.loader"
        raise InvalidParamsError(msg)
    if isinstance(dataset, IterableDataset):
        what = f"{name} is an IterableDataset, which can't promise each sample exactly once over"
        msg = f"{what} all ranks; {WAYS_OUT}"
        raise InvalidParamsError(msg)
    if not isinstance(dataset, Sized):
        msg = f"{name} has no __len__; a dataset needs __len__ and __getitem__; {WAYS_OUT}"
        raise InvalidParamsError(msg)
    return len(dataset)


def check_workers(num_workers: int) -> None:
    """Refuse worker processes that couldn't hand on a batch.

    They do so by sockets below the folder for temporary files. If a path is too long, the worker
    prints `OSError: AF_UNIX path too long` and drops the batch, for which its rank waits for ever.
    """
    folder = tempfile.gettempdir()
    too_long = len(os.fsencode(folder)) > MAX_FOLDER_BYTES and sys.version_info < (3, 14)
    strategy = get_sharing_strategy()  # type: ignore[no-untyped-call]
    if num_workers and too_long and strategy == "file_descriptor":
        msg = (
            f"num_workers is {num_workers}, and worker processes can't hand on their batches: "
            f"the path of the folder for temporary files, {folder}, is longer than "
            f"{MAX_FOLDER_BYTES} bytes. Set TMPDIR to a shorter one where the Dask workers start, "
            "or num_workers=0"
        )
        raise InvalidParamsError(msg)
