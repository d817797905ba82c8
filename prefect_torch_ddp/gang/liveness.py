"""Liveness: after how long a silence others count as lost, a storage too; who is still wanted."""

import asyncio
import functools
import logging
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from typing import TypeVar

import dask.config
from distributed import Worker, get_worker
from distributed.core import Status
from distributed.worker import thread_state

logger = logging.getLogger(__name__)

LEAVING = (Status.closing_gracefully, Status.closing, Status.closed, Status.failed)
CALLERS: Counter[str] = Counter()
"""How many gangs are called from each Dask worker of this process, by address."""
_COUNTING = threading.Lock()

LIVENESS_TIMEOUT_S = 60.0
"""For callers, agents, workers and the scheduler. Another task may hold the GIL of a shared
cluster's worker for many seconds, which says nothing of the ranks."""
LIVENESS_SETTING = "prefect-torch-ddp.liveness-timeout-s"
"""The setting in Dask's configuration that changes it, where a gang is called: agents and ranks
get their caller's."""
TURN_S = 3.0
"""The most that counts between two looks: if they are further apart, this process was most likely
stopped itself, or its machine was asleep."""
STORAGE_QUIET_S = 3.0
"""How long a storage may take before a message says what it delays."""
STORAGE_LIMIT_S = 30.0
"""How long it may take in all; what isn't written by then is dropped."""
STAYS_POLL_S = 0.5
UNWANTED = "the cancellation or end of its flow or Dask client"
"""Why a task ends of which Dask says only that nobody wants it any more."""

R = TypeVar("R")


class _Seen(threading.local):
    """What the watch of this thread's Dask task has seen: whether its worker was to leave.

    Dask may keep a worker that it was about to retire: its values find no other place.
    """

    leaving: object = None
    """The task's key if it was."""


_SEEN = _Seen()


def liveness_timeout_s() -> float:
    """Return after how many seconds of silence this process takes another for lost.

    That is the setting, or the default, with a warning, if it is no positive number.
    """
    value = dask.config.get(LIVENESS_SETTING, default=LIVENESS_TIMEOUT_S)
    try:
        if (seconds := float(value)) > 0:
            return seconds
    except (TypeError, ValueError):
        pass
    _warn_once(repr(value))
    return LIVENESS_TIMEOUT_S


@functools.cache
def _warn_once(value: str) -> None:
    text = "%s is %s and must be a positive number of seconds; using %g"
    logger.warning(text, LIVENESS_SETTING, value, LIVENESS_TIMEOUT_S)


class Liveness:
    """How long nothing was heard, as far as this process lived through it."""

    def __init__(
        self, limit_s: float | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        """Start with nothing missed; the default limit is this process's setting."""
        self.limit_s = liveness_timeout_s() if limit_s is None else limit_s
        self._now = now
        self._looked_s = now()
        self._silent_s = 0.0

    def heard(self) -> None:
        """Note that the other side answered."""
        self._looked_s = self._now()
        self._silent_s = 0.0

    def look(self) -> float:
        """Count the time since the last look; return for how long nothing was heard."""
        now = self._now()
        self._silent_s += min(now - self._looked_s, TURN_S)
        self._looked_s = now
        return self._silent_s

    def look_left_s(self) -> float:
        """Count as `look` does; return how much longer the silence may last."""
        return max(0.0, self.limit_s - self.look())


@asynccontextmanager
async def looked_at() -> AsyncIterator[Liveness]:
    """Give one that is looked at each second, since what is awaited meanwhile may take longer."""
    liveness = Liveness()

    async def keep_looking() -> None:
        while True:
            await asyncio.sleep(TURN_S / 3)
            liveness.look()

    looking = asyncio.create_task(keep_looking())
    try:
        yield liveness
    finally:
        looking.cancel()


def is_closing(worker: Worker) -> bool:
    """Whether the Dask worker is on its way out, also while it is only being retired."""
    return worker.status in LEAVING


def is_unwanted(worker: Worker, key: object) -> bool:
    """Whether Dask let go of a task of the worker; a killed client's tasks are cancelled too."""
    task = worker.state.tasks.get(key)  # type: ignore[call-overload]  # keys are strings here
    return task is None or task.state in ("cancelled", "released", "forgotten")


@contextmanager
def calling() -> Iterator[None]:
    """Have the Dask worker whose task this is, if any, wait when it closes."""
    worker = _own_worker()
    if worker is None:
        yield
        return
    address = worker.address
    with _COUNTING:
        CALLERS[address] += 1
    try:
        yield
    finally:
        with _COUNTING:
            CALLERS[address] -= 1


def _own_worker() -> Worker | None:
    # Not where it is asked for: what is raised within an except seems to come of "No worker found".
    try:
        return get_worker()
    except ValueError:
        return None


def own_worker_leaves() -> bool:
    """Whether the Dask worker whose task this is, if any, is on its way out.

    Also if it stays after all, but the task's watch had seen that it was to leave.
    """
    worker, key = _own_worker(), getattr(thread_state, "key", None)
    was_seen = key is not None and _SEEN.leaving == key
    return worker is not None and (is_closing(worker) or was_seen)


def forget_that_own_worker_was_to_leave() -> None:
    """Begin anew with this thread's task: it may be tried again here, under the same key."""
    _SEEN.leaving = None


def wait_until_own_worker_stays() -> bool:
    """Wait while the worker of this thread's task is on its way out, for ever if it goes.

    Returns whether the task, now that the worker stays, is still wanted.
    """
    worker = _own_worker()
    while worker is not None and is_closing(worker):
        time.sleep(STAYS_POLL_S)
    forget_that_own_worker_was_to_leave()
    return not own_task_watch()()


def own_task_watch() -> Callable[[], str]:
    """Return a check of the Dask task that this thread runs: why it isn't wanted, or empty."""
    worker, key = _own_worker(), getattr(thread_state, "key", None)
    if worker is None or key is None:
        return lambda: ""  # no Dask task

    def why_unwanted() -> str:
        if is_closing(worker):
            _SEEN.leaving = key
            return f"the closing of worker {worker.address}, which ran its caller"
        return UNWANTED if is_unwanted(worker, key) else ""

    return why_unwanted


class TimeBudget:
    """Limits the time of work with a storage, whose client may take minutes to give up."""

    def __init__(self, say: Callable[[str], None]) -> None:
        """Start with the whole budget."""
        self._say = say
        self._left_s = STORAGE_LIMIT_S
        self._has_said = False

    def spend_on(self, work: Callable[[], R]) -> R | None:
        """Return what the work returns or raise what it raises; None if it takes too long.

        Work that takes too long may still finish in its thread.
        """
        if self._left_s <= 0:
            return None
        done: Future[R] = Future()
        # A daemon: it must not keep the process from ending.
        name = "prefect-torch-ddp-time budget"
        threading.Thread(target=_do, args=(work, done), name=name, daemon=True).start()
        while self._left_s > 0:
            turn_s = min(STORAGE_QUIET_S, self._left_s)
            try:
                return done.result(turn_s)
            except TimeoutError:
                if done.done():
                    raise  # the work's own
                self._left_s -= turn_s
                self._say_once()
        return None

    def _say_once(self) -> None:
        if not self._has_said:
            self._has_said = True
            gets = f"it has {STORAGE_LIMIT_S:g} s for the records that are left"
            self._say(f"the storage has not answered for {STORAGE_QUIET_S:g} s: {gets}")


def _do(work: Callable[[], R], done: Future[R]) -> None:
    try:
        done.set_result(work())
    except BaseException as error:  # noqa: BLE001 - whoever waits shall have it
        done.set_exception(error)
