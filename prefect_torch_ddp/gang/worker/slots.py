"""The slots of the Dask workers in this process: one gang at a time, the most senior one next."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from prefect_torch_ddp.protocol.messages import Occupant, Reservation

POLL_S = 0.1


@dataclass
class _Slot:
    holder: Reservation | None = None
    is_running: bool = False
    waiting: list[Reservation] = field(default_factory=list)

    def is_next(self, reservation: Reservation) -> bool:
        return self.holder is None and reservation is min(
            self.waiting, key=lambda waiting: waiting.seniority
        )


class Slots:
    """The slots by worker address. Safe between threads."""

    def __init__(self) -> None:
        """Start empty."""
        self._slots: dict[str, _Slot] = {}
        self._changed = threading.Condition()

    @contextmanager
    def hold(self, reservation: Reservation, gave_up: Callable[[], bool]) -> Iterator[bool]:
        """Wait for the worker's slot and hold it; yields False if `gave_up` came true before."""
        with self._changed:
            slot = self._slots.setdefault(reservation.worker, _Slot())
            slot.waiting.append(reservation)
            while not slot.is_next(reservation) and not gave_up():
                self._changed.wait(POLL_S)
            slot.waiting.remove(reservation)
            got_it = slot.holder is None and not gave_up()
            if got_it:
                slot.holder, slot.is_running = reservation, False
            self._changed.notify_all()
        try:
            yield got_it
        finally:
            with self._changed:
                if slot.holder is reservation:
                    slot.holder = None
                self._changed.notify_all()

    def mark_running(self, reservation: Reservation) -> None:
        """Note that the gang has all its agents, and no longer waits for other gangs."""
        with self._changed:
            self._slots[reservation.worker].is_running = True

    def occupant(self, worker: str, except_token: str = "") -> Occupant | None:
        """Return who holds the worker's slot, other than the one asking."""
        slot = self._slots.get(worker)
        if slot is None or slot.holder is None or slot.holder.token == except_token:
            return None
        seniority = None if slot.is_running else slot.holder.seniority
        return Occupant(f"gang {slot.holder.gang_name!r}", seniority)


SLOTS = Slots()
