"""What recorded runs show: pure functions from marks, kills and logs to figures and a table."""

import ast
import json
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

SAYS = re.compile(r"(?i)sigkill|signal 9|exitcode|killed|\bdied\b|by peer\b|unexpected")
COLOR = re.compile(r"\x1b\[[0-9;]*m")
WARM_UP = 20
AROUND = 3


class Mark(NamedTuple):
    """Rank 0 has done a step."""

    at: float
    step: int
    report_s: float
    pid: int


@dataclass(frozen=True)
class Recorded:
    """A run as it was observed from outside."""

    marks: Sequence[Mark]
    began: float
    ended: float
    exit_code: int | None
    limit_s: float
    kills: Sequence[float]
    memory_mb: Mapping[str, float]
    log: str = ""

    @property
    def in_time(self) -> Sequence[Mark]:
        """Marks until the time was over."""
        return [mark for mark in self.marks if mark.at <= self.began + self.limit_s]

    def intervals_ms(self) -> dict[int, float]:
        """Return how long each step took, from the one before it in the same process."""
        pairs = pairwise(self.marks)
        return {
            b.step: 1000 * (b.at - a.at) for a, b in pairs if a.pid == b.pid and b.step > WARM_UP
        }


def read(folder: Path) -> Recorded:
    """Read what `runs.run` has kept; a last line that was cut off is no mark."""
    observed: dict[str, Any] = json.loads((folder / "run.json").read_text())
    path = folder / "marks"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    marks = [
        Mark(float(at), int(step), float(report_s), int(pid))
        for at, step, report_s, pid in map(str.split, lines)
    ]
    return Recorded(marks, **observed, log=(folder / "log").read_text(errors="replace"))


def start_s(run: Recorded) -> float | None:
    """From the start of the process to the end of the first step."""
    return run.marks[0].at - run.began if run.marks else None


def whole_s(run: Recorded) -> float | None:
    """From the start of the process to its end, if it has ended without an error."""
    return run.ended - run.began if run.exit_code == 0 else None


def step_ms(run: Recorded) -> float | None:
    """The median time of a step."""
    found = run.intervals_ms().values()
    return statistics.median(found) if found else None


def stall_ms(run: Recorded, save_every: int) -> float | None:
    """How much longer than the median the longest step around a save is, in the median of saves."""
    intervals = run.intervals_ms()
    saves = range(save_every, max(intervals, default=0) - AROUND, save_every)
    steps = [range(save, save + AROUND) for save in saves]
    found = [max(intervals[step] for step in around) for around in steps if around[0] in intervals]
    return statistics.median(found) - statistics.median(intervals.values()) if found else None


def report_us(run: Recorded) -> float | None:
    """The median time of a report of one number, in the steps that have one."""
    found = [1e6 * mark.report_s for mark in run.marks if mark.report_s and mark.step > WARM_UP]
    return statistics.median(found) if found else None


def useful(run: Recorded) -> int:
    """Steps that were done within the time, each counted once."""
    return len({mark.step for mark in run.in_time})


def rate(run: Recorded) -> float:
    """Useful steps by second since the first one, which is 0 if there was none."""
    if not run.in_time:
        return 0.0
    return useful(run) / (run.began + run.limit_s - run.in_time[0].at)


def goodput(killed: Recorded, undisturbed: Recorded) -> float | None:
    """Useful steps by wall time, divided by those of the undisturbed run."""
    return rate(killed) / rate(undisturbed) if rate(undisturbed) else None


def goodput_at_own_speed(killed: Recorded, undisturbed: Recorded) -> float | None:
    """The same, where a second is as many median steps as the run does in it.

    Machines change their speed within minutes, so that the steps of two runs of one program may
    differ by more than a kill costs.
    """
    found, with_kills, without = goodput(killed, undisturbed), step_ms(killed), step_ms(undisturbed)
    if found is None or with_kills is None or without is None:
        return None
    return found * with_kills / without


