"""Hangs: the rule by which a gang counts as hung, the ranks that are missing, and the message."""

import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from prefect_torch_ddp.errors import GangHungError
from prefect_torch_ddp.gang.caller.placement import Placement
from prefect_torch_ddp.gang.caller.verdict.proof import (
    is_debugged,
    is_in_collective,
    main_thread,
    wait_in_vain,
)
from prefect_torch_ddp.protocol.agent import RankHeartbeat
from prefect_torch_ddp.protocol.events import NO_RANK, GangEvent, Hang, LogLine, RankStack
from prefect_torch_ddp.protocol.heartbeat import Phase

WORKING_FACTOR = 10.0
"""How many times the limit applies where long waits are usual, or while a rank works hard."""
IN_BODY = {Phase.FUNCTION, Phase.STEP, Phase.EPOCH_END, Phase.COMPILING}
STRICT = {Phase.FUNCTION, Phase.STEP, Phase.STEP_END}
"""Where a rank that is idle waits for nothing that could come from elsewhere than its gang."""
EARLY_RETURN_S = 3.0
"""How long after a rank's end its peers make no progress before they are looked at."""
STACKS_TIMEOUT_S = 8.0
"""How long to wait for the stacks of a gang that hangs."""


@dataclass(frozen=True)
class Stall:
    """A gang without progress."""

    behind: tuple[RankHeartbeat, ...]
    """The ranks that have come least far, by their steps; stacks tell which the others wait for."""
    ahead: tuple[RankHeartbeat, ...]
    returned: tuple[RankHeartbeat, ...]
    silent_s: float
    is_hung: bool
    """Whether nothing explains it any more; else it is only worth a warning."""


def find_stall(ranks: Sequence[RankHeartbeat], limit_s: float, *, from_start: bool) -> Stall | None:
    """Judge a gang by the heartbeats of all its ranks; None where it moves or isn't watched yet."""
    if any(rank.heartbeat.phase in (Phase.NONE, Phase.STARTING) for rank in ranks):
        return None
    if not (from_start or any(rank.heartbeat.armed for rank in ranks)):
        return None
    over = (Phase.RETURNED, Phase.ENDED)
    running = [rank for rank in ranks if rank.heartbeat.phase not in over]
    if not running:
        return None
    silent_s = min(rank.silent_s for rank in running)
    if silent_s < limit_s:
        return None
    least = min(map(_progress_of, running))
    behind = tuple(rank for rank in running if _progress_of(rank) == least)
    return Stall(
        behind=behind,
        ahead=tuple(rank for rank in running if rank not in behind),
        returned=tuple(rank for rank in ranks if rank not in running),
        silent_s=silent_s,
        is_hung=all(_is_over(rank, limit_s) for rank in behind),
    )


def _progress_of(rank: RankHeartbeat) -> tuple[int, bool]:
    heartbeat = rank.heartbeat
    return heartbeat.step, heartbeat.phase not in IN_BODY


