"""Owns the threads that do many small waits at once: started when they are needed, gone after
some idle seconds.
"""

import os
import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from prefect_torch_ddp.errors import StorageError

S = TypeVar("S")
T = TypeVar("T")
V = TypeVar("V")

IDLE_S = 5.0


class FanOut(Generic[S, T, V]):
    """Call a function for many items on a few threads, each of which has a thing of its own,
    such as a connection.

    Calls from several threads share the threads; the items of the earlier call go first. An
    object that crossed a fork refuses: its threads live in the other process.
    """

    def __init__(
        self, num_threads: int, open_own: Callable[[], S], close_own: Callable[[S], None]
    ) -> None:
        """Start nothing yet.

        Args:
            num_threads: at most.
            open_own: makes what a thread keeps for itself.
            close_own: ends it, as its thread ends.
        """
        self._num_most = num_threads
        self._open_own = open_own
        self._close_own = close_own
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._turns: SimpleQueue[_Call[S, T, V]] = SimpleQueue()
        self._num_threads = 0
        self._num_turns = 0
        """Waiting or under way."""

    def map(self, function: Callable[[S, T], V], items: Sequence[T]) -> list[V]:
        """Return the function's values in order.

        What it raises is raised here, after the others have stopped.
        """
        if os.getpid() != self._process:
            msg = f"a client of process {self._process} is used in process {os.getpid()}: make one after the fork"
            raise StorageError(msg)
        if not items:
            return []
        call = _Call(function, items)
        with self._lock:
            num_turns = min(len(items), self._num_most)
            self._num_turns += num_turns
            call.num_turns = num_turns
            for _ in range(num_turns):
                self._turns.put(call)
            while self._num_threads < min(self._num_turns, self._num_most):
                self._start()
        return call.wait()

    def _start(self) -> None:
        # Daemons: one that waits for a server must not keep Python from ending.
        threading.Thread(target=self._work, name="ptd-read", daemon=True).start()
        self._num_threads += 1

    def _work(self) -> None:
        own = self._open_own()
        try:
            while (call := self._next_call()) is not None:
                call.take_turn(own)
                del call  # or an idle thread would keep the last batch's content in memory
                with self._lock:
                    self._num_turns -= 1
        finally:
            self._close_own(own)

    def _next_call(self) -> "_Call[S, T, V] | None":
        while True:
            try:
                return self._turns.get(timeout=IDLE_S)
            except Empty:
                with self._lock:
                    if self._turns.empty():  # nobody can put one while the lock is held
                        self._num_threads -= 1
                        return None


class _Call(Generic[S, T, V]):
    """One call of `map`: its items, of which each thread takes the next one until there is
    none.
    """

    def __init__(self, function: Callable[[S, T], V], items: Sequence[T]) -> None:
        self.num_turns = 0
        self._function = function
        self._items = items
        self._values: dict[int, V] = {}
        self._rest = iter(range(len(items)))
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._done = threading.Event()

    def take_turn(self, own: S) -> None:
        """Work until no item is left."""
        try:
            while (
                index := next(self._rest, None)
            ) is not None:  # one step for the interpreter: no two threads get the same
                self._values[index] = self._function(own, self._items[index])
        except BaseException as error:  # noqa: BLE001 - it belongs to the caller
            self._error = error
            self._rest = iter(range(0))
        with self._lock:
            self.num_turns -= 1
            if not self.num_turns:
                self._done.set()

    def wait(self) -> list[V]:
        """Wait for all turns."""
        try:
            self._done.wait()
        finally:
            self._rest = iter(range(0))  # a caller that is interrupted leaves no work behind
        if self._error is not None:
            raise self._error
        return [self._values[index] for index in range(len(self._items))]
