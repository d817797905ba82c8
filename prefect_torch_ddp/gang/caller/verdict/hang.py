"""The watch over one attempt of a gang: whether it hangs, or waits for a rank that has ended.

It also words the error of a gang that hangs: which ranks are missing, where they are, who waits.
"""

import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from prefect_torch_ddp.errors import GangHungError
from prefect_torch_ddp.gang.caller.placement import Placement
from prefect_torch_ddp.gang.caller.verdict.stall import (
    Stall,
    excuse_for,
    find_stall,
    is_in_collective,
    main_thread,
    missing_by,
    wait_in_vain,
)
from prefect_torch_ddp.protocol.events import NO_RANK, GangEvent, Hang, LogLine, RankStack
from prefect_torch_ddp.protocol.heartbeat import Phase
from prefect_torch_ddp.protocol.messages import RankHeartbeat

EARLY_RETURN_S = 3.0
"""How long after a rank's end its peers make no progress before they are looked at."""
STACKS_TIMEOUT_S = 8.0
"""How long to wait for the stacks of a gang that hangs."""
_NOT_THE_USERS = re.compile(
    r"/(site|dist)-packages/|/lib/python3[.\d]*/|^<|"
    r"/prefect_torch_ddp/(rank|data|checkpoint|records|storage)/"
)


class Looks:
    """The stacks of all ranks as the newest look found them, and as the one before it did."""

    def __init__(self) -> None:
        """Start without any."""
        self.newest: dict[int, RankStack] = {}
        self.before: dict[int, RankStack] = {}

    def begin(self) -> None:
        """Keep the stacks of the newest look for comparison only: another one begins."""
        self.before, self.newest = self.newest, {}

    def add(self, stack: RankStack) -> None:
        """Take what a rank answered."""
        self.newest[stack.rank] = stack


class HangWatch:
    """Watches one attempt of a gang by the heartbeats that its agents send.

    Without a limit it only looks for ranks that wait for one whose function has ended.
    """

    def __init__(self, limit_s: float | None, placement: Placement, *, from_start: bool) -> None:
        """Watch all ranks of the placement."""
        self._limit_s = limit_s
        self._from_start = from_start
        self._hosts = {place.rank: place.host for place in placement.places}
        self._ranks: dict[int, RankHeartbeat] = {}
        self.looks = Looks()
        self._suspected: tuple[int, ...] = ()
        self._heard: set[int] = set()
        self._warned: tuple[int, ...] = ()
        self._excused: tuple[int, ...] = ()
        self._excused_until_s = 0.0
        self._ended_s: dict[int, float] = {}
        self.stall: Stall | None = None
        """Set once the gang hangs."""
        self.waits_in_vain: int | None = None
        """A rank in a collective that another one, whose function has ended, never joined: proven
        by the stacks."""

    @property
    def has_found(self) -> bool:
        """Whether the gang can't continue."""
        return self.stall is not None or self.waits_in_vain is not None

    def take(self, heartbeats: Iterable[RankHeartbeat], sink: Callable[[GangEvent], None]) -> bool:
        """Take news of some ranks; return whether the gang can't continue.

        Warns of a wait that is long and allowed.
        """
        for rank in heartbeats:
            self._ranks[rank.rank] = rank
            self._heard.add(rank.rank)
        if self._limit_s is not None and self.stall is None:
            self._look_for_stall(self._limit_s, sink)
        return self.has_found

    def _look_for_stall(self, limit_s: float, sink: Callable[[GangEvent], None]) -> None:
        if len(self._ranks) < len(self._hosts):
            return
        stall = find_stall(tuple(self._ranks.values()), limit_s, from_start=self._from_start)
        moved = self._moved()
        if stall is None:
            self._suspected = ()
        elif stall.is_hung:
            # Seen of all ranks twice: agents send their ranks' heartbeats at different times.
            if self._suspected != moved:
                self._suspected, self._heard = moved, set()
            elif self._heard == self._hosts.keys() and time.monotonic() >= self._excused_until_s:
                self.stall = stall
        elif self._warned != moved:
            self._warned = moved
            what = summarize(stall, self._hosts, {})
            text = f"no progress for {stall.silent_s:.0f} s, which may be normal: {what}"
            sink(LogLine(NO_RANK, logging.WARNING, text))

    def _moved(self) -> tuple[int, ...]:
        return tuple(rank.heartbeat.moved_ns for _, rank in sorted(self._ranks.items()))

    def add_end(self, rank: int) -> None:
        """Take note of a rank whose function has ended."""
        self._ended_s[rank] = time.monotonic()

    @property
    def suspects_vain_wait(self) -> bool:
        """Whether to look at the ranks that still run, of which none makes progress.

        That is a while after another one's end, or after the limit. Stacks prove nothing if a
        GPU may be at work while all threads wait.
        """
        long_ago_s = time.monotonic() - EARLY_RETURN_S
        has_ended = any(at_s < long_ago_s for at_s in self._ended_s.values())
        limit_s = EARLY_RETURN_S if has_ended else self._limit_s
        running = self._running()
        return (
            limit_s is not None
            and bool(running)
            and all(each.silent_s > limit_s for each in running)
            and not any(each.heartbeat.uses_gpu for each in running)
        )

    @property
    def may_wait_in_vain(self) -> bool:
        """Whether a look found all ranks that still run in a collective."""
        running = self._running()
        stacks = self.looks.newest
        found = [stacks[each.rank].text for each in running if each.rank in stacks]
        return len(found) == len(running) > 0 and all(map(is_in_collective, found))

    def judge_vain_wait(self) -> None:
        """Compare two looks, and note the wait that they prove."""
        running = [each.rank for each in self._running()]
        looks = self.looks.before, self.looks.newest
        if not (self.suspects_vain_wait and wait_in_vain(running, *looks)):
            return
        if self._ended_s:
            self.waits_in_vain = min(running)
        elif self._limit_s is not None:
            ranks = tuple(self._ranks.values())
            stall = find_stall(ranks, self._limit_s, from_start=self._from_start)
            if stall is not None:  # all wait, so none lags more than another
                behind = (*stall.behind, *stall.ahead)
                self._suspected = self._moved()
                self.stall = replace(stall, behind=behind, ahead=(), is_hung=True)

    def excuse(self) -> str:
        """Give a gang another limit if its stacks explain its silence.

        Returns why, once for each silence, or nothing.
        """
        if self.stall is None or self._limit_s is None:
            return ""
        if self._moved() != self._suspected:
            self.stall = None  # it has gone on while the stacks were asked for
            return ""
        why = excuse_for(self.stall, self.looks.newest, self._limit_s)
        if not why:
            return ""
        self.stall = None
        self._excused_until_s = time.monotonic() + self._limit_s
        is_known, self._excused = self._excused == self._suspected, self._suspected
        return "" if is_known else f"no progress, but {why}: the gang keeps running"

    def _running(self) -> list[RankHeartbeat]:
        """Return the ranks whose function hasn't ended; nothing before all were heard of."""
        if len(self._ranks) < len(self._hosts):
            return []
        return [each for rank, each in self._ranks.items() if rank not in self._ended_s]

    def lacks_stacks(self, asked_s: float) -> bool:
        """Whether to wait for more stacks; `asked_s` of `time.monotonic`."""
        is_early = time.monotonic() - asked_s < STACKS_TIMEOUT_S
        return is_early and len(self.looks.newest) < len(self._hosts)

    def error(self, attempt: int) -> GangHungError:
        """Return the caller's error, with the stacks that came."""
        assert self.stall is not None
        stacks = {rank: stack.text for rank, stack in self.looks.newest.items()}
        return GangHungError(describe(missing_by(self.stall, stacks), self._hosts, stacks), attempt)


