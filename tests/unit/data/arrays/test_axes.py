"""How samples along axes become blocks and pieces."""

import tracemalloc
from itertools import groupby, product
from math import ceil, prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_torch_ddp.data.arrays import axes as array_axes
from prefect_torch_ddp.data.arrays.axes import ArrayPiece, Axis, pieces_of


@st.composite
def axes(draw: st.DrawFn, name: str) -> Axis:
    """An axis with a few samples."""
    extent, stride = draw(st.integers(1, 5)), draw(st.integers(1, 7))
    length = draw(st.integers(extent, 60))
    return Axis(name, draw(st.integers(0, 30)), length, extent, stride, is_kept=True)


def blocks_of(axis: Axis, span: int) -> list[range]:
    """Look at each sample for the span that it begins in."""
    begun = groupby(range(axis.num), key=lambda number: axis.start(number) // span)
    numbers = [list(each) for _, each in begun]
    return [range(each[0], each[-1] + 1) for each in numbers]


def longest(blocks: list[range]) -> int:
    """Return the samples of the longest block."""
    return max(map(len, blocks))


def expected_pieces(
    given: list[Axis], chunks: dict[str, int], sample_bytes: int, least: int, most: int
) -> list[ArrayPiece]:
    """Return the pieces as they were when every sample was looked at."""
    spans = [chunks.get(a.name, a.first + a.length if i else 1) for i, a in enumerate(given)]
    blocks = [blocks_of(axis, span) for axis, span in zip(given, spans, strict=True)]

    def size() -> int:
        return sample_bytes * prod(map(longest, blocks))

    if size() < least:
        blocks[0] = blocks_of(given[0], spans[0] * ceil(least / size()))
    while size() > most and max(map(longest, blocks)) > 1:
        i = next(i for i, each in enumerate(blocks) if longest(each) > 1)
        halves = [(b[: (len(b) + 1) // 2], b[(len(b) + 1) // 2 :]) for b in blocks[i]]
        blocks[i] = [half for both in halves for half in both if half]
    pieces, first = [], 0
    for each in product(*blocks):
        pieces.append(ArrayPiece(each, prod(map(len, each)), first))
        first += pieces[-1].num_rows
    return pieces


@given(axis=axes("time"), span=st.integers(1, 100))
def test_a_block_has_the_samples_that_begin_in_a_span(axis: Axis, span: int) -> None:
    """For any first position, stride and span."""
    assert axis.blocks(span) == blocks_of(axis, span)


@given(
    first=axes("time"),
    second=st.none() | axes("lat"),
    chunks=st.dictionaries(st.sampled_from(["time", "lat"]), st.integers(1, 50)),
    sample_bytes=st.integers(1, 50),
    least=st.integers(1, 400),
    most=st.integers(1, 1000),
)
def test_pieces_are_the_same_as_by_a_look_at_each_sample(
    *,
    first: Axis,
    second: Axis | None,
    chunks: dict[str, int],
    sample_bytes: int,
    least: int,
    most: int,
) -> None:
    """The order of a training, and so a resume, depends on them."""
    used = [first] if second is None else [first, second]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(array_axes, "PIECE_BYTES", least)
        patch.setattr(array_axes, "MAX_PIECE_BYTES", most)
        found = pieces_of(used, chunks, sample_bytes)
    assert found == expected_pieces(used, chunks, sample_bytes, least, most)


def test_memory_grows_with_the_pieces_and_not_with_the_samples() -> None:
    """Of an array without chunks, such as a .npy file, that has many small samples."""
    axis = Axis("row", 0, 1_000_000, 1, 1, is_kept=False)
    tracemalloc.start()
    try:
        pieces = pieces_of([axis], {}, 64)
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sum(piece.num_rows for piece in pieces) == 1_000_000
    assert len(pieces) == 16
    assert most_bytes < 2**16
