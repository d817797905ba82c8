"""What shows that two ranks hold different datasets, read without running the datasets' code.

No sample is fetched: that may draw random numbers, open a file that must not cross a fork, or take
a second. Only what is in memory in a well-known place is looked at, at a few positions: indices of
a subset, tensors, names of files, targets. What can differ between equal datasets is left out:
folders and signatures of paths, the last digits of floats, values of unknown types, and entries
that one rank has filled and another has not yet.
"""

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset

from prefect_torch_ddp.data.fetching import HasLayout, WholeBatches
from prefect_torch_ddp.data.sampler import short_digest

logger = logging.getLogger(__name__)

Trait: TypeAlias = "bool | int | float | str | list[Trait] | dict[str, Trait] | None"
"""A value of a sample, nested as the sample is; None is one of which nothing is known."""

NUM_POSITIONS = 8
MOST_PARTS = 8
"""So many parts of a sample, and members of a dataset of datasets, are looked at."""
MAX_DEPTH = 4
MAX_TEXT = 60
TOLERANCE = 1e-3
"""Relative to the largest value: hosts of different processors round differently."""
COLUMNS = "samples", "imgs", "targets", "labels", "data"
"""Attributes in which datasets keep a value for each sample, as torchvision's do."""


def traits_of(dataset: object, num_samples: int) -> dict[str, list[Trait]]:
    """Return a few values of a dataset's samples, by the name of the place that they are in."""
    try:
        return dict(_look(dataset, "dataset", spread(num_samples), MAX_DEPTH))
    except Exception:
        logger.debug("nothing is known of a %s", type(dataset).__name__, exc_info=True)
        return {}


def layout_of(dataset: object) -> str:
    """Name what datasets of ours were read from, also below torch's; or which samples are chosen.

    Empty, if nothing of it is known. It tells a resume whether an epoch can be continued, and is
    equal on all ranks.
    """
    if isinstance(dataset, HasLayout):
        return dataset.layout
    try:
        found = [*_layouts(dataset, MAX_DEPTH)]
    except Exception:
        logger.debug("nothing is known of a %s", type(dataset).__name__, exc_info=True)
        return ""
    return f"parts with the digest {short_digest(repr(found).encode())}" if found else ""


def _layouts(dataset: Any, depth: int) -> Iterator[str]:
    """Yield the layouts of the datasets that one is made of, and what chooses from them."""
    own: dict[str, Any] = getattr(dataset, "__dict__", {})
    if isinstance(dataset, HasLayout):
        yield dataset.layout
    elif depth:
        yield from _choices(dataset, own)
        for each in _below(dataset, own):
            yield from _layouts(each, depth - 1)


def _choices(dataset: object, own: Mapping[str, Any]) -> Iterator[str]:
    """Yield what says which samples a dataset has, and in which order, with a digest."""
    if isinstance(dataset, Subset) and _is_column(own["indices"]):
        yield f"indices {short_digest(np.asarray(own['indices']).astype(np.int64).tobytes())}"
    elif isinstance(dataset, ConcatDataset):
        yield f"ends {short_digest(repr(own['cumulative_sizes']).encode())}"
    elif own.keys() >= {"root", "samples"} and _is_column(own["samples"]):  # torchvision's
        names = "\n".join(str(path) for path, _ in own["samples"]).replace(str(own["root"]), "")
        yield f"names {short_digest(names.encode(errors='surrogateescape'))}"


def _below(dataset: object, own: Mapping[str, Any]) -> Iterable[Any]:
    """Return the datasets that one is made of."""
    if isinstance(dataset, ConcatDataset | StackDataset):
        members = own["datasets"]
        return list(members.values()) if isinstance(members, Mapping) else list(members)
    inner = own.get("dataset")  # of a Subset, or of what adds a transform, for example
    return [] if _length(inner) is None else [inner]


