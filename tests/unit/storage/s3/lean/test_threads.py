"""The threads that read many objects: order, errors, sharing, and their end."""

import threading

import pytest

from prefect_torch_ddp.storage.s3.lean import threads
from prefect_torch_ddp.storage.s3.lean.threads import Threads


def test_values_come_in_the_items_order() -> None:
    """However many threads and items there are."""
    pool = Threads(4)
    for num in (0, 1, 3, 4, 100):
        assert pool.map(lambda item: 2 * item, range(num)) == [2 * item for item in range(num)]


def test_as_many_items_are_under_way_as_there_are_threads() -> None:
    """Each waits for the others: with one thread less it would wait for ever."""
    barrier = threading.Barrier(4, timeout=60)
    Threads(4).map(lambda _: barrier.wait(), range(8))


def test_calls_from_two_threads_are_under_way_together() -> None:
    """A single item of one caller doesn't wait for the single item of another."""
    pool, barrier = Threads(4), threading.Barrier(2, timeout=60)
    other = threading.Thread(target=pool.map, args=(lambda _: barrier.wait(), [0]))
    other.start()
    pool.map(lambda _: barrier.wait(), [0])
    other.join()


def test_what_the_function_raises_is_raised_at_the_caller() -> None:
    """The rest of that call is left out, and the threads stay usable."""
    pool, seen = Threads(1), []

    def fail(item: int) -> None:
        seen.append(item)
        raise KeyError(item)

    with pytest.raises(KeyError):
        pool.map(fail, range(100))
    assert seen == [0]
    assert pool.map(str, [4]) == ["4"]


def test_idle_threads_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the next call starts new ones."""
    monkeypatch.setattr(threads, "IDLE_S", 0.05)
    pool, before, barrier = Threads(3), set(threading.enumerate()), threading.Barrier(3, timeout=60)
    pool.map(lambda _: barrier.wait(), range(3))
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
    assert set(threading.enumerate()) <= before
    assert pool.map(str, [1, 2]) == ["1", "2"]
