"""Which rank is idle is a pure decision over samples of its processes' use."""

from prefect_torch_ddp.gang.worker.progress_probe import Idleness, Usage


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