def describe(stall: Stall, hosts: Mapping[int, str], stacks: Mapping[int, str]) -> Hang:
    """Make the value that the error carries."""
    return Hang(
        summary=summarize(stall, hosts, stacks),
        ranks=tuple(rank.rank for rank in stall.behind),
        hosts=tuple(hosts[rank.rank] for rank in stall.behind),
        step=stall.behind[0].heartbeat.step,
        stacks=dict(stacks),
    )


def summarize(stall: Stall, hosts: Mapping[int, str], stacks: Mapping[int, str]) -> str:
    """Say it in one line."""
    behind = stall.behind
    is_waiting = all(is_in_collective(stacks.get(rank.rank, "")) for rank in behind)
    verb = "waits for a rank that does not come" if is_waiting else "did not arrive"
    text = ", ".join(
        f"rank {rank.rank} on {hosts[rank.rank]} {verb}: for {rank.silent_s:.0f} s it has been "
        f"{_doing(rank, stacks)}"
        for rank in behind
    )
    if others := _others(stall, stacks):
        text += f", while {others}"
    if is_waiting:
        text += (
            "; nobody comes: they wait in different collectives, or a rank has left its loop. Make "
            "the same calls on every rank, and stop all ranks together: ctx.request_stop(...)"
        )
    for rank in behind:
        if rank.stopped:
            text += f"; {rank.stopped} of rank {rank.rank} is stopped (SIGSTOP)"
    return text


def _others(stall: Stall, stacks: Mapping[int, str]) -> str:
    """Say what the ranks are at that are not missing, those at the same thing together."""
    groups: dict[str, list[int]] = {}
    for rank in stall.ahead:
        step = rank.heartbeat.step
        in_collective = "waiting in a collective" + (f" of step {step}" if step else "")
        what = (
            in_collective if is_in_collective(stacks.get(rank.rank, "")) else _doing(rank, stacks)
        )
        groups.setdefault(what, []).append(rank.rank)
    for rank in stall.returned:
        groups.setdefault("done with its function", []).append(rank.rank)
    return " and ".join(
        f"rank {ranks[0]} is {what}"
        if len(ranks) == 1
        else f"ranks {', '.join(map(str, sorted(ranks)))} are {what}"
        for what, ranks in groups.items()
    )


def _doing(rank: RankHeartbeat, stacks: Mapping[int, str]) -> str:
    """Return what a rank is at, and where: `in step 7 at train.py:34 in forward`."""
    step = rank.heartbeat.step
    after = f" after step {step}" if step else ""
    what = {
        Phase.FUNCTION: "in its function" + (f", in step {step}" if step else ""),
        Phase.SETUP: f"outside of ctx.steps{after}",
        Phase.RESTORING: "restoring a checkpoint",
        Phase.LOADING: f"waiting for the batch of step {step + 1}",
        Phase.STEP: f"in step {step}",
        Phase.EPOCH_END: f"in step {step}, the last of epoch {rank.heartbeat.epoch},",
        Phase.COMPILING: f"compiling in step {step}",
        Phase.STEP_END: f"at the end of step {step}",
        Phase.SAVING: f"saving the checkpoint of step {step}",
    }.get(rank.heartbeat.phase, "starting")
    return (what + _innermost_call(stacks.get(rank.rank, ""))).rstrip(",")


def _innermost_call(stack: str) -> str:
    """Return the user's innermost call as ` at train.py:34 in forward`; empty without a stack."""
    calls = main_thread(stack)
    if not calls:
        return ""
    users = (call for call in calls if not _NOT_THE_USERS.search(call[0]))
    path, line, function = next(users, calls[0])
    return f" at {path.rpartition('/')[2]}:{line} in {function}"
