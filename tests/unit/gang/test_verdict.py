"""Who is to blame is a pure decision."""

from dataclasses import replace

from prefect_torch_ddp.errors import RankFailedError, WorkerLostError
from prefect_torch_ddp.gang.caller.root_cause import (
    IDENTICAL_S,
    SETTLE_S,
    SILENT_SETTLE_S,
    error_for,
    identical_s,
    judge,
    settle_s,
)
from prefect_torch_ddp.protocol.events import RankFailure
from prefect_torch_ddp.protocol.rank import RankPlace

CLOSED = RankFailure(
    rank=0,
    host="a",
    pid=1,
    kind="exception",
    summary="RuntimeError: Connection closed by peer",
    is_collateral=True,
)
BOOM = RankFailure(rank=1, host="b", pid=2, kind="exception", summary="ValueError: boom")
LOST = RankFailure(rank=2, host="b", pid=0, kind="worker_lost", summary="worker tcp://b:1 was lost")


def test_a_cause_is_blamed_though_its_consequence_was_seen_first() -> None:
    """The collateral failure is listed as such."""
    root_cause = judge([CLOSED, BOOM])
    assert (root_cause.cause, root_cause.collateral) == (BOOM, (CLOSED,))
    error = error_for(root_cause, attempt=3)
    assert isinstance(error, RankFailedError)
    assert str(error).startswith("rank 1 on b failed in attempt 3: ValueError: boom")
    assert "as a consequence:\n  rank 0 on a: RuntimeError: Connection closed by peer" in str(error)


def test_a_rank_that_returned_early_is_blamed_when_all_else_is_consequence() -> None:
    """Returning while a peer waits in a collective names the rank that returned."""
    place = RankPlace(rank=1, local_rank=0, node_rank=1, slot=0, worker="tcp://b:1", host="b")
    root_cause = judge([CLOSED], [place])
    assert (root_cause.cause.rank, root_cause.cause.kind) == (1, "returned")
    assert judge([CLOSED, BOOM], [place]).cause == BOOM


def test_only_consequences_blame_the_first_seen() -> None:
    """Something must be blamed, and it is said that it is a lost connection."""
    other = replace(CLOSED, rank=3)
    assert settle_s([CLOSED, other], num_returned=0, world_size=2) == SETTLE_S
    assert judge([CLOSED, other]).cause == CLOSED


def test_a_lost_worker_names_all_its_ranks() -> None:
    """A worker's loss is one error for all ranks it held."""
    error = error_for(judge([CLOSED, LOST, replace(LOST, rank=3)]), attempt=1)
    assert isinstance(error, WorkerLostError)
    assert "worker tcp://b:1 was lost; it held ranks 2, 3 in attempt 1" in str(error)


def test_a_silent_rank_is_waited_for_longer() -> None:
    """While all that was seen are consequences the cause may be a rank that is slow to say so,
    or a lost worker's."""
    assert settle_s([CLOSED], num_returned=0, world_size=2) == SILENT_SETTLE_S
    assert settle_s([CLOSED], num_returned=1, world_size=3) == SETTLE_S
    assert settle_s([CLOSED, BOOM], num_returned=0, world_size=3) == 0


def test_equal_failures_are_one_line() -> None:
    """Ranks that say the same are named together, by host, in the cause and among the
    consequences."""
    bad = [
        replace(BOOM, rank=rank, host=host, summary="ValueError: bad lr")
        for rank, host in ((2, "b"), (0, "a"), (1, "a"))
    ]
    closed = [replace(CLOSED, rank=rank, host="c") for rank in (5, 4)]
    error = error_for(judge([*closed, *bad]), attempt=1)
    assert isinstance(error, RankFailedError)
    assert error.rank == 2
    assert str(error).splitlines() == [
        "ranks 0, 1 on a, 2 on b failed in attempt 1: ValueError: bad lr",
        "",
        "as a consequence:",
        "  ranks 4, 5 on c: RuntimeError: Connection closed by peer",
    ]


def test_equals_of_an_exception_are_waited_for() -> None:
    """A moment, while other ranks may still raise the same; a kill has no equals, nor have
    consequences."""
    assert identical_s([BOOM], num_returned=0, world_size=2) == IDENTICAL_S
    assert identical_s([BOOM, CLOSED], num_returned=0, world_size=2) == 0
    assert identical_s([CLOSED], num_returned=0, world_size=2) == 0
    assert identical_s([replace(BOOM, kind="signal", signal=9)], num_returned=0, world_size=2) == 0
