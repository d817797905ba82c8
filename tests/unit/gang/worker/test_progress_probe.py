"""Which rank is idle is a pure decision over samples of its processes' use; stacks in time."""

from types import SimpleNamespace
from typing import Any

import pytest

from prefect_torch_ddp.gang.worker import progress_probe
from prefect_torch_ddp.gang.worker.progress_probe import TURN_S, Idleness, ProgressProbe, Usage
from prefect_torch_ddp.protocol.events import RankStack
from prefect_torch_ddp.protocol.heartbeat import Heartbeat, Phase
from prefect_torch_ddp.protocol.rank import RankOrder


def idle_s_after(*samples: tuple[float, float, int], silent_s: float = 100.0) -> float:
    """Return how idle a rank with a window of 10 s is at its last sample of (time, CPU seconds,
    bytes)."""
    idleness = Idleness(10.0)
    for at_s, cpu_s, io_bytes in samples:
        idleness.add(at_s, Usage(cpu_s, io_bytes))
    return idleness.idle_s(samples[-1][0], silent_s)


def test_idle_is_what_uses_next_to_nothing_over_a_window() -> None:
    """A tick now and then is idle; a hundredth of a core, or data, is not; too little seen is
    not known."""
    assert idle_s_after((0.0, 1.0, 0)) == 0.0
    assert idle_s_after((0.0, 1.0, 0), (4.0, 1.0, 0)) == 0.0
    assert idle_s_after((0.0, 1.0, 0), (5.0, 1.02, 100)) == 100.0
    assert idle_s_after((0.0, 1.0, 0), (10.0, 1.1, 0)) == 0.0
    assert idle_s_after((0.0, 1.0, 0), (10.0, 1.0, 1_000_000)) == 0.0


def test_idle_begins_anew_after_work() -> None:
    """Work long ago does not count for ever, and work just now ends an idle time."""
    worked_early = [(0.0, 0.0, 0), (5.0, 3.0, 0), *((float(at), 3.0, 0) for at in range(10, 41, 5))]
    assert 25.0 <= idle_s_after(*worked_early) <= 35.0
    assert idle_s_after(*worked_early, (45.0, 6.0, 0)) == 0.0


def test_only_the_time_that_the_agent_missed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that is starved of its GIL now and then still sees how long its ranks are silent."""
    now_s = 1000.0
    monkeypatch.setattr(progress_probe.time, "monotonic", lambda: now_s)
    monkeypatch.setattr(progress_probe.time, "monotonic_ns", lambda: int(now_s * 1e9))
    moved = Heartbeat(moved_ns=int(now_s * 1e9), phase=Phase.STEP)
    page, child = SimpleNamespace(read=lambda: moved), SimpleNamespace(is_reaped=False, pid=-1)
    place, io = SimpleNamespace(rank=1), SimpleNamespace(page=page)
    rank: Any = SimpleNamespace(child=child, io=io, place=place)
    probe = ProgressProbe([rank], None)
    for _ in range(10):
        for pause_s in (10.0, *(1.0 for _ in range(10))):
            now_s += pause_s
            (seen,) = probe.heartbeats() or ()
    assert seen.silent_s == pytest.approx(200.0 - 10 * (10.0 - TURN_S))
    moved = Heartbeat(moved_ns=int(now_s * 1e9), phase=Phase.STEP)
    now_s += 1.0
    (seen,) = probe.heartbeats() or ()
    assert seen.silent_s == pytest.approx(1.0), "it has moved"


def test_a_gap_makes_no_idle_time() -> None:
    """Samples before and after it count as if it hadn't been."""
    idleness = Idleness(10.0)
    for at_s in (0.0, 5.0, 10.0):
        idleness.add(at_s, Usage(at_s))
    idleness.leave_out(100.0)
    idleness.add(115.0, Usage(10.0))
    assert idleness.idle_s(115.0, 115.0) == 0.0, "it worked within the window"
    for at_s in (120.0, 125.0):
        idleness.add(at_s, Usage(10.0))
    assert 0.0 < idleness.idle_s(125.0, 125.0) <= 15.0


def test_stacks_of_a_rank_that_dies_are_kept() -> None:
    """At once, since an agent leaves with the last of its ranks; each is given once."""
    page = SimpleNamespace(
        read=Heartbeat,
        clear_stacks=lambda: None,
        stacks_bytes=lambda: 0,
        stacks=lambda: "in loss",
    )
    told: list[RankOrder] = []
    child = SimpleNamespace(is_reaped=False, pid=-1)
    place, io = SimpleNamespace(rank=1), SimpleNamespace(page=page, tell=told.append)
    rank: Any = SimpleNamespace(child=child, io=io, place=place)
    probe = ProgressProbe([rank], None)
    probe.ask_for_stacks(may_signal=False)
    assert told == [RankOrder.LOOK]
    assert list(probe.stacks()) == []
    child.is_reaped = True
    assert list(probe.stacks()) == [RankStack(1, "in loss")]
    assert list(probe.stacks()) == []
