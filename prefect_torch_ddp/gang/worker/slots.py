"""Owns the slot of each Dask worker of this process: one gang at a time sits on it, the most
senior waiting one next.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from prefect_torch_ddp.protocol.agent import Occupant, Reservation

POLL_S = 0.1


@dataclass
class _Slot:
    holder: Reservation | None = None
    running: bool = False
    waiting: list[Reservation] = field(default_factory=list)


class Slots:
    """The slots by worker address. Safe between threads."""

    def __init__(self) -> None:
        """Start empty."""
        self._slots: dict[str, _Slot] = {}
        self._changed = threading.Condition()

    @contextmanager
    def hold(self, reservation: Reservation, gave_up: Callable[[], bool]) -> Iterator[bool]:
        """Wait for the worker's slot and hold it; yields False when `gave_up` became true
        before it was free.
        """
        with self._changed:
            slot = self._slots.setdefault(reservation.worker, _Slot())
            slot.waiting.append(reservation)
            while (
                slot.holder is not None
                or min(slot.waiting, key=lambda t: t.seniority) is not reservation
            ):
                if gave_up():
                    break
                self._changed.wait(POLL_S)
            slot.waiting.remove(reservation)
            got_it = slot.holder is None and not gave_up()
            if got_it:
                slot.holder, slot.running = reservation, False
            self._changed.notify_all()
        try:
            yield got_it
        finally:
            with self._changed:
                if slot.holder is reservation:
                    slot.holder, slot.running = None, False
                self._changed.notify_all()

    def mark_running(self, reservation: Reservation) -> None:
        """Note that the gang has all its agents: it waits for nobody any more."""
        with self._changed:
            self._slots[reservation.worker].running = True

    def occupant(self, worker: str, except_token: str = "") -> Occupant | None:
        """Tell who holds the worker's slot, other than the one asking."""
        slot = self._slots.get(worker)
        if slot is None or slot.holder is None or slot.holder.token == except_token:
            return None
        holder = slot.holder
        return Occupant(f"gang {holder.gang_name!r}", None if slot.running else holder.seniority)


SLOTS = Slots()
