"""The watch over a submitted task's Dask worker and scheduler, where Dask would wait forever."""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable
from typing import Any, TypeVar

from distributed import Client, Future

from prefect_torch_ddp.errors import (
    NotEnoughWorkersError,
    SchedulerLostError,
    SupervisorLostError,
)
from prefect_torch_ddp.gang.liveness import Liveness, liveness_timeout_s

T = TypeVar("T")

CALLED_EVERY_S = 1.0
"""How often `TaskWatch.look` is called."""
LOOK_EVERY_S = 3.0
"""While all answer: each look costs some milliseconds of the ranks' processor time."""
ANSWER_S = 2.0
TAKE_IN_S = 60.0
"""How long scheduler and worker may be silent until they have loaded the task: they unpickle
it, which imports Prefect and the task's modules the first time, in the thread that
answers."""
RESTART_S = 20.0
"""How long a restart may take: a nanny gives its worker four seconds to end."""

MAX_NAMED = 4
"""How many busy workers a line names, and tasks of each."""
STIMULUS = "prefect-torch-ddp-silent-worker"
"""What Dask's own log of events names as the reason."""

logger = logging.getLogger(__name__)


class TaskLiveness(Liveness):
    """The liveness of one process; with a longer limit until it has loaded the task."""

    def __init__(self) -> None:
        """Start with nothing missed."""
        super().__init__(max(TAKE_IN_S, liveness_timeout_s()))

    def heard(self, *, has_task: bool = False) -> None:
        """Note that the process answered."""
        if has_task:
            self.limit_s = liveness_timeout_s()
        super().heard()


