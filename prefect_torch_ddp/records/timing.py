"""Timing records: where each rank's time went, who keeps the others waiting, and the goodput."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from prefect_torch_ddp.records.reading import list_parts, read_parts, superseded_from
from prefect_torch_ddp.results import Goodput
from prefect_torch_ddp.storage.formats import TIMING, build
from prefect_torch_ddp.storage.protocol import Storage, StoredObject

UNKNOWN_STEP = -1
"""The step of a record made before the training had found where it begins."""
MIN_STEPS, MIN_LOOP_S = 5, 2.0
"""Shorter loops don't tell who is slow: one step may be late on any machine."""
IN_LOOP = ("loading", "step", "epoch_end", "step_end", "saving")
STARTING = ("none", "starting", "function", "compiling")
OTHER = ("setup", "returned")


@dataclass(frozen=True)
class TimingLine:
    """Where a rank's time went, since it was launched."""

    rank: int
    attempt: int
    host: str
    device: str
    step: int
    """Steps that the training has made, over all attempts; UNKNOWN_STEP if it didn't know."""
    time: float
    """Unix seconds."""
    num_samples: int
    """Trained on by this rank in this attempt, as are the steps."""
    num_steps: int
    num_epoch_ends: int
    """Steps that were the last of their epoch."""
    rss_bytes: int
    """The most memory of the process so far; 0 if it isn't known."""
    cuda_bytes: int
    """The most memory that torch had in use on its GPU so far; 0 without one."""
    seconds: Mapping[str, float]
    """By phase, as `protocol.heartbeat` names them. "waiting", a part of these, is the time from
    the rank's own last gradient to the sum over all; it is missing if that isn't known."""
    cpus: str = ""
    """The host's processors that the rank may use: a mask as hexadecimal digits, the lowest bit for
    processor 0; empty if it isn't known."""
    gpu: str = ""
    """The UUID of its GPU; empty without one."""

    @property
    def began(self) -> float:
        """When the rank was launched, in Unix seconds."""
        return self.time - sum(self.seconds.values()) + self.waiting_s

    @property
    def waiting_s(self) -> float:
        """Seconds of waiting for peers; 0 if that isn't known."""
        return self.seconds.get("waiting", 0.0)

    def spent(self, phases: Iterable[str]) -> float:
        """Return the seconds in some phases."""
        return sum(self.seconds.get(phase, 0.0) for phase in phases)

    @property
    def loop_s(self) -> float:
        """Seconds within `ctx.steps`."""
        return self.spent(IN_LOOP)

    def since(self, older: "TimingLine | None") -> "TimingLine":
        """Return what has come since an older record; all, if that is of another process."""
        if older is None or older.attempt != self.attempt or older.time >= self.time:
            return self
        spent = {name: self.seconds[name] - older.seconds.get(name, 0.0) for name in self.seconds}
        counts = {
            each.name: getattr(self, each.name) - getattr(older, each.name)
            for each in fields(self)
            if each.name.startswith("num_")  # these count from the launch on
        }
        return replace(self, seconds=spent, **counts)


def newest_lines(storage: Storage, run_id: str) -> list[TimingLine]:
    """Return the newest record of each rank of the newest attempt that has any, by rank."""
    parts = list_parts(storage, run_id, "timing")
    attempts = [part.key.rpartition("/")[2].partition("-")[0] for part in parts]
    newest = max(attempts, default="")
    own = [part for part, each in zip(parts, attempts, strict=True) if each == newest]
    return sorted(_last_lines(storage, own).values(), key=lambda line: line.rank)


def waiting_cost(lines: Sequence[TimingLine]) -> tuple[TimingLine | None, float]:
    """Return the rank that the others wait for, and which share of the loop it costs them, 0 to 1.

    It waits least: its own share of waiting is what the exchange of gradients takes. None if
    waiting isn't known, or not for long enough.
    """
    known = [
        line
        for line in lines
        if line.waiting_s > 0 and line.num_steps >= MIN_STEPS and line.loop_s >= MIN_LOOP_S
    ]
    shares = {line.rank: line.waiting_s / line.loop_s for line in known}
    if len(known) < 2:  # noqa: PLR2004 - one waits for another
        return None, 0.0
    slowest = min(known, key=lambda line: shares[line.rank])
    others = [share for rank, share in shares.items() if rank != slowest.rank]
    return slowest, sum(others) / len(others) - shares[slowest.rank]


def read_goodput(
    storage: Storage, run_id: str, claims: Mapping[int, float], failures: Mapping[int, float]
) -> Goodput:
    """Find out where the time of a training went.

    Args:
        storage: where it is.
        run_id: which.
        claims: when each attempt was claimed, in Unix seconds.
        failures: when attempts failed, if that is on record.

    Raises:
        StorageError: the storage can't be read.
    """
    parts = list_parts(storage, run_id, "timing")
    by_attempt: dict[int, list[TimingLine]] = {}
    for line in _last_lines(storage, parts).values():
        by_attempt.setdefault(line.attempt, []).append(line)
    # The rank that waits least, since the others' time is its own.
    chosen = [
        min(lines, key=lambda line: (line.waiting_s, line.rank)) for lines in by_attempt.values()
    ]
    writers = set(map(_writer, chosen))
    kept = [part for part in parts if any(writer in part.key for writer in writers)]
    found = goodput(run_id, read_parts(storage, kept, TIMING, _parse), claims, failures)
    return found.model_copy(update=hours(by_attempt.values()))


