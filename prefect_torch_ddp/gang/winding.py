"""Owns the winding down of a seat's ranks: those that listen get time to stop at an agreed step and to write a checkpoint."""

import time
from collections.abc import Sequence

from prefect_torch_ddp.gang.rank_process import RankProcess

PEERS_GRACE_S = 0.5
"""How long ranks that have returned stay for the last reads of peers on other workers."""


class WindDown:
    """Begins when it is first asked."""

    def __init__(self, grace_s: float) -> None:
        """Give the ranks so many seconds."""
        self._grace_s = grace_s
        self._began_s: float | None = None
        self._returned_s: float | None = None
        self._is_worth_it = False

    def is_over(self, ranks: Sequence[RankProcess], *, leave_when_returned: bool) -> bool:
        """Tell whether the ranks are to be killed now: none listens, their time is up, or they all have returned.

        Args:
            ranks: those of this seat.
            leave_when_returned: whether nobody else will tell ranks that returned to leave.
        """
        now = time.monotonic()
        if self._began_s is None:
            self._began_s = now
            self._is_worth_it = any(rank.listens for rank in ranks)
            for rank in ranks if self._is_worth_it else ():
                rank.tell(b"S")
        if leave_when_returned and all(rank.is_settled for rank in ranks):
            self._returned_s = self._returned_s or now
            return now - self._returned_s > PEERS_GRACE_S
        return not self._is_worth_it or now - self._began_s > self._grace_s
