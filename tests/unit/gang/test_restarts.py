"""The attempts of one call follow each other as `policy` decides; see test_policy."""

from dataclasses import replace

import pytest

from prefect_torch_ddp.errors import (
    GangGrowsError,
    NotEnoughWorkersError,
    RankFailedError,
    WorkerLostError,
)
from prefect_torch_ddp.gang.restarts import FULL_SIZE_S, CallAttemptLog, Restarts
from prefect_torch_ddp.protocol.events import AttemptBegan
from tests.support.failures import BOOM


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
    """If no further attempt can be made, the previous failure is the cause."""
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


def test_only_after_a_restart_the_full_size_is_waited_for_briefly() -> None:
    """A move waits as long as the start does, also if a restart came before it."""
    killed = replace(BOOM, kind="signal", signal=9, retryability="transient")
    restarts = Restarts(CallAttemptLog(), 1, lambda _: None)
    ends = [RankFailedError(killed, 1), WorkerLostError("retired", 4), GangGrowsError("grows")]
    waits_s: list[float] = []

    def attempt_once(number: int) -> list[bytes]:
        waits_s.append(restarts.full_size_s(600.0))
        if number <= len(ends):
            raise ends[number - 1]
        return []

    restarts.run(attempt_once)
    assert waits_s == [600.0, FULL_SIZE_S, 600.0, 0.0]
