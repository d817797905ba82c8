"""A worker's slot is held by one gang at a time, the most senior waiting one next."""

import threading

from prefect_torch_ddp.gang.worker.slots import Slots
from prefect_torch_ddp.protocol.agent import Reservation, Seniority


def reservation(name: str, born_s: float) -> Reservation:
    """Make a reservation for one worker."""
    return Reservation(
        name,
        name,
        Seniority(born_s, name),
        worker="tcp://a:1",
        process_id="p",
        hosts_store=False,
        stop_grace_s=8.0,
    )


def test_the_senior_waiting_gang_is_next() -> None:
    """Two gangs wait; the one born first gets the slot first, whoever asked first."""
    slots, order, waiting = Slots(), [], threading.Barrier(3)

    def sit(name: str, born_s: float) -> None:
        waiting.wait(5)
        with slots.hold(reservation(name, born_s), lambda: False) as got_it:
            assert got_it
            order.append(name)

    with slots.hold(reservation("first", 1.0), lambda: False):
        threads = [
            threading.Thread(target=sit, args=args) for args in (("young", 3.0), ("old", 2.0))
        ]
        for thread in threads:
            thread.start()
        waiting.wait(5)
        while len(slots._slots["tcp://a:1"].waiting) < 2:
            pass
        occupant = slots.occupant("tcp://a:1")
        assert occupant is not None
        assert occupant.text == "gang 'first'"
    for thread in threads:
        thread.join(5)
    assert order == ["old", "young"]


def test_a_running_gang_waits_for_nobody() -> None:
    """The holder's seniority is shown only while it still collects agents; giving up frees the
    place in the queue."""
    slots, first = Slots(), reservation("first", 1.0)
    with slots.hold(first, lambda: False):
        collecting = slots.occupant("tcp://a:1")
        assert collecting is not None
        assert collecting.seniority == first.seniority
        slots.mark_running(first)
        running = slots.occupant("tcp://a:1")
        assert running is not None
        assert running.seniority is None
        with slots.hold(reservation("second", 2.0), lambda: True) as got_it:
            assert not got_it
    assert slots.occupant("tcp://a:1") is None
