"""Cutting a batch into micro-batches, whatever structure of tensors it is."""

from collections.abc import Iterator, Mapping
from numbers import Number
from typing import Any

import torch

from prefect_torch_ddp.data.sampler import whole_number
from prefect_torch_ddp.errors import InvalidParamsError

_CANT_CUT = "ctx.micro_batches can't cut"
_SCALARS = str | bytes | Number | None
_FIRST_DIMENSION = "the first dimension of every tensor is the sample's"
_DROPS = "; if collate_fn leaves samples out, leave them out of the dataset instead"


def pieces(num_rows: int, max_samples: int | None) -> list[range]:
    """Cut so many rows into pieces of `max_samples`, of which the last may be smaller."""
    size = num_rows if max_samples is None else whole_number("max_samples", max_samples, 1)
    rows = range(num_rows)
    return [rows[start : start + size] for start in range(0, num_rows, size)]


def count_rows(batch: Any, expected: int | None) -> int:
    """Return how many samples a batch has, or refuse it, naming the part that can't be cut.

    Args:
        batch: a tensor, or mappings, tuples and lists of tensors, also with lists of plain
            values; every part has a row for each sample. A number or text is of the whole batch.
        expected: how many the rank's share has; None if that isn't known.
    """
    sizes = {name: _num_rows(column, name) for name, column in _columns(batch, "batch")}
    if not sizes:
        what = f"a {type(batch).__name__} without a tensor in it"
        msg = f"{_CANT_CUT} {what}; pass the batch as the loader gave it"
        raise InvalidParamsError(msg)
    num_rows = next(iter(sizes.values())) if expected is None else expected
    for name, size in sizes.items():
        if size != num_rows or size == 0:
            rows = f"it has {size} rows where this rank's share has {num_rows} samples"
            is_smaller = expected is not None and {*sizes.values()} == {size} and size < expected
            hint = _DROPS if is_smaller else ""
            msg = f"{_CANT_CUT} {name}: {rows}; {_FIRST_DIMENSION}{hint}"
            raise InvalidParamsError(msg)
    return num_rows


def cut(item: Any, rows: range) -> Any:
    """Return the same structure with only these rows; tensors are views, mappings plain dicts."""
    if isinstance(item, torch.Tensor) or _has_one_a_sample(item):
        return item[rows.start : rows.stop]
    if isinstance(item, Mapping):
        return {key: cut(value, rows) for key, value in item.items()}
    if isinstance(item, tuple | list):
        parts = [cut(value, rows) for value in item]
        return type(item)(*parts) if hasattr(item, "_fields") else type(item)(parts)
    return item


def _columns(item: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield what is cut, with a name that says where it is."""
    if isinstance(item, torch.Tensor) or _has_one_a_sample(item):
        yield name, item
    elif isinstance(item, Mapping):
        for key, value in item.items():
            yield from _columns(value, f"{name}[{key!r}]")
    elif isinstance(item, tuple | list):
        for position, value in enumerate(item):
            yield from _columns(value, f"{name}[{position}]")
    elif not isinstance(item, _SCALARS):  # such a one is the whole batch's
        cuts = "it cuts tensors, and mappings, tuples and lists of them: have collate_fn give those"
        msg = f"{_CANT_CUT} {name}, a {type(item).__name__}; {cuts}"
        raise InvalidParamsError(msg)


def _num_rows(column: Any, name: str) -> int:
    if isinstance(column, torch.Tensor) and column.ndim == 0:
        instead = "give one that is the whole batch's as a plain number"
        msg = f"{_CANT_CUT} {name}: it is a single number; {_FIRST_DIMENSION}; {instead}"
        raise InvalidParamsError(msg)
    return len(column)


def _has_one_a_sample(item: Any) -> bool:
    """Tell a list of a value for each sample, such as names, from a list of the batch's parts."""
    if not isinstance(item, tuple | list) or hasattr(item, "_fields"):
        return False
    return any(map(_is_something, item)) and all(map(_is_of_one_sample, item))


def _is_something(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_is_something, value.values()))
    return value is not None


def _is_of_one_sample(value: Any) -> bool:
    """Tell what can be of one sample, such as its name or `{"id": 7}`, from what has rows."""
    if isinstance(value, Mapping):
        return all(
            isinstance(of, _SCALARS | Mapping) and _is_of_one_sample(of) for of in value.values()
        )
    return not isinstance(value, torch.Tensor | tuple | list)
