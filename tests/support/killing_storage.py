"""Kills, and a storage whose caller is killed before, in the midst of or after one of its calls.
Free of torch."""

import os
import re
import resource
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from prefect_torch_ddp.storage.protocol import Storage
from tests.support.forwarding import ForwardingStorage

InTraining = Literal[
    "tracked",
    "restoring",
    "begin",
    "micro_batch",
    "backward",
    "end",
    "timer",
    "staging",
    "data_worker",
    "left",
]
InStorage = Literal["read", "write", "write_if_absent", "delete"]
Moment = Literal["before", "torn", "within", "after"]

_PLACING = {"write": ("os.rename",), "write_if_absent": ("os.link",), "delete": ("os.rmdir",)}
"""Python's audit events of the call that makes a finished file an object, and of the one that
follows an object's removal."""


@dataclass(frozen=True)
class Kill:
    """One SIGKILL, at the nth time that a process of one attempt passes a point."""

    attempt: int
    place: InTraining | InStorage
    rank: int | None = None
    """None: the first one that comes by."""
    step: int | None = None
    """In training; None: any."""
    key: str = ""
    """In the storage: what the object's key matches, a regular expression."""
    moment: Moment = "before"
    """In the storage.

    Torn: a part of the file is written; within: the file is whole, and not yet the object.
    """
    nth: int = 1
    delay_s: float = 0.0
    """Of a timer."""


@dataclass(frozen=True)
class WireKill:
    """One SIGKILL of the client whose nth request matches."""

    attempt: int
    method: str
    path: str
    """A regular expression; the path comes with its query."""
    moment: Literal["within", "after"]
    """Within: half of the body was sent, and the server gets none of it.

    After: it is done, and nobody hears of it.
    """
    nth: int = 1


def die(folder: str, attempt: int) -> None:
    """Leave the mark that this attempt's kill was carried out, and kill this process."""
    leave_mark(folder, attempt)
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()  # it takes a moment, and nothing may follow


def leave_mark(folder: str, attempt: int) -> None:
    """Leave the mark, and nothing else."""
    Path(folder, f"killed-{attempt}").touch()


_num_calls: Counter[Kill] = Counter()
_counting = threading.Lock()


def comes_by(kill: Kill) -> bool:
    """Count; return whether it is the kill's turn."""
    if kill.rank is not None and kill.rank != int(os.environ["RANK"]):
        return False
    with _counting:
        _num_calls[kill] += 1
        return _num_calls[kill] == kill.nth


class KillingStorage(ForwardingStorage):
    """A real storage; a rank is killed before, in the midst of or after one of its calls."""

    def __init__(self, inner: Storage, kills: tuple[Kill, ...], folder: str) -> None:
        """Take the kills of the attempt that gets it."""
        super().__init__(inner)
        self.kills, self.folder = kills, folder

    def read(self, key: str) -> bytes:
        with self._killed("read", key):
            return super().read(key)

    def write(self, key: str, data: bytes | memoryview) -> None:
        with self._killed("write", key, data):
            super().write(key, data)

    def write_if_absent(self, key: str, data: bytes) -> bool:
        with self._killed("write_if_absent", key, data):
            return super().write_if_absent(key, data)

    def delete(self, key: str) -> None:
        with self._killed("delete", key):
            super().delete(key)

    def drop_unfinished(self, prefix: str, is_over: Callable[[str], bool]) -> None:
        self.inner.drop_unfinished(prefix, is_over)

    @contextmanager
    def _killed(
        self, operation: InStorage, key: str, data: bytes | memoryview = b""
    ) -> Iterator[None]:
        due = [
            k for k in self.kills if k.place == operation and re.search(k.key, key) and comes_by(k)
        ]
        for kill in due:
            match kill.moment:
                case "before":
                    die(self.folder, kill.attempt)
                case "torn":
                    # The kernel ends the process in the midst of its write.
                    leave_mark(self.folder, kill.attempt)
                    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
                    resource.setrlimit(resource.RLIMIT_FSIZE, (len(data) * 9 // 10, hard))
                case "within":
                    _die_at(_PLACING[operation], self.folder, kill.attempt)
        yield
        for kill in due:
            if kill.moment == "after":
                die(self.folder, kill.attempt)


def _die_at(events: Sequence[str], folder: str, attempt: int) -> None:
    """Have this thread die when the interpreter is about to make a system call."""
    mine = threading.get_ident()

    def hook(event: str, _args: object) -> None:
        if event in events and threading.get_ident() == mine:
            die(folder, attempt)

    sys.addaudithook(hook)