def redone(run: Recorded) -> int:
    """Steps that were done again."""
    return len(run.in_time) - useful(run)


def restarts_s(run: Recorded) -> list[float]:
    """From each kill to the first step of other ranks, where there were any before the next one."""
    found = []
    for kill, after in pairwise([*run.kills, run.began + run.limit_s]):
        before = {mark.pid for mark in run.marks if mark.at <= kill}
        new = (m.at for m in run.marks if kill < m.at <= after and m.pid not in before)
        found += [first - kill for first in [next(new, None)] if first is not None]
    return found


def lost_s(run: Recorded) -> float | None:
    """What a kill costs: the time to the next step, and that of the steps that are done again."""
    waits, step = restarts_s(run), step_ms(run)
    if not waits or step is None:
        return None
    return statistics.median(waits) + redone(run) / len(run.kills) * step / 1000


def said(run: Recorded, num_lines: int = 3) -> list[str]:
    """The first lines of the log that speak of a killed rank."""
    lines = [line.strip() for line in COLOR.sub("", run.log).splitlines() if SAYS.search(line)]
    return list(dict.fromkeys(lines))[:num_lines]


def code_lines(source: str) -> int:
    """Lines of a program without blank ones, comments, docstrings and imports."""
    tree = ast.parse(source)
    skipped: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) or (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        ):
            skipped |= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    lines = enumerate(map(str.strip, source.splitlines()), 1)
    return sum(bool(line) and line[0] != "#" and number not in skipped for number, line in lines)


@dataclass(frozen=True)
class Runs:
    """All runs of a peer."""

    jobs: Sequence[Recorded]
    undisturbed: Recorded
    killed: Recorded


def column(runs: Runs, save_every: int | None) -> dict[str, str]:
    """Return a peer's figures by name: the median of its jobs, least and most in brackets."""
    jobs, undisturbed, killed = runs.jobs, runs.undisturbed, runs.killed
    long = [*jobs, undisturbed]
    stalls = [stall_ms(run, save_every) if save_every else None for run in long]
    waits, num_kills = restarts_s(killed), len(killed.kills)
    return {
        "start, s": _spread(map(start_s, jobs), "{:.1f}"),
        "step, ms": _spread(map(step_ms, long), "{:.1f}"),
        "whole job, s": _spread(map(whole_s, jobs), "{:.1f}"),
        "a report, µs": _spread(map(report_us, long), "{:.0f}"),
        "stall of a save, ms": _spread(stalls, "{:.0f}"),
        "memory of both ranks, MB": _spread((r.memory_mb["ranks"] for r in long), "{:.0f}"),
        "memory of the rest, MB": _spread((r.memory_mb["others"] for r in long), "{:.0f}"),
        "steps, undisturbed": str(useful(undisturbed)),
        "useful steps with kills": str(useful(killed)),
        "goodput": _spread([goodput(killed, undisturbed)], "{:.3f}"),
        "goodput at each run's own speed": _spread(
            [goodput_at_own_speed(killed, undisturbed)], "{:.3f}"
        ),
        "steps done again, a kill": f"{redone(killed) / num_kills:.0f}" if num_kills else "-",
        "kill to next step, s": _spread(waits, "{:.1f}"),
        "lost by a kill, s": _spread([lost_s(killed)], "{:.1f}"),
        "restarts of kills": f"{len(waits)} of {num_kills}",
    }


def table(columns: Mapping[str, Mapping[str, str]]) -> str:
    """Lay figures out, a peer a column, as in docs/performance_peers.md."""
    names = list(next(iter(columns.values())))
    rows = [["", *columns], ["---"] * (len(columns) + 1)]
    rows += [[name, *(each[name] for each in columns.values())] for name in names]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _spread(values: Iterable[float | None], form: str) -> str:
    found = [value for value in values if value is not None]
    show: Callable[[float], str] = form.format
    if not found:
        return "-"
    middle, least, most = show(statistics.median(found)), show(min(found)), show(max(found))
    return middle if least == most else f"{middle} ({least} to {most})"
