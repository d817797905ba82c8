"""How arrays are cut into samples, and samples into pieces that are read at once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import ceil, prod

from prefect_torch_ddp.data.sampler import whole_number
from prefect_torch_ddp.errors import InvalidParamsError

PIECE_BYTES = 4 * 2**20
"""Of samples: small chunks that follow each other along the first axis are read as one piece."""
MAX_PIECE_BYTES = 128 * 2**20
"""Of samples: if those that begin in one chunk take more, it is read for several pieces."""


@dataclass(frozen=True)
class Axis:
    """A dimension along which samples lie."""

    name: str
    first: int
    """The position where the first sample begins."""
    length: int
    """Positions that are used, from `first` on."""
    extent: int
    """Positions in a sample."""
    stride: int
    """Positions from the begin of a sample to that of the next one."""
    is_kept: bool
    """Whether a sample has this dimension; else it is at one position of it."""

    @property
    def num(self) -> int:
        """Number of samples along it."""
        return (self.length - self.extent) // self.stride + 1

    @property
    def left_out(self) -> int:
        """Positions at the end that are in no sample."""
        return self.length - (self.num - 1) * self.stride - self.extent

    def start(self, number: int) -> int:
        """Return the position where a sample begins."""
        return self.first + number * self.stride

    def positions(self, numbers: range) -> slice:
        """Return the positions of samples that follow each other."""
        return slice(self.start(numbers.start), self.start(numbers[-1]) + self.extent)

    def blocks(self, span: int) -> list[range]:
        """Return the samples that begin in each span of positions."""
        found, begin = [], 0
        while begin < self.num:
            end = (self.start(begin) // span + 1) * span
            stop = min(self.num, -((self.first - end) // self.stride))
            found.append(range(begin, stop))
            begin = stop
        return found


@dataclass(frozen=True)
class ArrayPiece:
    """Samples that are read at once."""

    blocks: tuple[range, ...]
    """The numbers of its samples along each axis."""
    num_rows: int
    first_id: int


def axes_of(
    dims: Sequence[str],
    used: Mapping[str, range],
    window: Mapping[str, int],
    patch: Mapping[str, int],
    stride: int | Mapping[str, int] | None,
) -> list[Axis]:
    """Return the axes that samples lie along: the first one, and those of window and patch.

    Args:
        dims: of the arrays, in their order.
        used: the positions of each dimension that are used.
        window: positions of a sample by dimension; samples begin at each position.
        patch: positions of a sample by dimension; samples lie side by side.
        stride: other distances between samples: of the window's, or by dimension.

    Raises:
        InvalidParamsError: they don't fit together, or no sample fits.
    """
    both = window.keys() & patch.keys()
    extents = {**window, **patch}
    strides: dict[str, int] = {name: extents[name] for name in patch}
    if isinstance(stride, Mapping):
        strides.update(stride)
    elif stride is not None:
        strides.update(dict.fromkeys(window or dims[:1], stride))
    known = {*extents, *dims[:1]}
    unknown = sorted({*extents, *strides} - {*dims}) + sorted({*strides} & {*dims} - known)
    if both or unknown:
        what = f"{', '.join(sorted(both))} is in window and in patch"
        what = f"{', '.join(unknown)} is none of them" if unknown else what
        msg = f"window, patch and stride name dimensions, of {', '.join(dims)}: {what}"
        raise InvalidParamsError(msg)
    axes = []
    for name in dims:
        if name not in known:
            continue
        extent = whole_number(f"the extent of {name}", extents.get(name, 1), 1)
        step = whole_number(f"the stride of {name}", strides.get(name, 1), 1)
        span = used[name]
        if extent > len(span):
            msg = f"no sample fits: {name} has {len(span)} positions, and a sample takes {extent}"
            raise InvalidParamsError(msg)
        axes.append(Axis(name, span.start, len(span), extent, step, name in extents))
    return axes


def pieces_of(
    axes: Sequence[Axis], chunks: Mapping[str, int], sample_bytes: int
) -> list[ArrayPiece]:
    """Return the pieces: samples that begin in the same chunks.

    Args:
        axes: the first one first.
        chunks: positions of a chunk by dimension; a dimension that isn't chunked has none.
        sample_bytes: of a sample, in memory.
    """
    first_axis, *others = axes
    blocks = [axis.blocks(chunks.get(axis.name, axis.first + axis.length)) for axis in others]
    span, size = chunks.get(first_axis.name, 1), _bytes(blocks, sample_bytes)
    if span > 1:  # else blocks of a sample each, which may be millions, would take gigabytes
        size *= _longest([first_axis.blocks(span)])
    if size < PIECE_BYTES:
        span *= ceil(PIECE_BYTES / size)
    blocks.insert(0, first_axis.blocks(span))
    while _bytes(blocks, sample_bytes) > MAX_PIECE_BYTES and _longest(blocks) > 1:
        i = next(i for i, each in enumerate(blocks) if _longest([each]) > 1)
        blocks[i] = [half for each in blocks[i] for half in _halves(each)]
    pieces, first = [], 0
    for each in product(*blocks):
        num = prod(map(len, each))
        pieces.append(ArrayPiece(each, num, first))
        first += num
    return pieces


def _bytes(blocks: Sequence[Sequence[range]], sample_bytes: int) -> int:
    return sample_bytes * prod(_longest([each]) for each in blocks)


def _longest(blocks: Sequence[Sequence[range]]) -> int:
    return max(len(block) for each in blocks for block in each)


def _halves(block: range) -> list[range]:
    middle = (len(block) + 1) // 2
    return [half for half in (block[:middle], block[middle:]) if half]
