"""Mailboxes: agents, in threads, post events; the callers' polls, on the event loop, take them."""

import asyncio
import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from prefect_torch_ddp.protocol.agent import (
    AgentReport,
    AgentState,
    Cleared,
    Occupant,
    RankHeartbeat,
    StartOrder,
)
from prefect_torch_ddp.protocol.events import GangEvent

CAPACITY = 5_000
"""Events held for a slow caller; beyond it the agent stops reading its ranks' output."""
FORGET_AFTER_S = 600.0
"""A mailbox without an agent is dropped after this long without a poll."""


class Alarm:
    """Wakes a thread that waits in poll()."""

    def __init__(self) -> None:
        """Open it, quiet."""
        self._reader, self._writer = socket.socketpair()
        for end in (self._reader, self._writer):
            os.set_blocking(end.fileno(), False)

    @property
    def fd(self) -> int:
        """The file descriptor to wait on."""
        return self._reader.fileno()

    def ring(self) -> None:
        """Wake the thread, from any other."""
        with contextlib.suppress(OSError):  # full: it rings already; closed: nobody waits
            self._writer.send(b"!")

    def quiet(self) -> None:
        """Be ready to ring again."""
        with contextlib.suppress(BlockingIOError):
            self._reader.recv(64)

    def wait(self, timeout_s: float) -> None:
        """Wait until it rings, at most this long."""
        poller = select.poll()
        poller.register(self.fd, select.POLLIN)
        poller.poll(timeout_s * 1000)
        self.quiet()

    def close(self) -> None:
        """Close both ends."""
        self._reader.close()
        self._writer.close()


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
    alarm: Alarm | None = None
    """Rung when an order comes."""
    heartbeats: tuple[RankHeartbeat, ...] = ()
    last_poll_s: float = field(default_factory=time.monotonic)
    """When the caller last gave a sign of life, of `time.monotonic`."""
    why_ended: str = ""
    _events: list[GangEvent] = field(default_factory=list)
    _first_event: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _waiters: "list[asyncio.Future[None]]" = field(default_factory=list)

    # The agent's side.

    def post(self, event: GangEvent) -> None:
        """Add an event for the caller."""
        with self._lock:
            self._events.append(event)
        self._wake_polls()

    def enter(self, state: AgentState, store_port: int = 0) -> None:
        """Report the agent's state to the caller."""
        with self._lock:
            self.state = state
            self.store_port = store_port or self.store_port
        self._wake_polls()

    @property
    def has_room(self) -> bool:
        """Whether the caller keeps up with the events."""
        return len(self._events) < CAPACITY

    def _wake_polls(self) -> None:
        with self._lock:
            waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the worker is ending
                waiter.get_loop().call_soon_threadsafe(_wake, waiter)

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
        """Give the agent an order."""
        self.last_poll_s = time.monotonic()
        with self._lock:
            self.order = order or self.order
            self.abort_requested |= abort
            self.stop_requested |= stop
            self.leave_requested |= leave
            self.look_requested |= look
            alarm = self.alarm
        if alarm is not None:
            alarm.ring()

    async def news(
        self,
        next_event: int,
        known_state: AgentState,
        wait_s: float,
        occupant: Callable[[], Occupant | None],
    ) -> AgentReport:
        """Return the state and the events from `next_event` on, once either is new.

        Waits at most `wait_s` seconds.
        """
        self.last_poll_s = time.monotonic()
        deadline = self.last_poll_s + wait_s
        while True:
            waiter = self._new_waiter()  # before the look: what is posted behind it isn't missed
            with self._lock:
                del self._events[: max(0, next_event - self._first_event)]
                self._first_event = max(self._first_event, next_event)
                if self._events or self.state != known_state or time.monotonic() >= deadline:
                    return AgentReport(
                        state=self.state,
                        events=tuple(self._events),
                        next_event=self._first_event + len(self._events),
                        store_port=self.store_port,
                        occupant=occupant(),
                        why_ended=self.why_ended,
                        heartbeats=self.heartbeats,
                    )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(waiter, deadline - time.monotonic())

    async def clear(self, timeout_s: float) -> Cleared:
        """Have the agent kill its ranks; return once none is left, or after the timeout."""
        self.give(abort=True)
        deadline = time.monotonic() + timeout_s
        while (is_running := self.state not in ("ended", "absent")) and time.monotonic() < deadline:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._new_waiter(), min(0.1, timeout_s))
        with self._lock:
            return Cleared(not is_running, self._first_event, tuple(self._events))

    def _new_waiter(self) -> "asyncio.Future[None]":
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with self._lock:
            self._waiters.append(waiter)
        return waiter


def _wake(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)


class Mailboxes:
    """All mailboxes of this process, by token; the agent and the caller's poll both make them."""

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
        """Forget mailboxes without an agent that nobody polls: their caller was killed."""
        now = time.monotonic()
        with self._lock:
            for box in list(self._by_token.values()):
                if box.state in ("absent", "ended") and now - box.last_poll_s > FORGET_AFTER_S:
                    del self._by_token[box.token]


MAILBOXES = Mailboxes()
