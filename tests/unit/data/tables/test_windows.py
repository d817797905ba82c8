"""The order of a table's rows, apart from files: each row once, and only the pieces that a rank
needs."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from prefect_torch_ddp.data.sampler import GlobalBatches, RankShares
from prefect_torch_ddp.data.tables.windows import RowOrder


def rows_in_order(order: RowOrder, firsts: list[int], epoch: int) -> list[int]:
    """Return the table's rows in the order of an epoch."""
    found, number = [], 0
    while order.pieces(epoch, number) is not None:
        window = order.window(epoch, number)
        assert window.first == len(found)
        places = window.pieces_of(window.rows)
        of_pieces = np.array([firsts[piece] for piece in window.pieces])
        found += (of_pieces[places] + window.rows - window.starts[places]).tolist()
        number += 1
    return found


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    buffer=st.integers(1, 20),
    batch=st.integers(1, 11),
    world=st.integers(1, 4),
    shuffle=st.booleans(),
    epoch=st.integers(0, 2),
)
def test_each_row_is_there_once_and_a_rank_is_given_the_pieces_of_its_shares(
    *, sizes, buffer, batch, world, shuffle, epoch
) -> None:
    """Over sizes of pieces, windows, batches and worlds: no window is larger than the buffer but
    for a single piece, and what the ranks decode covers their shares and nothing else."""
    order = RowOrder(sizes, 3, shuffle=shuffle, buffer=buffer, global_batch_size=batch)
    firsts = [sum(sizes[:i]) for i in range(len(sizes))]
    rows = rows_in_order(order, firsts, epoch)
    assert sorted(rows) == list(range(sum(sizes)))
    assert shuffle or rows == sorted(rows)
    piece_of = {first + i: n for n, first in enumerate(firsts) for i in range(sizes[n])}
    batches = GlobalBatches(len(rows), batch, shuffle=False)
    shares = [
        {p for b in range(batches.num_batches) for p in batches.share(epoch, b, rank, world)}
        for rank in range(world)
    ]
    number = 0
    while (pieces := order.pieces(epoch, number)) is not None:
        window = order.window(epoch, number)
        assert len(pieces) == 1 or len(window.rows) <= buffer
        here = range(window.first, window.first + len(window.rows))
        for rank in range(world):
            needed = order.pieces_for(window, RankShares.of_rank(rank, world, None))
            assert needed == sorted({piece_of[rows[p]] for p in here if p in shares[rank]})
        number += 1


def test_pieces_and_the_rows_of_a_window_are_mixed_and_differ_by_epoch() -> None:
    """A batch has rows of every piece of its window, sorted by piece, and of no other window."""
    order = RowOrder([100] * 12, 0, shuffle=True, buffer=400, global_batch_size=40)
    firsts = [100 * i for i in range(12)]
    first, second = (rows_in_order(order, firsts, epoch) for epoch in (0, 1))
    assert first != second
    assert [row // 100 for row in first[:400]] != sorted(row // 100 for row in first[:400])
    for begin in range(0, 1200, 40):
        pieces = [row // 100 for row in first[begin : begin + 40]]
        assert pieces == sorted(pieces)
        assert len(set(pieces)) == 4
    assert {row // 100 for row in first[:400]} != {row // 100 for row in second[:400]}


def test_a_rank_of_many_needs_few_pieces_of_a_window() -> None:
    """Of eight ranks each decodes the pieces of its share, and not the whole window."""
    order = RowOrder([1000] * 16, 0, shuffle=True, buffer=16_000, global_batch_size=1600)
    window = order.window(0, 0)
    for rank in range(8):
        needed = order.pieces_for(window, RankShares.of_rank(rank, 8, None))
        assert 2 <= len(needed) <= 4
