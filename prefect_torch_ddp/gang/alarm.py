"""Owns the waking of a seat that waits for its ranks and for orders at the same time."""

import contextlib
import socket


class Alarm:
    """Wakes a thread that waits in poll()."""

    def __init__(self) -> None:
        """Open it, quiet."""
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)  # noqa: FBT003 - the standard library takes it by position
        self._writer.setblocking(False)  # noqa: FBT003

    @property
    def fd(self) -> int:
        """What to wait on."""
        return self._reader.fileno()

    def ring(self) -> None:
        """Wake the thread, from any other."""
        with contextlib.suppress(OSError):  # full: it rings already; closed: nobody waits any more
            self._writer.send(b"!")

    def quiet(self) -> None:
        """Be ready to ring again."""
        with contextlib.suppress(BlockingIOError):
            self._reader.recv(64)

    def close(self) -> None:
        """Close both ends."""
        self._reader.close()
        self._writer.close()
