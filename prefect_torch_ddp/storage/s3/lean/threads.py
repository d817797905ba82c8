"""Daemon threads for many short waits at once; they end after some idle seconds."""

import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any, TypeVar, cast

T = TypeVar("T")
V = TypeVar("V")

IDLE_S = 5.0


class Threads:
    """At most `num_most` threads of this process, started when they are needed.

    Unlike an executor's they are daemons: one that waits for a server doesn't keep Python from
    ending. Callers may share them; the items of the earlier call go first.
    """

    def __init__(self, num_most: int) -> None:
        self._num_most = num_most
        self._lock = threading.Lock()
        self._turns: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._num_threads = 0
        self._num_turns = 0
        """Waiting or under way."""

    def map(self, function: Callable[[T], V], items: Sequence[T]) -> list[V]:
        """Return the function's values in order; raise what it raised when all threads are done."""
        values: list[Any] = [None] * len(items)
        rest = iter(range(len(items)))
        ended: SimpleQueue[BaseException | None] = SimpleQueue()

        def take_turn() -> None:
            nonlocal rest
            try:
                # next() is one step for the interpreter: no two threads get the same.
                while (index := next(rest, None)) is not None:
                    values[index] = function(items[index])
            except BaseException as error:  # noqa: BLE001 - it belongs to the caller
                rest = iter(range(0))
                ended.put(error)
            else:
                ended.put(None)

        num_turns = self._start(take_turn, len(items))
        try:
            errors = [ended.get() for _ in range(num_turns)]
        finally:
            rest = iter(range(0))  # a caller that is interrupted leaves no work behind
        for error in filter(None, errors):
            raise error
        return cast("list[V]", values)

    def _start(self, turn: Callable[[], None], num_items: int) -> int:
        num_turns = min(num_items, self._num_most)
        with self._lock:
            self._num_turns += num_turns
            for _ in range(num_turns):
                self._turns.put(turn)
            while self._num_threads < min(self._num_turns, self._num_most):
                threading.Thread(target=self._serve, name="ptd-read", daemon=True).start()
                self._num_threads += 1
        return num_turns

    def _serve(self) -> None:
        while (turn := self._next_turn()) is not None:
            turn()
            del turn  # or an idle thread would keep the last batch's content in memory
            with self._lock:
                self._num_turns -= 1

    def _next_turn(self) -> Callable[[], None] | None:
        while True:
            try:
                return self._turns.get(timeout=IDLE_S)
            except Empty:
                with self._lock:
                    if self._turns.empty():  # nobody can put one while the lock is held
                        self._num_threads -= 1
                        return None