def spread(length: int) -> list[int]:
    """Return a few positions below a length: the first, the last, and some in between."""
    return sorted({i * (length - 1) // (NUM_POSITIONS - 1) for i in range(NUM_POSITIONS)})


def values_at(column: Any, positions: Sequence[int]) -> list[Trait]:
    """Return what a sequence has at these positions, as plain values."""
    return [_trait_of(column[i], MAX_DEPTH) for i in positions]


def differing(
    here: Mapping[str, Sequence[Trait]], there: Mapping[str, Sequence[Trait]]
) -> str | None:
    """Return the name of a place whose values differ; places known on one side don't count."""
    for name in here.keys() & there.keys():
        mine, others = list(here[name]), list(there[name])
        sizes = [abs(value) for value in (*_floats(mine), *_floats(others))]
        tolerance = TOLERANCE * max(filter(math.isfinite, sizes), default=0.0)
        if not _is_equal(mine, others, tolerance):
            return name
    return None


def _look(
    dataset: Any, name: str, positions: Sequence[int], depth: int
) -> Iterator[tuple[str, list[Trait]]]:
    """Yield the places of a dataset, and what is there of the samples at these positions."""
    own: dict[str, Any] = getattr(dataset, "__dict__", {})
    if not depth:
        return
    if _is_column(dataset):
        yield name, values_at(dataset, positions)
    elif isinstance(dataset, Subset | ConcatDataset | TensorDataset | StackDataset):
        yield from _look_behind(dataset, name, positions, depth - 1)
    elif isinstance(dataset, WholeBatches):
        for i, block in enumerate(dataset.blocks[:MOST_PARTS]):
            yield f"{name}.blocks[{i}]", values_at(block, positions)
        for what, digest in dataset.meaning.items():
            yield f"{what} of {name}", [digest]
    elif _is_table(dataset):
        indices = own["_indices"]
        rows = (i if indices is None else indices.column(0)[i].as_py() for i in positions)
        found = [own["_data"].slice(row, 1).to_pydict() for row in rows]
        yield f"{name}.data", [_trait_of(row, MAX_DEPTH) for row in found]
    else:
        yield from _look_into(own, name, positions, depth, _length(dataset))


def _look_behind(
    dataset: Any, name: str, positions: Sequence[int], depth: int
) -> Iterator[tuple[str, list[Trait]]]:
    """Yield the places of the datasets that one of torch's is made of."""
    own: dict[str, Any] = vars(dataset)
    if isinstance(dataset, Subset):
        if _is_column(indices := own["indices"]):
            chosen = [int(indices[i]) for i in positions]
            yield f"{name}.indices", [*chosen]
            yield from _look(own["dataset"], f"{name}.dataset", chosen, depth)
    elif isinstance(dataset, ConcatDataset):
        for i, (member, inner) in enumerate(_members(own, positions)):
            yield from _look(member, f"{name}.datasets[{i}]", inner, depth)
    else:
        parts = own.get("tensors", own.get("datasets", ()))
        parts = list(parts.values() if isinstance(parts, Mapping) else parts)
        for i, part in enumerate(parts[:MOST_PARTS]):
            yield from _look(part, f"{name}.parts[{i}]", positions, depth)


def _look_into(
    own: Mapping[str, Any], name: str, positions: Sequence[int], depth: int, length: int | None
) -> Iterator[tuple[str, list[Trait]]]:
    for column in COLUMNS:
        values: Any = own.get(column)
        if _is_column(values) and len(values) == length:
            yield f"{name}.{column}", values_at(values, positions)
    # What wraps another dataset, such as with a transform, gives its samples.
    if length is not None and _length(inner := own.get("dataset")) == length:
        yield from _look(inner, f"{name}.dataset", positions, depth - 1)


def _members(
    own: Mapping[str, Any], positions: Sequence[int]
) -> Iterator[tuple[Any, Sequence[int]]]:
    """Yield the datasets of a concatenation that have some of these positions, with those."""
    start = 0
    for member, end in zip(own["datasets"], own["cumulative_sizes"], strict=True):
        if inner := [i - start for i in positions if start <= i < end]:
            yield member, inner
        start = end


def _is_column(value: object) -> bool:
    # Exact types: what is derived from them may run its own code.
    if type(value) is torch.Tensor:
        return value.layout is torch.strided and value.device.type in {"cpu", "cuda"}
    return type(value) in {list, tuple, range, np.ndarray, np.memmap}


def _is_table(dataset: object) -> bool:
    """Tell whether it is a Dataset of Hugging Face's, whose rows are in a table of Arrow.

    Its fingerprint tells nothing: of equal datasets it differs if a function that made them
    can't be pickled, or files have other dates.
    """
    is_theirs = type(dataset).__module__.partition(".")[0] == "datasets"
    return is_theirs and {"_data", "_indices"} <= vars(dataset).keys()


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except Exception:  # noqa: BLE001 - what has none, or only at other times
        return None


def _trait_of(value: Any, depth: int) -> Trait:
    """Return a value as a few plain ones."""
    if isinstance(value, np.generic) or (_is_column(value) and getattr(value, "ndim", 1) == 0):
        value = value.item()
    match value:
        case bool() | int() | float():
            return value
        case complex():
            return [value.real, value.imag]
        case str() | PurePath():
            # A copy may lie in another folder, and a signed URL end otherwise.
            return str(value).partition("?")[0].rstrip("/").rpartition("/")[2][-MAX_TEXT:]
        case bytes():
            return f"{len(value)} bytes, {value[:16].hex()} {value[-16:].hex()}"
    return _leaves(value, depth) if depth else None


def _leaves(value: Any, depth: int) -> Trait:
    """Return a few of the values in a container or an array."""
    if isinstance(value, dict):
        return {str(key): _trait_of(value[key], depth - 1) for key in list(value)[:MOST_PARTS]}
    if type(value) in {torch.Tensor, np.ndarray, np.memmap} and _is_column(value):
        some = [_trait_of(_element(value, at / 4), 0) for at in (1, 2, 3)]
        return some if any(some) else None  # zeros: perhaps memory that is filled later
    if _is_column(value):
        return [len(value), *(_trait_of(each, depth - 1) for each in value[:MOST_PARTS])]
    return None


def _element(values: Any, at: float) -> Any:
    """Return one number of a tensor or array, so far along each of its dimensions."""
    for size in values.shape:
        if not size:
            return None
        values = values[int(size * at)]
    return values


def _floats(trait: Trait) -> Iterator[float]:
    """Yield the floats in it."""
    if isinstance(trait, float):
        yield trait
    elif isinstance(trait, list | dict):
        for each in trait.values() if isinstance(trait, dict) else trait:
            yield from _floats(each)


def _is_equal(here: Trait, there: Trait, tolerance: float) -> bool:
    """Tell whether nothing shows that two values differ."""
    match here, there:
        case list(), list():
            pairs = zip(here, there, strict=False)
            return len(here) == len(there) and all(_is_equal(*each, tolerance) for each in pairs)
        case dict(), dict():
            both = here.keys() & there.keys()
            return all(_is_equal(here[key], there[key], tolerance) for key in both)
        case str(), str():
            return here == there
        case int() | float(), int() | float():
            if here == there or not (isinstance(here, float) or isinstance(there, float)):
                return here == there
            is_nan = math.isnan(here) and math.isnan(there)
            return is_nan or math.isclose(here, there, rel_tol=0.0, abs_tol=tolerance)
    # Nothing is known of one, or it is of another kind: such as a path that one rank has replaced
    # by what was read from it.
    return True
