"""SIGTERM during a rank's loop: it stops the training in order, as on a preempted machine."""

import os
import signal
import threading
from types import FrameType


class Termination:
    """Notes SIGTERM while it is in force; never where the user has a handler of his own."""

    def __init__(self) -> None:
        """Start without a note."""
        self.requested = False
        self._pid = os.getpid()
        self._installed = False

    def install(self) -> None:
        """Take SIGTERM over, in the main thread and from the default action only."""
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and not self._installed and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._note)
            self._installed = True

    def remove(self) -> None:
        """Give the default action back."""
        if self._installed and signal.getsignal(signal.SIGTERM) == self._note:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._installed = False

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() == self._pid:
            self.requested = True
            return
        # A child that the rank forked, such as a DataLoader worker, which this signal is to end.
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
