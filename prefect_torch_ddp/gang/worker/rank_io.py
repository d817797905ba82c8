"""Owns what Python's multiprocessing leaves in the file system when a rank is killed, and its
removal.

DataLoader workers share memory through sockets in a temporary folder, and spawned ones through
named semaphores. Whoever made them removes them at his exit, which a killed process has not.

Owns the cutting of a rank's output into lines as they are finished.

Owns the agent's side of a rank's heartbeat: the page in shared memory, and the stacks behind
it, read without asking the rank.

Owns the socket that the ranks of a gang meet at.
"""

import codecs
import contextlib
import os
import re
import secrets
import shutil
import socket
import tempfile
from collections import deque
from pathlib import Path
from typing import IO

from prefect_torch_ddp.errors import GangError
from prefect_torch_ddp.protocol.heartbeat import PAGE_BYTES, Heartbeat

SEMAPHORES = Path("/dev/shm")  # noqa: S108 - where Linux keeps them: sem_overview(7)


class Leftovers:
    """A place and a name for what the processes of one rank make, given to it before it makes
    any.
    """

    def __init__(self) -> None:
        """Choose them; nothing is made."""
        name = f"ddp-{secrets.token_hex(5)}"  # short: a socket's path in the folder has room for some 100 characters
        self.folder = Path(tempfile.gettempdir(), name)

    def remove(self) -> None:
        """Remove all there is; nobody uses it any more."""
        shutil.rmtree(self.folder, ignore_errors=True)
        for path in SEMAPHORES.glob(f"sem.{self.folder.name}-*"):
            with contextlib.suppress(OSError):  # another user's
                path.unlink()


MAX_LINE = 8_192
"""A line longer than this many characters is passed on in pieces, so that output without line
ends can't fill memory."""
TAIL_LINES = 20


class LineCutter:
    """Turns chunks of bytes into lines; a carriage return ends a line too (progress bars)."""

    def __init__(self) -> None:
        """Start with nothing pending."""
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._pending = ""
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)

    def feed(self, chunk: bytes, *, final: bool = False) -> list[str]:
        """Return the lines that this chunk finishes; with `final` also an unfinished last
        one.
        """
        self._pending += self._decoder.decode(chunk, final)
        *lines, self._pending = re.split(r"\r\n|\r|\n", self._pending)
        while len(self._pending) > MAX_LINE:
            lines.append(self._pending[:MAX_LINE])
            self._pending = self._pending[MAX_LINE:]
        if final and self._pending:
            lines.append(self._pending)
            self._pending = ""
        lines = [line for line in lines if line.strip()]
        self.tail.extend(lines)
        return lines


MAX_STACKS_BYTES = 65_536
"""Of stacks that are longer the end is kept, where the main thread is."""


class HeartbeatPage:
    """The file that a rank maps.

    Read, not mapped: a rank that cut its file short could not hurt the worker.
    """

    def __init__(self) -> None:
        """Make it, in memory where the system can: on a disk that is busy its writer would
        wait.
        """
        self._file: IO[bytes]
        if hasattr(os, "memfd_create"):
            self._file = os.fdopen(
                os.memfd_create("prefect-torch-ddp-heartbeat", os.MFD_CLOEXEC), "r+b", 0
            )
        else:
            self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - closed by our own close
        self._file.truncate(PAGE_BYTES)

    def fileno(self) -> int:
        """Return the file descriptor that the rank inherits."""
        return self._file.fileno()

    def read(self) -> Heartbeat:
        """Return what the rank marked last."""
        return Heartbeat.from_page(os.pread(self.fileno(), PAGE_BYTES, 0).ljust(PAGE_BYTES, b"\0"))

    def stacks_end(self) -> int:
        """Return where the stacks written so far end."""
        return os.fstat(self.fileno()).st_size

    def stacks(self, begin: int) -> str:
        """Return the stacks written from there on."""
        end = self.stacks_end()
        begin = max(begin, end - MAX_STACKS_BYTES)
        return os.pread(self.fileno(), end - begin, begin).decode(errors="replace")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def listen(host: str) -> socket.socket:
    """Listen at a free port of one address, IPv4 or IPv6, and at no other interface.

    Raises:
        GangError: the address isn't this machine's, or can't be resolved.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _refusal(host, error) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise _refusal(host, error) from error
    return listener


def _refusal(host: str, error: OSError) -> GangError:
    msg = (
        f"rank 0's worker can't listen at {host}, by which Dask knows it: {error}. Behind --contact-address or NAT name a "
        f"network that all workers are on: run_gang(..., interface=...)"
    )
    return GangError(msg)
