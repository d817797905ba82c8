"""What the report says of ranks and time: who is slow, each rank's times, and the goodput."""

from collections.abc import Sequence

from prefect_torch_ddp.records.timing import TimingLine, waiting_cost
from prefect_torch_ddp.results import Goodput
from prefect_torch_ddp.tasks.report.markdown import count, duration, number, percent, table, text

MAX_RANK_ROWS = 64
NAMED_FROM = 0.1
"""A rank is named that costs the others this share of their time."""
WINDOW_S = 60.0
SHOWN_FROM_S = 0.05
GOODPUT_PARTS = {
    "steps_s": "steps that count",
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


def awaited_rank(lines: Sequence[TimingLine]) -> str:
    """Name the rank that the others wait for, where that costs them much; else nothing."""
    slowest, cost = waiting_cost(lines)
    if slowest is None or cost < NAMED_FROM:
        return ""
    who = f"rank {slowest.rank} on {text(slowest.host)}"
    return f"others wait {percent(cost, 0)} of the time for {who}"


def rank_table(lines: Sequence[TimingLine]) -> str:
    """Lay out the ranks' times within `ctx.steps` and their memory; nothing without any."""
    if not lines:
        return ""
    slowest, _ = waiting_cost(lines)
    shown = sorted(lines, key=lambda line: (line is not slowest, line.rank))[:MAX_RANK_ROWS]
    rows = [_rank_row(line) for line in sorted(shown, key=lambda line: line.rank)]
    header = ["rank", "host", "device", "samples/s", "data", "compute", "waiting for peers"]
    header += ["checkpoints", "peak memory", "peak on the GPU"]
    has_gpu = any(line.cuda_bytes for line in lines)
    body = table(header, rows, align="rll" + "r" * 7)
    if not has_gpu:
        body = table(header[:-1], [row[:-1] for row in rows], align="rll" + "r" * 6)
    num_left_out = len(lines) - len(shown)
    notes = ["Shares of the time within `ctx.steps`; waiting has the exchange of gradients in it."]
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
    says = f"**{percent(goodput.share, 0)}** of {whole}, went into steps that count."
    return f"{says}\n\n{table(['what', 'time', 'share'], rows)}"


def _rank_row(line: TimingLine) -> list[str]:
    total_s = line.loop_s
    speed = number(line.num_samples / total_s) if total_s > 0 else ""

    def share(spent_s: float) -> str:
        return percent(spent_s / total_s, 0) if total_s > 0 else ""

    return [
        str(line.rank),
        text(line.host),
        text(line.device),
        speed,
        share(line.spent(["loading"])),
        share(line.spent(["step", "epoch_end", "step_end"]) - line.waiting_s),
        share(line.waiting_s) if "waiting" in line.seconds else "",
        share(line.spent(["saving"])),
        _size(line.rss_bytes),
        _size(line.cuda_bytes),
    ]


def _size(num_bytes: int) -> str:
    return f"{count(round(num_bytes / 1e6))} MB" if num_bytes else ""
