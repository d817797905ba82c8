"""What an agent and a rank share: files, pipes, sockets, the heartbeat page, a scratch folder."""

import codecs
import contextlib
import fcntl
import itertools
import os
import secrets
import shutil
import socket
import tempfile
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from prefect_torch_ddp.errors import GangError
from prefect_torch_ddp.protocol.events import MAX_DATAGRAM_BYTES
from prefect_torch_ddp.protocol.heartbeat import PAGE_BYTES, Heartbeat
from prefect_torch_ddp.protocol.rank import ProcessGroupMode, RankFiles, RankOrder

SEMAPHORES = Path("/dev/shm")  # noqa: S108 - where Linux keeps them: sem_overview(7)
CHUNK_BYTES = 65_536
PIPE_BYTES = 2**18
"""Room for what a rank prints while its agent is busy; what any user may have on Linux."""
MAX_MESSAGES = 1_000
MAX_LINE = 8_192
"""Longer lines, in characters, are passed on in pieces: endless ones can't fill memory."""
TAIL_LINES = 20
MAX_STACKS_BYTES = 65_536
"""Of longer stacks the end is kept, where the main thread is."""


class RankIO:
    """The agent's ends of a rank's pipes and files, and a scratch folder for the rank."""

    def __init__(self) -> None:
        """Open both ends of everything; the rank's are in `files`, with no store."""
        # Short: a socket's path in the folder has room for some 100 characters.
        self.scratch = Path(tempfile.gettempdir(), f"ddp-{secrets.token_hex(5)}")
        """The rank makes it: multiprocessing's sockets, and a name for its semaphores."""
        self._ours, self._theirs = contextlib.ExitStack(), contextlib.ExitStack()
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            self.launch: IO[bytes] = self._theirs.enter_context(tempfile.TemporaryFile())
            self._outcome: IO[bytes] = self._ours.enter_context(tempfile.TemporaryFile())
            self.page = self._ours.enter_context(contextlib.closing(HeartbeatPage()))
            # Datagrams: a message stays whole when forked children of the rank write as well.
            self._events, events = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._ours.enter_context(self._events)
            os.set_blocking(self._events.fileno(), False)
            self._theirs.enter_context(events)
            events.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**20)
            control, self._control = self._open_pipe(self._theirs, self._ours)
            os.set_blocking(self._control.fileno(), False)
            out, stdout = self._open_pipe(self._ours, self._theirs)
            err, stderr = self._open_pipe(self._ours, self._theirs)
            for pipe in (stdout, stderr):
                with contextlib.suppress(OSError):  # this user's pipes have as much as they may
                    fcntl.fcntl(pipe.fileno(), fcntl.F_SETPIPE_SZ, PIPE_BYTES)
            self._out, self._err = _Output(out), _Output(err)
            self.files = RankFiles(
                launch=self.launch.fileno(),
                events=events.fileno(),
                outcome=self._outcome.fileno(),
                control=control.fileno(),
                heartbeat=self.page.fileno(),
                stdout=stdout.fileno(),
                stderr=stderr.fileno(),
            )
            undo.pop_all()

    @staticmethod
    def _open_pipe(
        reader: contextlib.ExitStack, writer: contextlib.ExitStack
    ) -> tuple[IO[bytes], IO[bytes]]:
        read, write = os.pipe()
        return (
            reader.enter_context(os.fdopen(read, "rb", 0)),
            writer.enter_context(os.fdopen(write, "wb", 0)),
        )

    def close_rank_ends(self) -> None:
        """Close the rank's ends: it has its own by now, or didn't start."""
        self._theirs.close()

    def readable(self) -> list[int]:
        """Return the file descriptors of the rank's output and events."""
        pipes = [output.pipe for output in (self._out, self._err) if not output.pipe.closed]
        return [self._events.fileno(), *(pipe.fileno() for pipe in pipes)]

    def lines(self, *, max_chunks: int = 1) -> Iterator[list[str]]:
        """Yield the lines printed so far, by chunk, from so many of stdout and of stderr."""
        for output in (self._out, self._err):
            yield from output.lines(max_chunks)

    def messages(self, *, whole: bool = False) -> Iterator[bytes]:
        """Yield the messages sent so far, of a flood only some: other ranks have theirs.

        The `whole` rest of a dead rank has its outcome, last.
        """
        with contextlib.suppress(BlockingIOError):
            for _ in itertools.count() if whole else range(MAX_MESSAGES):
                yield self._events.recv(MAX_DATAGRAM_BYTES)

    @property
    def stderr_tail(self) -> tuple[str, ...]:
        """The last lines of stderr."""
        return tuple(self._err.cutter.tail)

    def outcome(self) -> bytes:
        """Return the pickle that the rank left."""
        self._outcome.seek(0)
        return self._outcome.read()

    def tell(self, order: RankOrder) -> None:
        """Write an order to the rank; one that is gone needs none."""
        # The pipe is full if the rank was stopped for hours.
        with contextlib.suppress(BrokenPipeError, BlockingIOError):
            os.write(self._control.fileno(), order.value)

    def close(self) -> None:
        """Close everything, and remove what killed processes of the rank left behind."""
        self._theirs.close()
        self._ours.close()
        shutil.rmtree(self.scratch, ignore_errors=True)
        for path in SEMAPHORES.glob(f"sem.{self.scratch.name}-*"):
            with contextlib.suppress(OSError):  # another user's
                path.unlink()


