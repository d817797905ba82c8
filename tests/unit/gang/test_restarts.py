"""What is kept of a failure, and what that says about another attempt, are pure decisions."""

from dataclasses import replace
from typing import Any

import pytest

from prefect_torch_ddp.errors import (
    GangError,
    GangHungError,
    NotEnoughWorkersError,
    RankFailedError,
    WorkerLostError,
)
from prefect_torch_ddp.gang.restarts import CallAttemptLog, Restarts, record_of, why_hopeless
from prefect_torch_ddp.protocol.events import AttemptBegan, Hang, RankFailure

BOOM = RankFailure(
    rank=1,
    host="b",
    pid=2,
    kind="exception",
    summary="ValueError: boom",
    exception_type="builtins.ValueError",
    step=12,
    retryability="open",
)
KINDS: tuple[Any, ...] = ("exception", "signal", "exit")


def why_final(now: RankFailure, before: RankFailure, *, knows_steps: bool = True) -> str | None:
    """Judge the second of two attempts that failed."""
    error = RankFailedError(now, 2)
    records = record_of(error, 2, 4), record_of(RankFailedError(before, 1), 1, 4)
    return why_hopeless(error, *records, knows_steps=knows_steps)


def test_the_same_exception_at_the_same_step_twice_is_hopeless() -> None:
    """The error says that no other attempt is made, and why; the rank doesn't matter."""
    why = why_final(replace(BOOM, rank=3, host="c"), BOOM)
    assert why is not None
    assert "the same ValueError at step 12 ended attempt 1 too" in why
    assert str(RankFailedError(BOOM, 2).as_final(why)).splitlines()[:2] == [
        "rank 1 on b failed in attempt 2: ValueError: boom",
        f"not tried again: {why}",
    ]


@pytest.mark.parametrize(
    ("now", "before"),
    [
        *((BOOM, replace(BOOM, step=step)) for step in (11, None)),
        (BOOM, replace(BOOM, summary="ValueError: bang")),
        (BOOM, replace(BOOM, exception_type="builtins.TypeError")),
        (BOOM, replace(BOOM, kind="signal", signal=9, retryability="transient")),
        *((replace(BOOM, kind=kind, retryability="transient"),) * 2 for kind in KINDS),
        (replace(BOOM, is_collateral=True),) * 2,
    ],
)
def test_anything_else_is_tried_again(now: RankFailure, before: RankFailure) -> None:
    """Another step, text or type, and a kill before it; OSErrors, memory, kills and lost
    connections however often."""
    assert why_final(now, before) is None


def test_before_the_first_step_counts_where_steps_are_known() -> None:
    """A plain function may have made any number of steps of its own."""
    early = replace(BOOM, step=None)
    assert "the same ValueError before the first step" in (why_final(early, early) or "")
    assert why_final(early, early, knows_steps=False) is None


def test_addresses_in_the_text_are_no_difference() -> None:
    """An object without a __repr__ shows another address in each attempt."""
    texts = (f"ValueError: <Thing object at {address}> is odd" for address in ("0x7f01", "0x7fee"))
    assert why_final(*(replace(BOOM, summary=text) for text in texts)) is not None


def test_a_hopeless_failure_is_not_tried_again_at_all() -> None:
    """An ImportError needs no second time."""
    hopeless = replace(BOOM, retryability="hopeless", exception_type="builtins.ImportError")
    error = RankFailedError(hopeless, 1)
    why = why_hopeless(error, record_of(error, 1, 2), None, knows_steps=False)
    assert "ImportError comes back at every attempt" in (why or "")


HUNG = GangHungError(Hang("rank 1 did not arrive", (1,), ("a",), 5), attempt=1)


@pytest.mark.parametrize("error", [WorkerLostError("worker x was lost"), HUNG])
def test_losses_and_hangs_are_never_hopeless(error: GangError) -> None:
    """They are recorded, in a line for people."""
    record = record_of(error, 3, 2)
    assert (record.attempt, record.world_size, record.fingerprint) == (3, 2, None)
    assert record.summary == str(error).splitlines()[0]
    assert why_hopeless(error, record, record, knows_steps=True) is None


def run(max_restarts: int, *ends: Exception) -> list[bytes]:
    """Run a gang whose attempts end so, one after the other, until one succeeds."""

    def attempt_once(number: int) -> list[bytes]:
        if number <= len(ends):
            raise ends[number - 1]
        return [b"value"]

    return Restarts(CallAttemptLog(), max_restarts, lambda _: None).run(attempt_once)


def test_a_worker_that_left_in_order_costs_no_restart() -> None:
    """Unless nothing was trained since the last time."""
    ends = WorkerLostError("retired", 4), WorkerLostError("retired", 9)
    assert run(0, *ends) == [b"value"]
    with pytest.raises(WorkerLostError, match="retired"):
        run(0, *ends, WorkerLostError("retired", 9))


def test_after_the_last_restart_the_last_failure_counts() -> None:
    """Where no other attempt can be made, the one before is the cause; one that comes back ends it
    earlier."""
    killed = replace(BOOM, kind="signal", signal=9, retryability="transient")
    with pytest.raises(RankFailedError, match="failed in attempt 3") as caught:
        run(2, *(RankFailedError(killed, attempt) for attempt in (1, 2, 3, 4)))
    assert caught.value.why_final is None
    with pytest.raises(RankFailedError, match="not tried again: the same ValueError at step 12"):
        run(2, *(RankFailedError(BOOM, attempt) for attempt in (1, 2, 3)))
    lost = WorkerLostError("worker x was lost")
    with pytest.raises(NotEnoughWorkersError) as refused:
        run(1, lost, NotEnoughWorkersError("have 1, need 2"))
    assert refused.value.__cause__ is lost


def test_a_world_size_left_open_stays_what_it_was() -> None:
    """A restart asks for as many ranks as the first attempt had, whatever there is by then."""
    restarts = Restarts(CallAttemptLog(), 2, lambda _: None)
    assert restarts.size_to_ask_for(None) is None
    for size in (2, 1):
        restarts.receive(AttemptBegan(1, size))
    assert [restarts.size_to_ask_for(given) for given in (None, 4)] == [2, 4]