def _is_over(rank: RankHeartbeat, limit_s: float) -> bool:
    """Tell whether nothing explains a rank's silence any more.

    A rank that works hard may be in a long step; loading, compiling, saving, restoring and
    validating may wait for long.
    """
    if rank.stopped:
        return rank.silent_s >= limit_s
    if rank.heartbeat.phase in STRICT:
        return rank.idle_s >= limit_s or rank.silent_s >= WORKING_FACTOR * limit_s
    return rank.idle_s >= WORKING_FACTOR * limit_s


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
        self._stacks: dict[int, RankStack] = {}
        self._before: dict[int, RankStack] = {}
        self._suspected: tuple[int, ...] = ()
        self._heard: set[int] = set()
        self._warned: tuple[int, ...] = ()
        self._excused: tuple[int, ...] = ()
        self._ended_s: dict[int, float] = {}
        self.stall: Stall | None = None
        """Set once the gang hangs."""
        self.waits_in_vain: int | None = None
        """A rank in a collective that another one, whose function has ended, never joined: proven
        by the stacks."""

    @property
    def has_found(self) -> bool:
        """Whether the gang can't go on."""
        return self.stall is not None or self.waits_in_vain is not None

    def take(self, heartbeats: Iterable[RankHeartbeat], sink: Callable[[GangEvent], None]) -> bool:
        """Take news of some ranks; return whether the gang can't go on.

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
        moved = tuple(rank.heartbeat.moved_ns for _, rank in sorted(self._ranks.items()))
        if stall is None:
            self._suspected = ()
        elif stall.is_hung:
            # Seen of all ranks twice: agents send their ranks' heartbeats at different times.
            if self._suspected != moved:
                self._suspected, self._heard = moved, set()
            elif self._heard == self._hosts.keys() and self._excused != moved:
                self.stall = stall
        elif self._warned != moved:
            self._warned = moved
            what = summarize(stall, self._hosts, {})
            text = f"no progress for {stall.silent_s:.0f} s, which may be right: {what}"
            sink(LogLine(NO_RANK, logging.WARNING, text))

    def add_end(self, rank: int) -> None:
        """Take note of a rank whose function has ended."""
        self._ended_s[rank] = time.monotonic()

    @property
    def suspects_vain_wait(self) -> bool:
        """Whether to look at the ranks that still run, of which none makes progress.

        That is a while after another one's end, or after the limit.
        """
        long_ago_s = time.monotonic() - EARLY_RETURN_S
        has_ended = any(at_s < long_ago_s for at_s in self._ended_s.values())
        limit_s = EARLY_RETURN_S if has_ended else self._limit_s
        running = self._running()
        return (
            limit_s is not None
            and bool(running)
            and all(each.silent_s > limit_s for each in running)
        )

    def begin_look(self) -> None:
        """Keep the stacks of an earlier look for comparison only."""
        self._before, self._stacks = self._stacks, {}

    @property
    def may_wait_in_vain(self) -> bool:
        """Whether a look found all ranks that still run in a collective."""
        running = self._running()
        found = [self._stacks[each.rank].text for each in running if each.rank in self._stacks]
        return len(found) == len(running) > 0 and all(map(is_in_collective, found))

    def judge_vain_wait(self) -> None:
        """Compare two looks, and note the wait that they prove."""
        running = [each.rank for each in self._running()]
        if not (self.suspects_vain_wait and wait_in_vain(running, self._before, self._stacks)):
            return
        if self._ended_s:
            self.waits_in_vain = min(running)
        elif self._limit_s is not None:
            ranks = tuple(self._ranks.values())
            stall = find_stall(ranks, self._limit_s, from_start=self._from_start)
            if stall is not None:  # all wait, so none is more behind than another
                behind = (*stall.behind, *stall.ahead)
                self.stall = replace(stall, behind=behind, ahead=(), is_hung=True)

    def excuse(self) -> str:
        """Let a gang live whose stacks explain its silence; say why, or nothing."""
        debugged = [rank for rank, stack in self._stacks.items() if is_debugged(stack.text)]
        if self.stall is None or not debugged:
            return ""
        self.stall = None
        self._excused = tuple(each.heartbeat.moved_ns for _, each in sorted(self._ranks.items()))
        return f"no progress, but rank {min(debugged)} is in a debugger: the gang is left alone"

    @property
    def stacks(self) -> tuple[RankStack, ...]:
        """The stacks of the last look, by rank."""
        return tuple(stack for _, stack in sorted(self._stacks.items()))

    def _running(self) -> list[RankHeartbeat]:
        """Return the ranks whose function hasn't ended; nothing before all were heard of."""
        if len(self._ranks) < len(self._hosts):
            return []
        return [each for rank, each in self._ranks.items() if rank not in self._ended_s]

    def add_stack(self, stack: RankStack) -> None:
        """Take what a rank answered."""
        self._stacks[stack.rank] = stack

    def lacks_stacks(self, asked_s: float) -> bool:
        """Whether to wait for more stacks; `asked_s` of `time.monotonic`."""
        is_early = time.monotonic() - asked_s < STACKS_TIMEOUT_S
        return is_early and len(self._stacks) < len(self._hosts)

    def error(self, attempt: int) -> GangHungError:
        """Return the caller's error, with the stacks that came."""
        assert self.stall is not None
        stacks = {rank: stack.text for rank, stack in self._stacks.items()}
        return GangHungError(describe(missing_by(self.stall, stacks), self._hosts, stacks), attempt)


def missing_by(stall: Stall, stacks: Mapping[int, str]) -> Stall:
    """Return the stall with those behind that don't wait in a collective; as it is if all do.

    Those that wait there are waiting for these, whatever they have counted.
    """
    missing = [each for each in stall.behind if not is_in_collective(stacks.get(each.rank, ""))]
    if not missing:
        return stall
    waiting = tuple(each for each in stall.behind if each not in missing)
    return replace(stall, behind=tuple(missing), ahead=(*stall.ahead, *waiting))


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


_NOT_THE_USERS = re.compile(
    r"/(site|dist)-packages/|/lib/python3[.\d]*/|^<|"
    r"/prefect_torch_ddp/(rank|data|checkpoint|records|storage)/"
)


def _innermost_call(stack: str) -> str:
    """Return the user's innermost call as ` at train.py:34 in forward`; empty without a stack."""
    calls = main_thread(stack)
    if not calls:
        return ""
    users = (call for call in calls if not _NOT_THE_USERS.search(call[0]))
    path, line, function = next(users, calls[0])
    return f" at {path.rpartition('/')[2]}:{line} in {function}"
