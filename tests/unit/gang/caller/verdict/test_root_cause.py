"""Which failure is the root cause is a pure decision."""

from dataclasses import replace

import pytest

from prefect_torch_ddp.errors import RankFailedError, WorkerLostError
from prefect_torch_ddp.gang.caller.verdict.root_cause import (
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

CLOSED_TEXT = "RuntimeError: Connection closed by peer"
CLOSED = RankFailure(0, "a", 1, "exception", CLOSED_TEXT, is_collateral=True)
BOOM = RankFailure(1, "b", 2, "exception", "ValueError: boom")
KILLED = replace(BOOM, kind="signal", signal=9)
LOST = RankFailure(2, "b", 0, "worker_lost", "worker tcp://b:1 was lost")


def test_a_cause_is_blamed_though_its_consequence_was_seen_first() -> None:
    """The collateral failure is listed as such."""
    failures = judge([CLOSED, BOOM])
    assert failures == (BOOM, CLOSED)
    error = error_for(failures, attempt=3)
    assert isinstance(error, RankFailedError)
    assert str(error).startswith("rank 1 on b failed in attempt 3: ValueError: boom")
    assert f"as a consequence:\n  rank 0 on a: {CLOSED_TEXT}" in str(error)


def test_a_rank_that_returned_early_is_blamed_when_all_else_is_consequence() -> None:
    """Returning while a peer waits in a collective names the rank that returned."""
    place = RankPlace(rank=1, local_rank=0, node_rank=1, worker="tcp://b:1", host="b")
    cause, *collateral = judge([CLOSED], [place])
    assert (cause.rank, cause.kind, collateral) == (1, "returned", [CLOSED])
    assert judge([CLOSED, BOOM], [place])[0] == BOOM
    assert judge([CLOSED, replace(CLOSED, rank=3)])[0] == CLOSED, "else the first seen"


def test_a_lost_worker_names_all_its_ranks() -> None:
    """A worker's loss is one error for all ranks it held."""
    error = error_for(judge([CLOSED, LOST, replace(LOST, rank=3)]), attempt=1)
    assert isinstance(error, WorkerLostError)
    assert "worker tcp://b:1 was lost; it held ranks 2, 3 in attempt 1" in str(error)


def test_identical_failures_are_one_line() -> None:
    """They are reported once, with all their ranks by host, as cause and as consequence."""
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
        f"  ranks 4, 5 on c: {CLOSED_TEXT}",
    ]


@pytest.mark.parametrize(
    ("failures", "num_returned", "world_size", "for_cause_s", "for_identical_s"),
    [
        ([CLOSED], 0, 2, SILENT_SETTLE_S, 0),  # the cause may be slow to say so, or its worker lost
        ([CLOSED], 1, 3, SETTLE_S, 0),  # a rank that returned is cause enough
        ([CLOSED, replace(CLOSED, rank=3)], 0, 2, SETTLE_S, 0),  # all have failed
        ([CLOSED, BOOM], 0, 3, 0, IDENTICAL_S),
        ([BOOM], 0, 2, 0, IDENTICAL_S),
        ([BOOM, CLOSED], 0, 2, 0, 0),
        ([KILLED], 0, 2, 0, 0),
    ],
)
def test_a_cause_and_then_identical_exceptions_are_waited_for(
    failures: list[RankFailure],
    num_returned: int,
    world_size: int,
    for_cause_s: float,
    for_identical_s: float,
) -> None:
    """For a cause longer while a rank is silent, and not at all once it has shown; for what other
    ranks may still raise the same a moment. Nothing is identical to a kill."""
    assert settle_s(failures, num_returned, world_size) == for_cause_s
    assert identical_s(failures, num_returned, world_size) == for_identical_s
