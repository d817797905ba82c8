"""Owns the mailboxes of a Dask worker's process: agents (threads) post events, the caller's
polls (event loop) collect them.

Owns the waking of an agent that waits for its ranks and for orders at the same time.
"""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from prefect_torch_ddp.protocol.agent import (
    AgentReport,
    AgentState,
    Occupant,
    RankHeartbeat,
    StartOrder,
)
from prefect_torch_ddp.protocol.events import GangEvent

CAPACITY = 5_000
"""Events held for a caller that is slow to fetch them; an agent stops reading its ranks' output
beyond this."""
FORGET_AFTER_S = 600.0
"""A mailbox whose agent never came is dropped after this long without a poll."""


@dataclass
class Mailbox:
    """Two-way post between one agent and the caller of its gang. Safe between threads."""

    token: str
    state: AgentState = "absent"
    store_port: int = 0
    order: StartOrder | None = None
    abort_requested: bool = False
    stop_requested: bool = False
    leave_requested: bool = False
    look_requested: bool = False
    heartbeats: tuple[RankHeartbeat, ...] = ()
    last_poll_s: float = field(default_factory=time.monotonic)
    """When the caller last gave a sign of life, of `time.monotonic`."""
    why_ended: str = ""
    _events: list[GangEvent] = field(default_factory=list)
    _first_event: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _orders: threading.Event = field(default_factory=threading.Event)
    _waiters: list[tuple[asyncio.AbstractEventLoop, "asyncio.Future[None]"]] = field(
        default_factory=list
    )

    alarm: Callable[[], None] | None = None
    """Called when an order comes, for an agent that waits for its ranks and for orders at the
    same time."""

    # The agent's side.

    def post(self, event: GangEvent) -> None:
        """Add an event for the caller."""
        with self._lock:
            self._events.append(event)
        self._wake_polls()

    def enter(self, state: AgentState, store_port: int = 0) -> None:
        """Tell the caller how far the agent is."""
        with self._lock:
            self.state = state
            self.store_port = store_port or self.store_port
        self._wake_polls()

    @property
    def has_room(self) -> bool:
        """Whether the caller keeps up with the events."""
        return len(self._events) < CAPACITY

    def wait_for_orders(self, timeout_s: float) -> None:
        """Wait until the caller says anything new, at most so long."""
        if self._orders.wait(timeout_s):
            self._orders.clear()

    # The caller's side, on the worker's event loop.

    def give(
        self,
        *,
        order: StartOrder | None = None,
        abort: bool = False,
        stop: bool = False,
        leave: bool = False,
        look: bool = False,
    ) -> None:
        """Hand the agent an order."""
        self.last_poll_s = time.monotonic()
        with self._lock:
            self.order = order or self.order
            self.abort_requested |= abort
            self.stop_requested |= stop
            self.leave_requested |= leave
            self.look_requested |= look
            alarm = self.alarm
        self._orders.set()
        if alarm is not None:
            alarm()

    async def news(
        self,
        next_event: int,
        known_state: AgentState,
        wait_s: float,
        occupant: Callable[[], Occupant | None],
    ) -> AgentReport:
        """Return the events from `next_event` on and the state, as soon as either is new, at
        the latest after `wait_s`.
        """
        self.last_poll_s = time.monotonic()
        deadline = self.last_poll_s + wait_s
        while True:
            with self._lock:
                del self._events[: max(0, next_event - self._first_event)]
                self._first_event = max(self._first_event, next_event)
                if self._events or self.state != known_state or time.monotonic() >= deadline:
                    events = tuple(self._events)
                    last = self._first_event + len(events)
                    return AgentReport(
                        self.state,
                        events,
                        last,
                        self.store_port,
                        occupant(),
                        self.why_ended,
                        self.heartbeats,
                    )
                waiter = self._new_waiter()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(waiter, deadline - time.monotonic())

    async def until_ended(self, timeout_s: float) -> bool:
        """Wait until the agent has ended, that is, until all its ranks are gone."""
        deadline = time.monotonic() + timeout_s
        while self.state not in ("ended", "absent"):
            if time.monotonic() >= deadline:
                return False
            with self._lock:
                waiter = self._new_waiter()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(waiter, min(0.1, timeout_s))
        return True

    @property
    def first_event(self) -> int:
        """The number of the first event that is still held."""
        return self._first_event

    def leftovers(self) -> tuple[GangEvent, ...]:
        """Return the events that no poll has fetched."""
        with self._lock:
            return tuple(self._events)

    def _new_waiter(self) -> "asyncio.Future[None]":
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiters.append((loop, waiter))
        return waiter

    def _wake_polls(self) -> None:
        with self._lock:
            waiters, self._waiters = self._waiters, []
        for loop, waiter in waiters:
            with contextlib.suppress(RuntimeError):  # the loop closed: the worker is on its way out
                loop.call_soon_threadsafe(_wake, waiter)


def _wake(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)


class Mailboxes:
    """All mailboxes of this process, by token; made by whoever comes first, the agent or the
    caller's poll.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._by_token: dict[str, Mailbox] = {}
        self._lock = threading.Lock()

    def open(self, token: str) -> Mailbox:
        """Return the mailbox, making it where there is none."""
        with self._lock:
            return self._by_token.setdefault(token, Mailbox(token))

    def find(self, token: str) -> Mailbox | None:
        """Return the mailbox if there is one."""
        return self._by_token.get(token)

    def drop(self, token: str) -> None:
        """Forget the mailbox."""
        with self._lock:
            self._by_token.pop(token, None)

    def drop_abandoned(self) -> None:
        """Forget mailboxes without an agent that nobody polls any more: their caller was
        killed.
        """
        now = time.monotonic()
        with self._lock:
            for box in list(self._by_token.values()):
                if box.state in ("absent", "ended") and now - box.last_poll_s > FORGET_AFTER_S:
                    del self._by_token[box.token]


MAILBOXES = Mailboxes()


class Alarm:
    """Wakes a thread that waits in poll()."""

    def __init__(self) -> None:
        """Open it, quiet."""
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)  # noqa: FBT003 - the standard library takes it by position
        self._writer.setblocking(False)  # noqa: FBT003

    @property
    def fd(self) -> int:
        """What to wait on."""
        return self._reader.fileno()

    def ring(self) -> None:
        """Wake the thread, from any other."""
        with contextlib.suppress(OSError):  # full: it rings already; closed: nobody waits any more
            self._writer.send(b"!")

    def quiet(self) -> None:
        """Be ready to ring again."""
        with contextlib.suppress(BlockingIOError):
            self._reader.recv(64)

    def close(self) -> None:
        """Close both ends."""
        self._reader.close()
        self._writer.close()
