"""Mailboxes: agents post events from threads; callers' polls take them on the event loop."""

import asyncio
import contextlib
import os
import select
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from prefect_torch_ddp.protocol.events import GangEvent
from prefect_torch_ddp.protocol.messages import (
    AgentNews,
    AgentOrder,
    AgentState,
    RankHeartbeat,
    StartOrder,
)

FORGET_AFTER_S = 600.0
"""A mailbox without an agent is dropped after this long without a poll."""
UNHEARD_S = 15.0
"""How long after its last poll a caller is expected to come for the end of its agent, which it
confirms by its order to abort. It polls about every second, unless its own process is busy."""


class Alarm:
    """Wakes a thread that waits for files. Safe between threads."""

    def __init__(self) -> None:
        """Nobody waits yet, and nothing rings."""
        self._fd: int | None = None
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def set(self) -> Iterator[int]:
        """Yield a file descriptor that becomes readable when the alarm rings."""
        fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._fd = fd
        try:
            yield fd
        finally:
            with self._lock:  # `ring` must not write to another file of the same number
                self._fd = None
                os.close(fd)

    def wait(self, timeout_s: float, fds: Iterable[int]) -> None:
        """Wait until it rings, or until one of the files is readable; it has to be set."""
        assert self._fd is not None
        poller = select.poll()
        for fd in (self._fd, *fds):
            poller.register(fd, select.POLLIN)
        poller.poll(timeout_s * 1000)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def ring(self) -> None:
        """Wake who waits; nothing happens unless it is set."""
        with self._lock:
            if self._fd is not None:
                os.eventfd_write(self._fd, 1)


@dataclass
class Mailbox:
    """Two-way post between one agent and the caller of its gang. Safe between threads."""

    state: AgentState = "absent"
    store_port: int = 0
    start: StartOrder | None = None
    orders: set[AgentOrder] = field(default_factory=set)
    """All that were given; abort: kill the ranks at once."""
    heartbeats: tuple[RankHeartbeat, ...] = ()
    last_poll_s: float = field(default_factory=time.monotonic)
    """When the caller last polled, by `time.monotonic`."""
    why_ended: str = ""
    _events: list[GangEvent] = field(default_factory=list)
    _first_event: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _loop: asyncio.AbstractEventLoop | None = None
    """Where polls wait, once there was one."""
    _has_news: asyncio.Event = field(default_factory=asyncio.Event)
    _alarm: Alarm = field(default_factory=Alarm)

    # The agent's side.

    def alarm(self) -> contextlib.AbstractContextManager[int]:
        """Yield a file descriptor that becomes readable when an order comes."""
        return self._alarm.set()

    def wait(self, timeout_s: float, fds: Iterable[int] = ()) -> None:
        """Wait for an order, or until one of the files is readable; needs the alarm."""
        self._alarm.wait(timeout_s, fds)

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

    def _wake_polls(self) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it is closed: the worker is ending
                self._loop.call_soon_threadsafe(self._has_news.set)

    # The caller's side, on the worker's event loop.

    def give(self, order: AgentOrder | StartOrder) -> None:
        """Give the agent an order."""
        self.last_poll_s = time.monotonic()
        with self._lock:
            if isinstance(order, StartOrder):
                self.start = order
            else:
                self.orders.add(order)
        self._alarm.ring()

    async def news(self, next_event: int, known_state: AgentState, wait_s: float) -> AgentNews:
        """Return the state and the events from `next_event` on, once either is new.

        Waits at most `wait_s` seconds; after an abort for the agent's end.
        """
        self.last_poll_s = time.monotonic()
        deadline = self.last_poll_s + wait_s
        while True:
            # Before the look, so that nothing posted after it is missed.
            self._loop = asyncio.get_running_loop()
            self._has_news.clear()
            with self._lock:
                del self._events[: max(0, next_event - self._first_event)]
                self._first_event = max(self._first_event, next_event)
                news = self._news()
                is_new = bool(self._events) or self.state != known_state
                is_due = news.has_ended if "abort" in self.orders else is_new
                if is_due or time.monotonic() >= deadline:
                    return news
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._has_news.wait(), deadline - time.monotonic())

    def _news(self) -> AgentNews:
        return AgentNews(
            state=self.state,
            events=tuple(self._events),
            next_event=self._first_event + len(self._events),
            store_port=self.store_port,
            why_ended=self.why_ended,
            heartbeats=self.heartbeats,
        )


MAILBOXES: dict[str, Mailbox] = {}
"""All mailboxes of this process, by token; an agent and its caller's first poll both make one."""


def open_mailbox(token: str) -> Mailbox:
    """Return the mailbox, making it if there is none."""
    return MAILBOXES.setdefault(token, Mailbox())


def is_polled() -> bool:
    """Whether callers still ask for agents of this process, of whose end they haven't heard."""
    now = time.monotonic()
    begun = [box for box in list(MAILBOXES.values()) if box.state != "absent"]
    return any(now - box.last_poll_s < UNHEARD_S for box in begun)


def drop_abandoned() -> None:
    """Forget mailboxes without an agent that nobody polls: their caller was killed."""
    now = time.monotonic()
    for token, box in list(MAILBOXES.items()):
        if box.state in ("absent", "ended") and now - box.last_poll_s > FORGET_AFTER_S:
            MAILBOXES.pop(token, None)
