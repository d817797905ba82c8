"""What a Dask worker and its fork server say to each other, as JSON over a socket pair.

A fork order's file descriptors, `RankFiles.sent()`, come along by SCM_RIGHTS.
"""

import json
from dataclasses import asdict, dataclass
from typing import Literal, Self


class _Message:
    def encode(self) -> bytes:
        """Return it as one packet."""
        return json.dumps(asdict(self)).encode()  # type: ignore[call-overload]  # a dataclass

    @classmethod
    def decode(cls, packet: bytes) -> Self:
        """Read a packet."""
        return cls(**json.loads(packet))


@dataclass(frozen=True)
class ForkServerOrder(_Message):
    """The worker's order."""

    op: Literal["fork", "reap"]
    pid: int = 0
    """Whom to reap."""


@dataclass(frozen=True)
class ForkServerAnswer(_Message):
    """The fork server's answer to an order, and its first word when it is ready."""

    pid: int = 0
    """The rank that was forked; 0 where none was."""
    status: int = 0
    """How a reaped rank ended: its exit code, or the negated number of the signal."""
    unfit: str | None = None
    """Why forking is not safe; None where it is."""
