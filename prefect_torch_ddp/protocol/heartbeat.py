"""The page of shared memory in which a rank leaves its heartbeat for its agent to read."""

import signal
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Self


class Phase(IntEnum):
    """What a rank is doing."""

    NONE = 0
    """Its process isn't ready yet, and can't write its stack."""
    STARTING = 1
    """It loads, and joins the rendezvous."""
    FUNCTION = 2
    """In a plain function."""
    SETUP = 3
    """In a function with a RankContext, outside of `steps`."""
    RESTORING = 4
    LOADING = 5
    """Waits for its next batch."""
    STEP = 6
    """In the body of `steps`."""
    EPOCH_END = 7
    """In the body of an epoch's last step, where people validate."""
    COMPILING = 8
    STEP_END = 9
    """After the body: agrees with the others."""
    SAVING = 10
    RETURNED = 11
    """Its function has returned; its threads may still work."""
    ENDED = 12
    """It has failed, run its exit handlers and written its files; it waits to be killed."""


# Words of 8 bytes in this machine's own order: each is written by one store, so a reader sees
# the old or the new one.
MOVED_NS, STEP, EPOCH, SEQ, PHASE, LISTENS, ARMED, USES_GPU = range(8)
_PAGE = struct.Struct("=8q")
PAGE_BYTES = 4096
"""Stacks of the rank follow in the same file, from here on."""
LOOK_SIGNAL: int = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
"""Has a rank write its stacks if it did not obey the order; one that no library is known to use."""


@dataclass(frozen=True)
class Heartbeat:
    """A rank's page as it was when it was read."""

    moved_ns: int = 0
    """CLOCK_MONOTONIC of its machine at its last progress."""
    step: int = 0
    """The step under way, or the last one; 0 before the first."""
    epoch: int = 0
    seq: int = 0
    """Collectives it has begun on the default process group; up to a second old."""
    phase: Phase = Phase.NONE
    listens: bool = False
    """Whether it has begun `steps`, and obeys an order to stop: from then on it can save."""
    armed: bool = False
    """Whether it has shown that it makes progress: entered `steps`, or reported."""
    uses_gpu: bool = False
    """Whether it has initialized CUDA: work may continue there while all its threads wait."""

    @classmethod
    def from_page(cls, page: bytes) -> Self:
        """Read it."""
        moved_ns, step, epoch, seq, phase, *marks = _PAGE.unpack_from(page)
        return cls(moved_ns, step, epoch, seq, Phase(phase), *map(bool, marks))
