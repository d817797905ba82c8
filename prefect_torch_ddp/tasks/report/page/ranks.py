"""What the report says of ranks and time: who is slow, each rank's times, and the goodput."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from prefect_torch_ddp.records.timing import TimingLine, waiting_cost
from prefect_torch_ddp.results import Goodput
from prefect_torch_ddp.tasks.report.markdown import count, duration, number, percent, table, text

MAX_RANK_ROWS = 64
NAMED_FROM = 0.1
"""A rank is named that costs the others this share of their time."""
WINDOW_S = 60.0
SHOWN_FROM_S = 0.05
GOODPUT_PARTS = {
    "steps_s": "useful steps",
    "data_s": "waiting for data",
    "validation_s": "validation",
    "checkpoints_s": "held up by checkpoints",
    "starting_s": "starting",
    "restoring_s": "restoring",
    "queueing_s": "waiting for workers and retries",
    "redone_s": "lost: done again after a failure",
    "other_s": "code outside of `ctx.steps`",
}


class RecentTimes:
    """The ranks' times of the last one or two minutes, from their newest records."""

    def __init__(self) -> None:
        """Start without any."""
        self._older: dict[int, TimingLine] = {}
        self._newer: dict[int, TimingLine] = {}

    def add(self, lines: Sequence[TimingLine]) -> list[TimingLine]:
        """Take in each rank's newest record; return what has come since, by rank."""
        began_s, now_s = (
            max((line.time for line in each), default=0.0) for each in (self._newer.values(), lines)
        )
        if now_s - began_s >= WINDOW_S:
            self._older, self._newer = self._newer, {line.rank: line for line in lines}
        return [line.since(self._older.get(line.rank)) for line in lines]


def awaited_rank(lines: Sequence[TimingLine], *, has_ended: bool = False) -> str:
    """Name the rank that the others wait or waited for, if that costs them much; else nothing."""
    slowest, cost = waiting_cost(lines)
    if slowest is None or cost < NAMED_FROM:
        return ""
    who = f"rank {slowest.rank} on {text(slowest.host)}"
    return f"others {'waited' if has_ended else 'wait'} {percent(cost, 0)} of the time for {who}"


def rank_table(lines: Sequence[TimingLine]) -> str:
    """Lay out the ranks' times within `ctx.steps` and their memory; nothing without any."""
    if not lines:
        return ""
    slowest, _ = waiting_cost(lines)
    shown = sorted(lines, key=lambda line: (line is not slowest, line.rank))[:MAX_RANK_ROWS]
    columns = [column for column in COLUMNS if any(map(column.is_shown, lines))]
    rows = [
        [column.cell(line) for column in columns]
        for line in sorted(shown, key=lambda line: line.rank)
    ]
    align = "".join(column.align for column in columns)
    body = table([column.title for column in columns], rows, align=align)
    num_left_out = len(lines) - len(shown)
    notes = ["Shares of the time within `ctx.steps`; waiting includes all-reduce."]
    if any("waiting" not in line.seconds for line in lines) and len(lines) > 1:
        notes += ["Where waiting isn't known, as on a GPU, it is part of compute."]
    notes += [f"{num_left_out} more ranks are left out."] if num_left_out else []
    return f"{body}\n\n{' '.join(notes)}"


def goodput_table(goodput: Goodput | None) -> str:
    """Lay out where the wall time went, the largest part first; nothing without a record."""
    if goodput is None or goodput.wall_s <= 0:
        return ""
    parts = [(getattr(goodput, name), words) for name, words in GOODPUT_PARTS.items()]
    rows = [
        [words, duration(spent_s), percent(spent_s / goodput.wall_s, 0)]
        for spent_s, words in sorted(parts, reverse=True)
        if spent_s >= SHOWN_FROM_S
    ]
    times = "attempt" if goodput.num_attempts == 1 else "attempts"
    whole = f"{duration(goodput.wall_s)}, in {goodput.num_attempts} {times}"
    says = f"**{percent(goodput.share, 0)}** of {whole}, went into useful steps.{_hours(goodput)}"
    return f"{says}\n\n{table(['what', 'time', 'share'], rows)}"


def _hours(goodput: Goodput) -> str:
    """Say what was at the ranks' disposal; nothing if that isn't known."""
    shown = [f"{number(goodput.core_hours)} core hours"] if goodput.core_hours else []
    shown += [f"{number(goodput.gpu_hours)} GPU hours"] if goodput.gpu_hours else []
    return f" The ranks had {' and '.join(shown)}." if shown else ""


def _share(spent_s: float, line: TimingLine) -> str:
    return percent(spent_s / line.loop_s, 0) if line.loop_s > 0 else ""


def _waiting(line: TimingLine) -> str:
    return _share(line.waiting_s, line) if "waiting" in line.seconds else ""


def _speed(line: TimingLine) -> str:
    return number(line.num_samples / line.loop_s) if line.loop_s > 0 else ""


def _size(num_bytes: int) -> str:
    return f"{count(round(num_bytes / 1e6))} MB" if num_bytes else ""


@dataclass(frozen=True)
class RankColumn:
    """A column of the table of ranks."""

    title: str
    cell: Callable[[TimingLine], str]
    """Makes the markdown of a rank's cell."""
    align: Literal["l", "r"] = "r"
    is_shown: Callable[[TimingLine], bool] = lambda _: True
    """Whether a rank has something to show; the column is there if any rank has."""


COLUMNS = (
    RankColumn("rank", lambda line: str(line.rank)),
    RankColumn("host", lambda line: text(line.host), "l"),
    RankColumn("device", lambda line: text(line.device), "l"),
    RankColumn("samples/s", _speed),
    RankColumn("data", lambda line: _share(line.spent(["loading"]), line)),
    RankColumn(
        "compute",
        lambda line: _share(line.spent(["step", "epoch_end", "step_end"]) - line.waiting_s, line),
    ),
    RankColumn("waiting for peers", _waiting),
    RankColumn("checkpoints", lambda line: _share(line.spent(["saving"]), line)),
    RankColumn("peak memory", lambda line: _size(line.rss_bytes)),
    RankColumn(
        "peak on the GPU",
        lambda line: _size(line.cuda_bytes),
        is_shown=lambda line: line.cuda_bytes > 0,
    ),
)
"""The table of ranks, a column each; what a rank measures is a field of `TimingLine`."""
