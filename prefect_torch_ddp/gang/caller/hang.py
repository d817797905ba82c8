"""Hangs: the rule by which a gang counts as hung, the ranks that are missing, and the message."""

import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from prefect_torch_ddp.errors import GangHungError
from prefect_torch_ddp.gang.caller.placement import Placement
from prefect_torch_ddp.protocol.agent import RankHeartbeat
from prefect_torch_ddp.protocol.events import NO_RANK, GangEvent, Hang, LogLine, RankStack
from prefect_torch_ddp.protocol.heartbeat import Phase

WORKING_FACTOR = 10.0
"""How many times the limit applies where long waits are usual, or while a rank works hard."""
IN_BODY = {Phase.FUNCTION, Phase.STEP, Phase.EPOCH_END, Phase.COMPILING}
STRICT = {Phase.FUNCTION, Phase.STEP, Phase.STEP_END}
"""Where a rank that is idle waits for nothing that could come from elsewhere than its gang."""
EARLY_RETURN_S = 3.0
"""How long after a rank's end to wait for its peers' last reports; ranks count their
collectives once a second."""
STACKS_TIMEOUT_S = 8.0
"""How long to wait for the stacks of a gang that hangs."""


@dataclass(frozen=True)
class Stall:
    """A gang without progress."""

    behind: tuple[RankHeartbeat, ...]
    """The ranks that have come least far; the others, if there are any, wait for them."""
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


def _progress_of(rank: RankHeartbeat) -> tuple[int, bool, int]:
    heartbeat = rank.heartbeat
    return heartbeat.step, heartbeat.phase not in IN_BODY, heartbeat.seq


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
        self._stacks: dict[int, str] = {}
        self._suspected: tuple[int, ...] = ()
        self._heard: set[int] = set()
        self._warned: tuple[int, ...] = ()
        self._ended_s: dict[int, float] = {}
        self.stall: Stall | None = None
        """Set once the gang hangs."""
        self.waits_in_vain: int | None = None
        """A rank in a collective that another one, whose function has ended, never joined."""

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
        if self.waits_in_vain is None:
            self.waits_in_vain = self._find_vain_wait()
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
            elif self._heard == self._hosts.keys():
                self.stall = stall
        elif self._warned != moved:
            self._warned = moved
            what = summarize(stall, self._hosts, {})
            text = f"no progress for {stall.silent_s:.0f} s, which may be right: {what}"
            sink(LogLine(NO_RANK, logging.WARNING, text))

    def add_end(self, rank: int) -> None:
        """Take note of a rank whose function has ended."""
        self._ended_s[rank] = time.monotonic()

    def _find_vain_wait(self) -> int | None:
        long_ago_s = time.monotonic() - EARLY_RETURN_S
        ended = [
            self._ranks[rank].heartbeat.seq
            for rank, at_s in self._ended_s.items()
            if at_s < long_ago_s and rank in self._ranks
        ]
        for rank in self._ranks.values() if ended else ():
            has_begun_more = rank.heartbeat.seq > min(ended)
            if rank.rank not in self._ended_s and has_begun_more and rank.silent_s > EARLY_RETURN_S:
                return rank.rank
        return None

    def add_stack(self, stack: RankStack) -> None:
        """Take what a rank answered."""
        self._stacks[stack.rank] = stack.text

    def lacks_stacks(self, asked_s: float) -> bool:
        """Whether to wait for more stacks; `asked_s` of `time.monotonic`."""
        is_early = time.monotonic() - asked_s < STACKS_TIMEOUT_S
        return is_early and len(self._stacks) < len(self._hosts)

    def error(self, attempt: int) -> GangHungError:
        """Return the caller's error, with the stacks that came."""
        assert self.stall is not None
        return GangHungError(describe(self.stall, self._hosts, self._stacks), attempt)


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
    is_waiting = all(_is_in_collective(stacks, rank) for rank in behind)
    verb = "waits for a rank that does not come" if is_waiting else "did not arrive"
    text = ", ".join(
        f"rank {rank.rank} on {hosts[rank.rank]} {verb}: for {rank.silent_s:.0f} s it has been "
        f"{_doing(rank, stacks)}"
        for rank in behind
    )
    if others := _others(stall, stacks):
        text += f", while {others}"
    counted = sorted((*behind, *stall.ahead), key=lambda rank: rank.rank)
    if is_waiting and len({rank.heartbeat.seq for rank in counted}) > 1:
        begun = ", ".join(f"rank {rank.rank} {rank.heartbeat.seq}" for rank in counted)
        text += f"; they have begun different numbers of collectives: {begun}"
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
        what = in_collective if _is_in_collective(stacks, rank) else _doing(rank, stacks)
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


_FRAME = re.compile(r'^\s*File "(?P<path>.*)", line (?P<line>\S+) in (?P<function>.*)$')
_NOT_THE_USERS = re.compile(
    r"/(site|dist)-packages/|/lib/python3[.\d]*/|^<|"
    r"/prefect_torch_ddp/(rank|data|checkpoint|records|storage)/"
)


def _main_thread(stack: str) -> list[tuple[str, str, str]]:
    """Return path, line and function of each call of the main thread, the innermost first."""
    # faulthandler writes the main thread last.
    *_, last = re.split(r"^(?:Current thread|Thread) .*$", stack, flags=re.MULTILINE)
    matches = map(_FRAME.match, last.splitlines())
    return [(match["path"], match["line"], match["function"]) for match in matches if match]


def _innermost_call(stack: str) -> str:
    """Return the user's innermost call as ` at train.py:34 in forward`; empty without a stack."""
    calls = _main_thread(stack)
    if not calls:
        return ""
    users = (call for call in calls if not _NOT_THE_USERS.search(call[0]))
    path, line, function = next(users, calls[0])
    return f" at {path.rpartition('/')[2]}:{line} in {function}"


def _is_in_collective(stacks: Mapping[int, str], rank: RankHeartbeat) -> bool:
    """Whether the main thread waits in torch.distributed, or in a backward pass.

    A backward pass ends with DDP's all-reduce.
    """
    innermost = _main_thread(stacks.get(rank.rank, ""))[:3]
    return any(
        "/torch/distributed/" in path or function == "_engine_run_backward"
        for path, _, function in innermost
    )
