"""A worker's slot is held by one gang at a time, the most senior waiting one next."""

import threading

from prefect_torch_ddp.gang.worker.slots import Slots
from prefect_torch_ddp.protocol.messages import Occupant, Reservation, Seniority
from tests.support.waiting import wait_until

WORKER = "tcp://a:1"


def reservation(name: str, born_s: float) -> Reservation:
    """Make a reservation for one worker."""
    limits = {"stop_grace_s": 8.0, "liveness_timeout_s": 60.0}
    return Reservation(name, name, Seniority(born_s, name), WORKER, "p", store_host=None, **limits)


def test_the_senior_waiting_gang_is_next() -> None:
    """Two gangs wait; the one born first gets the slot first, whoever asked first."""
    slots, order = Slots(), []

    def take(name: str, born_s: float) -> None:
        with slots.hold(reservation(name, born_s), lambda: False) as got_it:
            assert got_it
            order.append(name)

    threads = [threading.Thread(target=take, args=args) for args in (("young", 3.0), ("old", 2.0))]
    with slots.hold(reservation("first", 1.0), lambda: False):
        for thread in threads:
            thread.start()
        wait_until(lambda: len(slots._slots[WORKER].waiting) == 2)
    for thread in threads:
        thread.join()
    assert order == ["old", "young"]


def test_a_running_gang_waits_for_nobody() -> None:
    """The holder's seniority shows while it still collects agents; who gives up frees its place."""
    slots, first = Slots(), reservation("first", 1.0)
    with slots.hold(first, lambda: False):
        assert slots.occupant(WORKER) == Occupant("gang 'first'", first.seniority)
        slots.mark_running(first)
        assert slots.occupant(WORKER) == Occupant("gang 'first'", None)
        assert slots.occupant(WORKER, except_token="first") is None
        with slots.hold(reservation("second", 2.0), lambda: True) as got_it:
            assert not got_it
    assert slots.occupant(WORKER) is None
