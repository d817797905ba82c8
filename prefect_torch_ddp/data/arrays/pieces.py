"""The samples of arrays, in pieces that are read at once, and the batches made of them."""

from collections.abc import Sequence
from functools import cached_property
from math import prod
from typing import Any, Literal, TypeAlias

import numpy as np

from prefect_torch_ddp.data.arrays.axes import ArrayPiece, Axis, pieces_of
from prefect_torch_ddp.data.arrays.decoded import DecodedSamples
from prefect_torch_ddp.data.arrays.form import INDEX, ArrayForm
from prefect_torch_ddp.data.arrays.variables import (
    Array,
    Found,
    Variable,
    digest_of_coordinates,
    has_nan,
)
from prefect_torch_ddp.data.sampler import short_digest
from prefect_torch_ddp.data.traits import Trait, spread
from prefect_torch_ddp.errors import InvalidParamsError, StorageError

Nan: TypeAlias = Literal["refuse", "keep"] | float
"""What a NaN becomes."""
INT64 = np.iinfo(np.int64)


class ArrayPieces:
    """The samples of arrays.

    Args:
        found: the arrays.
        axes: along which samples lie, the first one first.
        used: the positions of each dimension that are used.
        nan: what a NaN becomes.
        is_numbered: whether batches have the numbers of their samples.
    """

    def __init__(
        self,
        found: Found,
        axes: Sequence[Axis],
        used: dict[str, range],
        nan: Nan,
        *,
        is_numbered: bool,
    ) -> None:
        self.found, self.axes, self.nan = found, axes, nan
        self._used = used
        self._axis = {axis.name: axis for axis in axes}
        variables = found.variables
        if is_numbered and not found.is_single and INDEX in (each.name for each in variables):
            msg = f"numbered=True names the numbers {INDEX}, and {found.uri} has a variable {INDEX}"
            raise InvalidParamsError(msg)
        self.form = ArrayForm(
            tuple(variable.name for variable in variables),
            tuple(variable.dtype for variable in variables),
            tuple(self._shape(variable) for variable in variables),
            found.is_single,
            is_numbered,
        )
        chunks: dict[str, int] = {}
        for variable in variables:
            for dim, size in zip(variable.dims, variable.chunks or (), strict=False):
                chunks[dim] = max(size, chunks.get(dim, 1))
        self.pieces = pieces_of(axes, chunks, max(1, self.form.row_bytes))

    def _shape(self, variable: Variable) -> tuple[int, ...]:
        """Return the shape of a sample."""
        kept = (dim for dim in variable.dims if dim not in self._axis or self._axis[dim].is_kept)
        return tuple(
            self._axis[dim].extent if dim in self._axis else len(self._used[dim]) for dim in kept
        )

    @property
    def traits(self) -> dict[str, list[Trait]]:
        """Names and shapes, and a few coordinates: equal on all ranks."""
        shapes: list[Trait] = [[each.name, *each.shape] for each in self.found.variables[:8]]
        coordinates: list[Trait] = [
            [float(value) for value in values_of(self.found.coordinates[axis.name], axis)]
            for axis in self.axes
            if _is_number(self.found.coordinates.get(axis.name))
        ]
        return {"shapes of arrays": shapes, "coordinates": coordinates}

    @cached_property
    def layout(self) -> str:
        """A digest of what samples are, and of all that is known of the arrays that are used.

        What lies outside of the positions that are used doesn't count: an array may grow.
        """
        sizes = [piece.num_rows for piece in self.pieces]
        coordinates = {
            dim: digest_of_coordinates(values[self._used[dim].start : self._used[dim].stop])
            for dim, values in sorted(self.found.coordinates.items())
            if dim in self._used
        }
        contents = [
            (each.dims, each.content and each.content([self._used[dim] for dim in each.dims]))
            for each in self.found.variables
        ]
        what = (self.form.names, self.form.shapes, [*self.axes], sizes, coordinates, contents)
        digest = short_digest(repr(what).encode(errors="surrogatepass"))
        return f"arrays with the digest {digest}"

    def __len__(self) -> int:
        return prod(axis.num for axis in self.axes)

    def room_for(self, pieces: Sequence[int]) -> DecodedSamples:
        """Return what the samples of these pieces are read into."""
        return DecodedSamples(self.form, self.pieces, pieces, self.decode)

    def decode(self, number: int) -> list[Array]:
        """Read a piece; return a view of each variable's samples.

        Returns:
            Arrays [samples along each axis, or 1 if the variable lacks that; ...].

        Raises:
            InvalidParamsError: it has a NaN that is refused, or a number too large for int64.
            StorageError: it can't be read.
        """
        piece = self.pieces[number]
        return [self._samples(variable, piece) for variable in self.found.variables]

    def _samples(self, variable: Variable, piece: ArrayPiece) -> Array:
        blocks = {axis.name: block for axis, block in zip(self.axes, piece.blocks, strict=True)}
        box = tuple(
            self._axis[dim].positions(blocks[dim])
            if dim in blocks
            else slice(self._used[dim].start, self._used[dim].stop)
            for dim in variable.dims
        )
        values = variable.read(box)
        expected = tuple(each.stop - each.start for each in box)
        if values.shape != expected:
            msg = f"{self.found.uri}: {variable.name} gave {values.shape}, and not {expected}"
            raise StorageError(msg)
        if self.nan != "keep" and has_nan(values):
            values = self._without_nan(variable, piece, values)
        self._refuse_wrapped(variable, values)
        samples = self._cut(variable, variable.converted(values))
        # Between samples that lie far apart there are values that nobody needs.
        return samples if values.size <= samples.size else np.ascontiguousarray(samples)

    def _cut(self, variable: Variable, values: Array) -> Array:
        """Return a view of the samples in a box of a variable."""
        along = [axis for axis in self.axes if axis.name in variable.dims]
        positions = tuple(variable.dims.index(axis.name) for axis in along)
        if along:
            extents = [axis.extent for axis in along]
            values = np.lib.stride_tricks.sliding_window_view(values, extents, axis=positions)
            steps = [slice(None)] * len(variable.dims)
            for axis, position in zip(along, positions, strict=True):
                steps[position] = slice(None, None, axis.stride)
            values = values[tuple(steps)]
        # Now the first dimensions are the variable's, and those of the windows follow them.
        num = len(variable.dims)
        windows = {axis.name: num + i for i, axis in enumerate(along)}
        inner = [windows.get(dim, i) for i, dim in enumerate(variable.dims)]
        kept = [
            position
            for dim, position in zip(variable.dims, inner, strict=True)
            if dim not in self._axis or self._axis[dim].is_kept
        ]
        dropped = [windows[axis.name] for axis in along if not axis.is_kept]
        cut = values.transpose([*positions, *kept, *dropped])
        cut = cut.reshape(cut.shape[: cut.ndim - len(dropped)]) if dropped else cut
        lacking = [i for i, axis in enumerate(self.axes) if axis.name not in variable.dims]
        return np.expand_dims(cut, tuple(lacking)) if lacking else cut

    def _refuse_wrapped(self, variable: Variable, values: Array) -> None:
        """Refuse a number that would be negative in int64."""
        is_uint64 = values.dtype.kind == "u" and values.dtype.itemsize == INT64.dtype.itemsize
        if not is_uint64 or variable.scale is not None or not values.size:
            return
        # First of all values, since samples may overlap; the largest may lie between samples.
        if values.max() <= INT64.max or (most := self._cut(variable, values).max()) <= INT64.max:
            return
        msg = (
            f"{self.found.uri}: {variable.name} has {most}, which is too large for int64: cast it "
            "to float64 in prepare"
        )
        raise InvalidParamsError(msg)

    def _without_nan(self, variable: Variable, piece: ArrayPiece, values: Array) -> Array:
        if isinstance(self.nan, float | int):
            return np.where(np.isnan(values), np.asarray(self.nan, values.dtype), values)
        found = np.argwhere(np.isnan(self._cut(variable, values)))
        if not len(found):
            return values  # it lies between samples
        numbers = [block[int(i)] for block, i in zip(piece.blocks, found[0], strict=False)]
        where = ", ".join(
            f"{axis.name} from {axis.start(number)} on"
            for axis, number in zip(self.axes, numbers, strict=True)
            if axis.name in variable.dims
        )
        msg = (
            f"{self.found.uri}: {variable.name} has NaN in the sample at {where or 'each place'}: "
            "fill it in prepare, or pass nan=0.0, another number, or 'keep' to array()"
        )
        raise InvalidParamsError(msg)

    def where(self, number: int) -> dict[str, Any]:
        """Return the coordinates of a sample along each axis; positions where it has none."""
        low, high = 0, len(self.pieces)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.pieces[middle].first_id <= number else (low, middle)
        piece = self.pieces[low]
        at = np.unravel_index(number - piece.first_id, tuple(map(len, piece.blocks)))
        coordinates: dict[str, Any] = {}
        for axis, block, i in zip(self.axes, piece.blocks, at, strict=True):
            start = axis.start(block[int(i)])
            values = self.found.coordinates.get(axis.name)
            some = range(start, start + axis.extent)
            inside = np.array(some) if values is None else values[some.start : some.stop]
            coordinates[axis.name] = inside if axis.is_kept else inside[0]
        return coordinates


def values_of(values: Array, axis: Axis) -> Any:
    """Return a few of the coordinates where samples begin."""
    return [values[axis.start(number)] for number in spread(axis.num)]


def _is_number(values: Array | None) -> bool:
    return values is not None and values.dtype.kind in "iuf"