class TaskWatch:
    """Looks after one task from its flow's thread."""

    def __init__(
        self,
        client: Client,
        future: "Future[Any]",
        *,
        owns_workers: bool,
        workers_timeout_s: float = math.inf,
    ) -> None:
        """Watch a task; of a cluster made for this flow all workers, since they hold its ranks."""
        assert client.scheduler is not None
        self._client = client
        self._rpc: Any = client.scheduler
        self._future = future
        self._owns_workers = owns_workers
        self._scheduler = TaskLiveness()
        self._workers: dict[str, TaskLiveness] = {}
        self._answered: set[str] = set()
        self._address: str | None = None
        self._has_begun = False
        self._tasks: dict[str, list[Any]] | None = None
        """The keys that each worker of the cluster has, as looked at last."""
        self._workers_timeout_s = workers_timeout_s
        self._empty: Liveness | None = None
        """For how long the cluster has had no worker."""
        self._next_look_s = 0.0

    def look(self) -> None:
        """Ask scheduler and workers whether they answer; have a silent worker restarted.

        They are asked when that is due: every LOOK_EVERY_S while all answer, else at each call.

        Raises:
            SchedulerLostError: the scheduler is gone, or was silent for too long.
            SupervisorLostError: the worker that runs the task was silent for too long; Dask
                doesn't run the task again. Or the cluster lost all its workers after the task had
                begun, and got none for too long.
            NotEnoughWorkersError: it has had none for too long since the task was submitted.
        """
        if self._client.status != "running":
            msg = f"the scheduler was lost (the Dask client is {self._client.status})"
            raise SchedulerLostError(msg)
        if self._next_look_s > time.monotonic():
            return
        have_answered = self._client.sync(self._look)
        pause_s = pause_after(self._scheduler.limit_s, have_answered=have_answered)
        self._next_look_s = time.monotonic() + pause_s - CALLED_EVERY_S / 2
        if not self._scheduler.look_left_s():
            msg = f"the scheduler {self._rpc.address} was silent for {self._scheduler.limit_s:g} s"
            raise SchedulerLostError(msg)
        self._raise_if_empty()
        for address, ear in [each for each in self._workers.items() if not each[1].look_left_s()]:
            if address == self._address:
                # Else Dask would run it again by itself, next to the one that is submitted in
                # its place.
                self._client.cancel([self._future], force=True)
            words = "Dask worker %s was silent for %g s and is restarted"
            logger.warning(words, address, ear.limit_s)
            self._client.sync(self._replace, address)
            del self._workers[address]
            if address == self._address:
                silent = f"Dask worker {address} was silent for {ear.limit_s:g} s"
                msg = f"{silent} while it ran the task itself"
                raise SupervisorLostError(msg)

    async def _look(self) -> bool:
        """Look once; return whether a worker has the task and all answered."""
        tasks = await answer_of(self._rpc.processing(workers=None), ANSWER_S)
        if tasks is None:
            return False
        self._tasks = tasks
        address = next((each for each, keys in tasks.items() if self._future.key in keys), None)
        if self._address is not None and address not in (None, self._address):
            words = "Dask lost worker %s and runs its task again, on %s"
            logger.warning(words, self._address, address)
        self._scheduler.heard(has_task=address is not None)
        self._address = address
        self._has_begun = self._has_begun or address is not None
        watched = [each for each in tasks if self._owns_workers or each == address]
        self._workers = {each: self._workers.get(each) or TaskLiveness() for each in watched}
        answered = await asyncio.gather(*map(self._look_at, watched))
        return address is not None and all(answered)

    def _raise_if_empty(self) -> None:
        if self._tasks != {}:
            self._empty = None
            return
        self._empty = self._empty or Liveness(self._workers_timeout_s)
        if not self._empty.look_left_s():
            self._client.cancel([self._future], force=True)
            if self._has_begun:
                lost = "the cluster lost all its workers while the task ran, and has had none since"
                msg = f"{lost}, for {self._workers_timeout_s:g} s (workers_timeout_s)"
                raise SupervisorLostError(msg)
            msg = (
                f"the cluster has had no worker for {self._workers_timeout_s:g} s "
                "(workers_timeout_s); start workers, or give a larger limit if they are queued"
            )
            raise NotEnoughWorkersError(msg)

    def why_not_begun(self, waited_s: float) -> str:
        """Say what the task, which has not begun, waits for; empty where nothing is in its way."""
        if self._tasks == {}:
            has_limit = self._workers_timeout_s < math.inf
            limit = f"limit {self._workers_timeout_s:g} s" if has_limit else "no limit"
            lacks = "the cluster has none yet"
            return f"waiting for workers: {lacks} after {waited_s:.0f} s ({limit})"
        after = f"after {waited_s:.0f} s (no limit)"
        busy = {
            address: others
            for address, keys in (self._tasks or {}).items()
            if self._address in (None, address)
            and (others := [str(key) for key in keys if key != self._future.key])
        }
        named = [f"{at} has {', '.join(keys[:MAX_NAMED])}" for at, keys in busy.items()]
        named[MAX_NAMED:] = [f"and {len(named) - MAX_NAMED} more"] if named[MAX_NAMED:] else []
        return f"waiting for a worker {after}: {'; '.join(named)}" if named else ""

    async def _look_at(self, address: str) -> bool:
        identity = self._rpc.broadcast(msg={"op": "identity"}, workers=[address])
        if await answer_of(identity, ANSWER_S) is None:
            return False
        # If one has the task, it was sent before this was first asked, and has arrived by the
        # second time.
        self._workers[address].heard(has_task=address in self._answered)
        if self._address is not None:
            self._answered.add(address)
        return True

    async def _replace(self, address: str) -> None:
        # Its nanny kills it and starts another; if none answers, Dask forgets the worker.
        restart = self._rpc.restart_workers(
            workers=[address], timeout=RESTART_S, on_error="return", stimulus_id=STIMULUS
        )
        done = await answer_of(restart, RESTART_S)
        if done is None or done.get(address) not in ("OK", "removed"):
            await answer_of(self._rpc.unregister(address=address, stimulus_id=STIMULUS), ANSWER_S)


def pause_after(limit_s: float, *, have_answered: bool) -> float:
    """Return after how many seconds to look again."""
    # Silence counts from the last answer, so a short limit needs more looks.
    return min(LOOK_EVERY_S, limit_s / 10) if have_answered else CALLED_EVERY_S


async def answer_of(call: Awaitable[T], timeout_s: float) -> T | None:
    """Return the answer, or None if there was none in time."""
    with contextlib.suppress(OSError, TimeoutError):
        return await asyncio.wait_for(call, timeout_s)
    return None
