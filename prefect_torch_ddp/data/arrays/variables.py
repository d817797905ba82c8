"""The variables of a dataset of arrays, and what reads a box of one."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np

from prefect_torch_ddp.errors import InvalidParamsError

Array: TypeAlias = np.ndarray[Any, Any]
Box: TypeAlias = tuple[slice, ...]

_KINDS = "biufc"
# torch computes with no unsigned integers but uint8.
_WIDER = {"uint16": "int32", "uint32": "int64", "uint64": "int64"}


class ReadBox(Protocol):
    """Reads a box of a variable; can be pickled."""

    def __call__(self, box: Box) -> Array:
        """Return the values in a box, which needn't be copied.

        Raises:
            StorageError: they can't be read.
        """
        ...


class Stored(Protocol):
    """Tells which chunks of an array there are."""

    def refuse_missing(self, used: Sequence[range]) -> None:
        """Refuse an array that lacks a chunk.

        Args:
            used: the positions that are used, along each dimension.

        Raises:
            InvalidParamsError: it does, or nobody can tell; names the array and the chunks.
        """
        ...


class Content(Protocol):
    """Tells other values of an array from these, without reading them; can be pickled."""

    def __call__(self, used: Sequence[range]) -> str:
        """Return a text that is equal for a copy, and as a rule differs for other values.

        Args:
            used: the positions that are used, along each dimension.
        """
        ...


@dataclass(frozen=True)
class Scale:
    """Makes of a value (value - mean) / std."""

    mean: float
    std: float


@dataclass(frozen=True)
class Variable:
    """An array with named dimensions, which is read box by box."""

    name: str
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    """Of the tensor, as NumPy names it."""
    chunks: tuple[int, ...] | None
    """Positions of a chunk, along each dimension; None: it has none."""
    read: ReadBox
    stored: "Stored | None" = None
    """Tells which chunks there are, where that can be known."""
    scale: Scale | None = None
    """How the values that were read become those of the tensors."""
    content: Content | None = None
    """Tells other values, as far as opening them shows."""

    def converted(self, values: Array) -> Array:
        """Return values that were read as those of the tensors; a copy only if they change."""
        if self.scale is None:
            return values.astype(self.dtype, copy=False)
        room = np.empty(values.shape, self.dtype)
        # NumPy would compute in float16. Of integers it makes float64 by itself.
        dtype = room.dtype if values.dtype.kind == "f" else None
        np.subtract(values, self.scale.mean, out=room, casting="same_kind", dtype=dtype)
        room /= self.scale.std
        return room


@dataclass(frozen=True)
class Found:
    """What was opened."""

    uri: str
    variables: list[Variable]
    coordinates: Mapping[str, Array]
    """The values along a dimension, of those that have any."""
    is_single: bool
    """Whether it is one array, and no group of them."""
    read_object: Callable[[str], bytes | None] | None = None
    """Reads another object of the Zarr group by its key, if there is one; None: it has none."""
    sizes: Mapping[str, int] = field(init=False)
    """The positions of each dimension."""

    def __post_init__(self) -> None:
        sizes: dict[str, int] = {}
        for variable in sorted(self.variables, key=lambda each: -len(each.dims)):
            for dim, size in zip(variable.dims, variable.shape, strict=True):
                if sizes.setdefault(dim, size) != size:
                    msg = (
                        f"{self.uri}: {variable.name} has {size} positions of {dim}, and another "
                        f"variable {sizes[dim]}: choose variables that fit together"
                    )
                    raise InvalidParamsError(msg)
        object.__setattr__(self, "sizes", sizes)

    @property
    def dims(self) -> tuple[str, ...]:
        """All dimensions, first those of the variable that has the most."""
        return tuple(self.sizes)


def digest_of_coordinates(values: Array) -> str:
    """Return a digest of the values along a dimension.

    Of floats only the first six digits count: hosts of different processors round differently.
    """
    if values.dtype.kind == "f":
        finite = np.where(np.isfinite(values), values, 0).astype("float64")
        largest = float(np.abs(finite).max(initial=0)) or 1.0
        values = np.rint(finite / largest * 2**20).astype("int64")
    if values.dtype.hasobject:
        return hashlib.sha256(repr(values.tolist()).encode(errors="surrogatepass")).hexdigest()
    return hashlib.sha256(values.tobytes()).hexdigest()


def has_nan(values: Array) -> bool:
    """Tell whether there is a NaN."""
    if values.dtype.kind not in "fc" or not values.size:
        return False
    # The smallest value is NaN if one is, and to find it needs no memory for each value.
    is_quick = values.dtype.kind == "f" and values.dtype.itemsize in {4, 8}
    return bool(np.isnan(values.min() if is_quick else values).any())


def refuse_unheld(found: Found, nan: object) -> None:
    """Refuse a number for NaN that would become infinite in a variable that may have NaN.

    Raises:
        InvalidParamsError: it would; names the variable.
    """
    if not isinstance(nan, int | float):
        return
    for variable in found.variables:
        dtype = np.dtype(variable.dtype)
        if dtype.kind in "fc" and abs(nan) > float(np.finfo(dtype).max):
            msg = (
                f"nan is {nan!r}, which {variable.name} of {found.uri} ({dtype}) can't hold: give "
                "a smaller number"
            )
            raise InvalidParamsError(msg)


def tensor_dtype(name: str, dtype: Any) -> str:
    """Return the dtype of a variable's tensors.

    Raises:
        InvalidParamsError: torch has none for such values.
    """
    found = np.dtype(dtype)
    if found.kind not in _KINDS or found.name in {"longdouble", "float128", "complex256"}:
        msg = (
            f"{name} has values of {found}, of which no tensor can be made: leave it out of "
            "variables, or compute numbers of it in prepare"
        )
        raise InvalidParamsError(msg)
    name_of: str = found.name
    return _WIDER.get(name_of, name_of)


def chosen(
    uri: str, names: Sequence[str], variables: str | Sequence[str] | None, what: str
) -> list[str]:
    """Return the names of the variables that are read; all of them sorted.

    Zarr lists them in another order each time, and the ranks' orders have to agree.

    Raises:
        InvalidParamsError: one isn't there, or there is none.
    """
    given = [variables] if isinstance(variables, str) else variables
    wanted = list(dict.fromkeys(given or sorted(names)))
    missing = [name for name in wanted if name not in names]
    if missing or not wanted:
        has = f"it has {', '.join(sorted(names))}" if names else "it has none"
        msg = f"{uri} has no {what} {', '.join(map(repr, missing)) or 'at all'}; {has}"
        raise InvalidParamsError(msg)
    return wanted


def used_positions(found: Found, select: Mapping[str, Any]) -> dict[str, range]:
    """Return the positions of each dimension that are used.

    Args:
        found: what was opened.
        select: from where to where, by dimension: values of its coordinates, both ends
            included, as `xarray.Dataset.sel` takes them; or positions, if it has none.

    Raises:
        InvalidParamsError: they aren't there, or nothing is left.
    """
    used = {dim: range(size) for dim, size in found.sizes.items()}
    for dim, wanted in select.items():
        if dim not in used or not isinstance(wanted, slice) or wanted.step is not None:
            msg = (
                f"select[{dim!r}] is {wanted!r}: give a slice without a step, such as "
                f"slice('2000', '2015'), of one of the dimensions {', '.join(used)}"
            )
            raise InvalidParamsError(msg)
        try:
            left = used[dim][_positions(wanted, found.coordinates.get(dim))]
        except (KeyError, TypeError, ValueError) as error:
            msg = f"select[{dim!r}] is {wanted!r}, which isn't in {found.uri}: {error}"
            raise InvalidParamsError(msg) from error
        used[dim] = left
        if not left:
            msg = f"select[{dim!r}] is {wanted!r}, and no position of {found.uri} is in it"
            if _descends(found.coordinates.get(dim)):
                msg += f": its {dim} descends, so the larger end comes first"
            raise InvalidParamsError(msg)
    return used


def _positions(wanted: slice, values: Array | None) -> slice:
    if values is None:
        return wanted
    import xarray as xr  # noqa: PLC0415 - only it has coordinates

    # As `sel` does it: pandas finds no text among the dates of calendars without leap days.
    index = xr.Variable("dim", values).to_index()
    if not (index.is_monotonic_increasing or index.is_monotonic_decreasing):
        # What lies between two positions may then be anything: another year, a test sample.
        msg = "its coordinates aren't sorted: sort it in prepare, by sortby"
        raise ValueError(msg)
    positions = index.slice_indexer(wanted.start, wanted.stop)
    if not isinstance(positions, slice):  # of dates that descend, by texts
        msg = "its dates descend: sort it in prepare, by sortby, or give numpy.datetime64 values"
        raise ValueError(msg)  # noqa: TRY004 - a wrong value
    return positions


def _descends(values: Array | None) -> bool:
    return values is not None and len(values) > 1 and bool(values[0] > values[-1])