def hours(attempts: Iterable[Sequence[TimingLine]]) -> dict[str, float]:
    """Return `core_hours` and `gpu_hours`: what was at the ranks' disposal, used or not.

    A processor that several ranks of a host may use counts once, and so does a GPU that they
    share. An attempt lasts from its first rank's launch to its last record.

    Args:
        attempts: the newest record of each rank, of each attempt.
    """
    core_s = gpu_s = 0.0
    for lines in attempts:
        lasted_s = max(line.time for line in lines) - min(line.began for line in lines)
        cpus: defaultdict[str, int] = defaultdict(int)
        for line in lines:
            cpus[line.host] |= int(line.cpus or "0", 16)
        core_s += lasted_s * sum(mask.bit_count() for mask in cpus.values())
        gpu_s += lasted_s * len({line.gpu for line in lines} - {""})
    return {"core_hours": core_s / 3600, "gpu_hours": gpu_s / 3600}


def goodput(
    run_id: str,
    lines: Iterable[TimingLine],
    claims: Mapping[int, float],
    failures: Mapping[int, float],
) -> Goodput:
    """Add up the records of one rank of each attempt; see `read_goodput`."""
    histories: dict[int, list[TimingLine]] = {attempt: [] for attempt in claims}
    firsts: dict[int, int] = {}
    for line in sorted(lines, key=lambda line: line.time):
        histories.setdefault(line.attempt, []).append(line)
        if line.step != UNKNOWN_STEP:
            firsts.setdefault(line.attempt, line.step)
    if not histories:
        return Goodput(run_id=run_id, num_attempts=0, wall_s=0.0)
    superseded = superseded_from(firsts)
    total: defaultdict[str, float] = defaultdict(float)
    numbers = sorted(histories)
    claimed = [
        claims[number] if number in claims else histories[number][0].began for number in numbers
    ]
    for number, at, following in zip(numbers, claimed, [*claimed[1:], math.inf], strict=True):
        history, limit = histories[number], superseded.get(number, math.inf)
        last = history[-1].time if history else at
        end = min(max(failures.get(number, last), last), following)
        for name, spent_s in _attempt(history, at, limit, end).items():
            total[name] += spent_s
        if following < math.inf:
            total["queueing_s"] += following - end
    return Goodput(run_id=run_id, num_attempts=len(numbers), wall_s=end - claimed[0], **total)


def _attempt(
    history: list[TimingLine], claimed: float, limit: float, end: float
) -> dict[str, float]:
    """Return the seconds of one attempt; what it did beyond the step `limit` is lost."""
    if not history:  # it ended before it had anything to say
        return {"starting_s": end - claimed}
    last = history[-1]
    kept = [line for line in history if line.step <= limit] or history[:1]
    line, spent = kept[-1], kept[-1].spent
    queueing_s = last.began - claimed
    # A process may be older than the claim: the user's own.
    starting_s = max(0.0, spent(STARTING) + min(0.0, queueing_s))
    num_within, validation_s = line.num_steps - line.num_epoch_ends, 0.0
    if num_within > 0:
        step_s = spent(("step",)) / num_within
        validation_s = max(0.0, spent(("epoch_end",)) - line.num_epoch_ends * step_s)
    parts = {
        "steps_s": spent(("step", "step_end", "epoch_end")) - validation_s,
        "validation_s": validation_s,
        "data_s": spent(("loading",)),
        "checkpoints_s": spent(("saving",)),
        "restoring_s": spent(("restoring",)),
        "starting_s": starting_s,
        "other_s": spent(OTHER),
        "queueing_s": max(0.0, queueing_s),
        "redone_s": 0.0,
    }
    lost = "redone_s" if last.num_steps or last.spent(IN_LOOP) else "starting_s"
    parts[lost] += max(0.0, end - line.time)
    return parts


def _last_lines(storage: Storage, parts: list[StoredObject]) -> dict[str, TimingLine]:
    """Return the last record of each rank of each attempt."""
    newest = {part.key.rpartition("-")[0]: part for part in parts}
    lines = read_parts(storage, list(newest.values()), TIMING, _parse)
    return {_writer(line): line for line in lines}


def _writer(line: TimingLine) -> str:
    return f"/rank-{line.rank:05d}/{line.attempt:06d}-"


def _parse(line: dict[str, Any]) -> TimingLine:
    built = build(TimingLine, line)
    int(built.cpus or "0", 16)  # what is no mask damages the line
    return built
