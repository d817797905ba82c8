"""Equal lines of several ranks become one; a rank's own lines keep their order."""

import logging
from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_torch_ddp.gang.caller import lines
from prefect_torch_ddp.gang.caller.lines import LineMerger, rank_text, stack_line
from prefect_torch_ddp.protocol.events import (
    NO_RANK,
    AttemptBegan,
    GangEvent,
    LogLine,
    Progress,
    RankFailure,
    RankStack,
)
from tests.support.waiting import HANG_S

INFO = logging.INFO


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (LogLine(3, INFO, "text"), "[rank 3] text"),
        (LogLine(3, INFO, "text", "prefect_torch_ddp.checkpoint.commit"), "[rank 3] text"),
        (LogLine(3, INFO, "text", "prefect_torch_ddp_too"), "[rank 3] prefect_torch_ddp_too: text"),
        (LogLine(0, INFO, "text", "user.code", (0, 1, 2)), "[ranks 0-2] user.code: text"),
        (LogLine(0, INFO, "text", "", (0, 1, 3, 5, 6, 7)), "[ranks 0, 1, 3, 5-7] text"),
        (LogLine(NO_RANK, INFO, "text"), "text"),
    ],
)
def test_a_line_names_its_ranks_and_the_users_logger(line: LogLine, expected: str) -> None:
    """Three in a row are a range; the package's own modules say nothing to people."""
    assert rank_text(line) == expected


def test_stacks_in_the_log_name_their_thread_if_there_are_several() -> None:
    """The main thread is the only one that most ranks show."""
    main = 'Thread 0x0d (most recent call first):\n  File "/home/me/train.py", line 7 in train'
    said = stack_line(RankStack(1, f"{main}\n")).text
    assert said.splitlines() == ["is at, the innermost call first:", *main.splitlines()[1:]]
    other = 'Thread 0x0b (most recent call first):\n  File "/home/me/train.py", line 3 in feed'
    said = stack_line(RankStack(1, f"{other}\n\n{main}\n")).text
    assert said == f"is at, the innermost call first:\n{other}\n\n{main}"


def merged(*events: GangEvent, world_size: int = 3) -> list[GangEvent]:
    """Return what comes of events that come at once in a gang, until the last was taken in."""
    passed: list[GangEvent] = []
    merger = LineMerger(passed.append)
    for event in (AttemptBegan(1, world_size), *events):
        merger.take(event)
    return passed[1:]


LOGGERS = st.sampled_from(["", "", "user", "user.code"])


@given(spoken=st.lists(st.tuples(st.integers(0, 2), LOGGERS, st.sampled_from("abc")), max_size=40))
def test_nothing_is_lost_added_or_overtaken(spoken: list[tuple[int, str, str]]) -> None:
    """Each rank's prints stay complete and in order, and so do its records."""
    failure = RankFailure(0, "host", 1, "exit", "ended")
    said = [LogLine(rank, INFO, text, logger) for rank, logger, text in spoken]
    *found, last = merged(*said, failure)
    assert last == failure
    before, after = defaultdict(list), defaultdict(list)
    for rank, logger, text in spoken:
        before[rank, not logger].append((logger, text))
    for line in found:
        assert isinstance(line, LogLine)
        for rank in line.ranks or [line.rank]:
            after[rank, not line.logger].append((line.logger, line.text))
    assert after == before


def test_equal_lines_are_one_whether_prints_or_records_came_first() -> None:
    """Prints and records come by different ways, and may overtake each other in a single rank."""
    said, logged = LogLine(0, INFO, "x"), LogLine(0, INFO, "x", "user")
    failure = RankFailure(0, "host", 1, "exit", "ended")
    order = [(0, said), (0, logged), (1, logged), (1, said), (2, said), (2, logged)]
    found = merged(*(replace(line, rank=rank) for rank, line in order), failure)
    assert found == [*(replace(line, ranks=(0, 1, 2)) for line in (said, logged)), failure]


def test_what_differs_stays_apart_and_what_all_wrote_waits_no_longer() -> None:
    """Level and logger count too; a line that a rank repeats is no other rank's."""
    line = LogLine(0, INFO, "x")
    assert merged(line, world_size=1) == [line]
    assert merged(line, LogLine(1, INFO, "x")) == []
    all_three = [LogLine(rank, INFO, "x") for rank in (2, 0, 1)]
    assert merged(*all_three) == [LogLine(0, INFO, "x", ranks=(0, 1, 2))]
    others = [LogLine(1, logging.WARNING, "x"), LogLine(2, INFO, "x", "user"), line]
    own = LogLine(NO_RANK, INFO, "the gang's own comes after them")
    assert merged(line, *others, own) == [line, *others, own]


def test_a_line_waits_for_a_second_and_progress_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without news a line is passed on once its time is over."""
    passed: list[GangEvent] = []
    merger = LineMerger(passed.append)
    progress = Progress(1, 1, None)
    monkeypatch.setattr(lines, "MERGE_S", HANG_S)
    for event in (LogLine(0, INFO, "x"), progress):
        merger.take(event)
    merger.pass_on_due()
    assert passed == [progress]
    monkeypatch.setattr(lines, "MERGE_S", 0.0)
    merger.pass_on_due()
    assert passed == [progress, LogLine(0, INFO, "x")]