class _Output:
    def __init__(self, pipe: IO[bytes]) -> None:
        self.pipe = pipe
        os.set_blocking(pipe.fileno(), False)
        self.cutter = LineCutter()

    def lines(self, max_chunks: int) -> Iterator[list[str]]:
        for _ in range(max_chunks):
            chunk = None if self.pipe.closed else self.pipe.read(CHUNK_BYTES)
            if chunk is None:  # there is nothing yet
                return
            yield self.cutter.feed(chunk, final=not chunk)
            if not chunk:
                self.pipe.close()


class LineCutter:
    """Turns chunks of bytes into lines, each as a terminal shows it at its end.

    A carriage return begins the line again: a progress bar is one line, not one for each update.
    """

    def __init__(self) -> None:
        """Start with nothing pending."""
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._pending = ""
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)

    def feed(self, chunk: bytes, *, final: bool = False) -> list[str]:
        """Return the lines that this chunk finishes; if `final`, an unfinished last one too."""
        self._pending += self._decoder.decode(chunk, final)
        *lines, pending = self._pending.split("\n")
        if "\r" in self._pending:
            shown = (line.rstrip("\r").rpartition("\r")[2] for line in (*lines, pending))
            *lines, pending = shown
        # The end of the chunk may be in the midst of "\r\n".
        self._pending = pending + "\r" * self._pending.endswith("\r")
        while len(self._pending) > MAX_LINE or (final and self._pending):
            lines.append(self._pending[:MAX_LINE])
            self._pending = self._pending[MAX_LINE:]
        lines = [line.rstrip("\r") for line in lines if line.strip()]
        self.tail.extend(lines)
        return lines


class HeartbeatPage:
    """The file that a rank maps; read here, not mapped: a rank could cut it short."""

    def __init__(self) -> None:
        """Make it in memory: on a busy disk its writer would wait."""
        fd = os.memfd_create("prefect-torch-ddp-heartbeat", os.MFD_CLOEXEC)
        self._file = os.fdopen(fd, "r+b", 0)
        self.clear_stacks()

    def fileno(self) -> int:
        """Return the file descriptor that the rank inherits."""
        return self._file.fileno()

    def read(self) -> Heartbeat:
        """Return what the rank marked last."""
        return Heartbeat.from_page(os.pread(self.fileno(), PAGE_BYTES, 0).ljust(PAGE_BYTES, b"\0"))

    def clear_stacks(self) -> None:
        """Remove the stacks written so far, and have the rank write the next ones in their place.

        Its descriptor shares the position of this one.
        """
        self._file.truncate(PAGE_BYTES)
        self._file.seek(PAGE_BYTES)

    def stacks_bytes(self) -> int:
        """Return how much of stacks was written so far."""
        return max(0, os.fstat(self.fileno()).st_size - PAGE_BYTES)

    def stacks(self) -> str:
        """Return the stacks written so far."""
        num_bytes = self.stacks_bytes()
        begin = PAGE_BYTES + max(0, num_bytes - MAX_STACKS_BYTES)
        return os.pread(self.fileno(), num_bytes, begin).decode(errors="replace")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class StoreSocket:
    """Listens at a free port of one address, IPv4 or IPv6, and at no other interface."""

    def __init__(self, host: str) -> None:
        """Open it; raises GangError if the address isn't this machine's."""
        with contextlib.ExitStack() as undo:
            # torch's own store listens at every address, so the number must be free at each, not
            # only at this one. A socket that is bound but doesn't listen keeps others from
            # getting it, and SO_REUSEADDR on both sides lets rank 0 bind it all the same.
            self._hold = undo.enter_context(_bind_everywhere())
            try:
                infos = socket.getaddrinfo(host, self.port, type=socket.SOCK_STREAM)
                self._socket = undo.enter_context(_bind(infos[0][0], infos[0][4]))
                self._socket.listen(1024)
            except OSError as error:
                msg = (
                    f"rank 0's worker can't listen at {host}, by which Dask knows it: {error}. "
                    "Behind --contact-address or NAT name a network that all workers are on: "
                    "run_gang(..., interface=...)"
                )
                raise GangError(msg) from error
            undo.pop_all()

    @property
    def port(self) -> int:
        """The port where the ranks' store will be."""
        return int(self._hold.getsockname()[1])

    def fd_for_rank_0(self, mode: ProcessGroupMode) -> int | None:
        """Return what rank 0 inherits; in the user mode it listens at the port itself."""
        if mode != "user":
            return self._socket.fileno()
        self._socket.close()
        return None

    def close(self) -> None:
        """Close this process's copies."""
        self._socket.close()
        self._hold.close()


def _bind_everywhere() -> socket.socket:
    """Bind a free port of all addresses, IPv4 and IPv6 as far as this machine has both."""
    if socket.has_dualstack_ipv6():
        return _bind(socket.AF_INET6, ("::", 0), both=True)
    return _bind(socket.AF_INET, ("0.0.0.0", 0))  # noqa: S104 - it doesn't listen


def _bind(family: int, address: object, *, both: bool = False) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        if both:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)  # type: ignore[arg-type]
    except OSError:
        bound.close()
        raise
    return bound
