"""How ranks agree on the step after which something is done: no collective, next to no cost.

Ranks pass *points* in the same order: the end of step n is 2n, being outside of a loop after
step n is 2n + 1. When a rank wants something it opens a round in the gang's store. Every rank
then *pledges* a point that it won't pass before it knows the outcome: its own thread does
so while the training computes, so no rank waits for another one's step. The outcome is the
furthest point pledged, which no rank has passed, and what any rank wanted.
"""

import itertools
import json
import math
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from enum import IntFlag

import torch.distributed as dist

POLL_S = 0.2
"""How often a rank's thread looks for an open round. Not a blocking wait: when rank 0 dies, which
serves the store, torch would print a page of C++ frames on every other rank."""
GATHER_POLL_S = 0.001
MAX_GATHER_POLL_S = 0.05
NEVER = 2**62

_num_agreements = itertools.count()


class Want(IntFlag):
    """What a rank wants, or what all agreed on."""

    NOTHING = 0
    STOP = 1
    """Requested by the supervisor: a cancel or a preemption."""
    STOP_EARLY = 2
    """Requested by the training itself."""
    SAVE = 4
    """A checkpoint is due by time."""


def end_of(step: int) -> int:
    """Return the point at the end of a step."""
    return 2 * step


def outside_after(step: int) -> int:
    """Return the point outside of a loop whose last step this was; 0 before the first step."""
    return 2 * step + 1


@dataclass(frozen=True)
class Outcome:
    """What all ranks agreed on."""

    point: int
    want: Want


