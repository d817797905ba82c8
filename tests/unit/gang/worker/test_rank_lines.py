"""How many of a rank's lines reach the run's log, and what it says of the others."""

import logging
from types import SimpleNamespace

import pytest

from prefect_torch_ddp.gang.worker import rank_lines
from prefect_torch_ddp.gang.worker.rank_lines import LAST_LINES, MOST_LINES, SHARE, RankLines
from prefect_torch_ddp.protocol.events import LogLine


def numbered(first: int, last: int) -> list[str]:
    """Return lines with their numbers."""
    return [f"line {number}" for number in range(first, last)]


def texts(lines: list[LogLine]) -> list[str]:
    """Return what they say."""
    return [line.text for line in lines]


def test_a_flood_is_cut_counted_and_its_end_is_shown() -> None:
    """The first lines and the last ones, and how many were in between."""
    lines = RankLines(3, 2, None)
    assert texts([*lines.take(numbered(0, 600))]) == numbered(0, 600)
    assert texts([*lines.take(numbered(600, 20_000))]) == numbered(600, MOST_LINES)
    assert [*lines.tell_left_out()] == []
    note, *last = lines.end()
    num_left_out = 20_000 - MOST_LINES - LAST_LINES
    assert note == LogLine(3, logging.WARNING, f"{num_left_out:,} lines left out")
    assert texts(last) == numbered(20_000 - LAST_LINES, 20_000)


def test_periods_get_longer_while_the_flood_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each begins with the count of the one before, and admits a fifth as many lines."""
    now_s = 0.0
    monkeypatch.setattr(rank_lines, "time", SimpleNamespace(monotonic=lambda: now_s))
    lines = RankLines(0, 2, None)
    counts: list[tuple[float, str]] = []
    passed: list[int] = []
    for second in range(400):
        now_s = float(second)
        counts += [(now_s, line.text) for line in lines.tell_left_out()]
        passed.append(len([*lines.take(numbered(0, 1_000))]))
    assert counts == [
        (11.0, "10,000 lines left out"),
        (32.0, "20,800 lines left out"),
        (73.0, "40,800 lines left out"),
        (154.0, "80,800 lines left out"),
        (315.0, "160,800 lines left out"),
    ]
    assert sum(passed) == MOST_LINES + len(counts) * MOST_LINES // SHARE


def test_what_is_logged_passes_while_prints_flood_and_order_is_kept() -> None:
    """It has limits of its own; what was left out before a record isn't shown behind it."""
    lines = RankLines(0, 2, None)
    assert len([*lines.take(numbered(0, 5_000))]) == MOST_LINES
    warned = [*lines.take(["loss is nan"], logging.WARNING, "user.code")]
    assert warned == [LogLine(0, logging.WARNING, "loss is nan", "user.code")]
    assert texts([*lines.take(["epoch 1"], logging.INFO, "user.code")]) == ["epoch 1"]
    assert [*lines.take(["after it"])] == []
    assert texts([*lines.end()]) == ["4,000 lines left out", "after it"]


def test_what_nobody_takes_is_left_out_not_waited_for() -> None:
    """A caller that is frozen stops no rank."""
    lines = RankLines(0, 2, None)
    assert [*lines.take(numbered(0, 100), has_room=False)] == []
    assert texts([*lines.end()]) == ["80 lines left out", *numbered(80, 100)]


@pytest.mark.parametrize(("world_size", "most"), [(1, 1_000), (8, 1_000), (64, 125), (512, 100)])
def test_large_gangs_have_less_for_each_rank(world_size: int, most: int) -> None:
    """The run's log belongs to all ranks together."""
    assert len([*RankLines(0, world_size, None).take(numbered(0, 5_000))]) == most
