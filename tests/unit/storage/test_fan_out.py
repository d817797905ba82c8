"""The threads that read many objects: order, errors, sharing, forks, and their end."""

import multiprocessing
import threading

import pytest

from prefect_torch_ddp.errors import StorageError
from prefect_torch_ddp.storage import fan_out
from prefect_torch_ddp.storage.fan_out import FanOut


def double(_, item):
    """Work."""
    return 2 * item


def make(num_threads=4, closed=None):
    """Make one whose threads own a list."""
    return FanOut(num_threads, list, (closed if closed is not None else []).append)


def test_values_come_in_the_items_order():
    """However many threads and items there are."""
    fan = make()
    for num in (0, 1, 3, 4, 100):
        assert fan.map(double, range(num)) == [2 * item for item in range(num)]


def test_as_many_items_are_under_way_as_there_are_threads():
    """Each waits for the others: with one thread less it would wait for ever."""
    barrier = threading.Barrier(4, timeout=60)
    make().map(lambda _own, _item: barrier.wait(), range(8))


def test_calls_from_two_threads_are_under_way_together():
    """A single item of one caller doesn't wait for the single item of another."""
    fan, barrier = make(), threading.Barrier(2, timeout=60)
    other = threading.Thread(target=fan.map, args=(lambda _own, _item: barrier.wait(), [0]))
    other.start()
    fan.map(lambda _own, _item: barrier.wait(), [0])
    other.join()


def test_what_the_function_raises_is_raised_at_the_caller_and_the_threads_stay_usable():
    """The rest of that call is left out."""
    fan, seen = make(1), []

    def fail(_, item):
        seen.append(item)
        raise KeyError(item)

    with pytest.raises(KeyError):
        fan.map(fail, range(100))
    assert seen == [0]
    assert fan.map(double, [4]) == [8]


def test_idle_threads_end_and_close_what_they_own(monkeypatch):
    """And the next call starts new ones."""
    monkeypatch.setattr(fan_out, "IDLE_S", 0.05)
    closed = []
    fan, before = make(3, closed), set(threading.enumerate())
    barrier = threading.Barrier(3, timeout=60)
    fan.map(lambda _own, _item: barrier.wait(), range(3))
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
    assert closed == [[], [], []]
    assert fan.map(double, [1, 2]) == [2, 4]


def _use(fan, answers):
    try:
        answers.put(fan.map(double, [1]))
    except StorageError as error:
        answers.put(str(error))


def test_one_that_crossed_a_fork_refuses():
    """Its threads live in the parent: without the refusal the child would wait for ever."""
    fan = make()
    assert fan.map(double, [1]) == [2]
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    child = context.Process(target=_use, args=(fan, answers))
    child.start()
    assert "make one after the fork" in answers.get(timeout=60)
    child.join()