class Agreement:
    """Reaches one kind of agreement after another.

    The training's thread makes all calls; its own thread answers for it.
    """

    def __init__(self, rank: int, world_size: int, point: int, *, ahead_s: float = 0.0) -> None:
        """Take part from now on; every rank has to make it, equally often.

        Args:
            rank: this one.
            world_size: with 1 there is nobody to ask, no thread and no store.
            point: where this rank is, outside of a loop.
            ahead_s: how far ahead the rank that asks pledges, so that it need not wait for the
                others' threads; 0 for what is to be done as soon as possible.

        Raises:
            RuntimeError: there are several ranks and the process group isn't up.
        """
        self._rank = rank
        self.world_size = world_size
        self._ahead_s = ahead_s
        self._next_point = point
        self._last_point = point
        self._round = 0
        self._limit = NEVER
        self._asked = False
        self._outcome: Outcome | None = None
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._pace = (time.monotonic(), point)
        if world_size > 1:
            name = f"prefect-torch-ddp-agreement-{next(_num_agreements)}"
            # Two connections: one must not wait for the other's turn.
            self._store, self._answers = _connect(name), _connect(name)
            self._thread = threading.Thread(target=self._answer, name=name, daemon=True)
            self._thread.start()

    def begin(self, point: int, next_point: int, last_point: int, want: Want) -> Outcome | None:
        """Pass the point before a loop; see `reach`.

        Args:
            point: outside of the loop.
            next_point: the end of its first step.
            last_point: the end of its last step.
            want: what this rank wants.
        """
        with self._lock:
            self._last_point = last_point
        self._pace = (time.monotonic(), point)
        return self.reach(point, next_point, want)

    def reach(self, point: int, next_point: int, want: Want) -> Outcome | None:
        """Pass a point, and return what is due there; waits at a pledge.

        What was due at a point that this rank skipped by leaving the loop is due now.

        Args:
            point: where this rank is.
            next_point: the next one that it comes to.
            want: what this rank wants; asked for once.

        Raises:
            DistNetworkError: rank 0, which serves the store, is gone.
        """
        if self._thread is None:
            return Outcome(point, want) if want else None
        with self._lock:
            if point < self._limit and (not want or self._asked):
                self._next_point = next_point
                return None
            if self._limit == NEVER:
                self._asked = True
                self._pledge(self._store, self._ahead(point), want)
            self._next_point = next_point if point < self._limit else point
            if point < self._limit:
                return None
        self._outcome = self._outcome or self._gather()
        return self._apply(self._outcome, point, next_point)

    def put_first(self, key: str, text: str) -> str:
        """Put a text if no rank has put one; return the one that is there. Waits for no rank."""
        if self._thread is None:
            return text
        return self._store.compare_set(key, "", text).decode()

    def leave(self, point: int) -> None:
        """Leave a loop in the middle of a step: its end won't come."""
        with self._lock:
            self._next_point = self._last_point = point

    def close(self, *, failed: bool = False) -> None:
        """Leave the agreement; the others continue without this rank, unless it failed."""
        self._over.set()
        if self._thread is None or failed:
            return
        self._thread.join()
        self._thread = None
        with suppress(RuntimeError):  # the store went with the rank that served it
            self._answers.check([""])  # its answer says that the pledges sent before have arrived
            # A round that was opened since its thread looked gets no pledge of this rank any more.
            self._store.set(f"gone/{self._rank}", str(self._next_point))

    def _apply(self, outcome: Outcome, point: int, next_point: int) -> Outcome | None:
        with self._lock:
            self._next_point = next_point
            if outcome.point > point:
                self._limit = outcome.point
                return None
            self._round += 1
            self._limit = NEVER
            self._asked = False
            self._outcome = None
        return outcome

    def _ahead(self, point: int) -> int:
        """Return the point to pledge in a round that this rank opens: here, or some steps on."""
        if not self._ahead_s or point >= self._last_point:
            return point
        began_s, began_at = self._pace
        steps = max(1, (point - began_at) // 2)
        step_s = max((time.monotonic() - began_s) / steps, 1e-6)
        return min(point + 2 * math.ceil(self._ahead_s / step_s), self._last_point)

    def _pledge(self, store: dist.Store, point: int, want: Want) -> None:
        """Promise not to pass a point; the lock is held, or the training could pass it now."""
        store.set(f"pledge/{self._round}/{self._rank}", json.dumps([point, int(want)]))
        if want:
            store.set(f"open/{self._round}", "")
        self._limit = point

    def _answer(self) -> None:
        with suppress(RuntimeError):  # rank 0 is gone: the training finds out by itself
            while not self._over.wait(POLL_S):
                now = self._round
                if self._limit != NEVER or not self._answers.check([f"open/{now}"]):
                    continue
                with self._lock:
                    if self._round == now and self._limit == NEVER:
                        self._pledge(self._answers, self._next_point, Want.NOTHING)

    def _gather(self) -> Outcome:
        """Wait for the pledges of all ranks; one that is gone without has passed its last point."""
        pledges: dict[int, tuple[int, int]] = {}
        missing = list(range(self.world_size))
        pause_s = GATHER_POLL_S
        while True:
            for rank in list(missing):
                gone = self._store.check([f"gone/{rank}"])
                # Looked for after that: what was pledged before the end counts.
                key = f"pledge/{self._round}/{rank}"
                if self._store.check([key]):
                    pledges[rank] = tuple(json.loads(self._store.get(key)))
                elif gone:
                    pledges[rank] = int(self._store.get(f"gone/{rank}")), Want.NOTHING
                if rank in pledges:
                    missing.remove(rank)
            if not missing:
                break
            threading.Event().wait(pause_s)
            pause_s = min(1.5 * pause_s, MAX_GATHER_POLL_S)
        want = Want.NOTHING
        for _, wanted in pledges.values():
            want |= Want(wanted)
        return Outcome(max(point for point, _ in pledges.values()), want)


def _connect(name: str) -> dist.Store:
    # Its own connection: a client must not be used by two threads at a time.
    if not dist.is_initialized():
        needs = "ctx.steps on several ranks needs the process group"
        msg = f"{needs}; call init_process_group before it"
        raise RuntimeError(msg)
    # Torch has no public way to it.
    store = dist.distributed_c10d._get_default_store()  # noqa: SLF001
    return dist.PrefixStore(name, store.clone())
