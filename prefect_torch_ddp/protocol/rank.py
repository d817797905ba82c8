"""Owns the small frozen values that cross between the caller, the Dask workers and the rank
processes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

ProcessGroupMode = Literal["default", "user", "none"]
Backend = Literal["auto", "gloo", "nccl"]
Launcher = Literal["auto", "exec"]
Retryability = Literal["open", "hopeless", "transient"]
"""What a failure says about another attempt: it may end the same way, it is bound to, or it has
nothing to do with the code."""
StoppedBy = Literal["order", "SIGTERM", "peer"]
"""Why a rank wanted to stop: its agent told it to, the signal did, or only another rank wanted
it."""


@dataclass(frozen=True)
class RankPlace:
    """Where one rank runs."""

    rank: int
    local_rank: int
    node_rank: int
    slot: int
    """Which of its worker's ranks this is, from 0."""
    worker: str
    """Address of the Dask worker."""
    host: str
    address: str = ""
    """Where the other ranks reach it; the host, unless the gang was given a network."""
    device_position: int | None = None
    """Which of the worker's visible CUDA devices it takes; None: nobody told the worker which
    it sees."""


@dataclass(frozen=True)
class GangShape:
    """The sizes every rank of a gang agrees on."""

    world_size: int
    num_nodes: int
    local_world_sizes: tuple[int, ...]
    """Ranks on each node, by node rank."""


@dataclass(frozen=True)
class RankLaunch:
    """All that a fresh rank process needs to know.

    Its payload is opaque to everyone but the rank.
    """

    place: RankPlace
    shape: GangShape
    gang_id: str
    attempt: int
    max_restarts: int
    master_addr: str
    master_port: int
    store_fd: int | None
    """An already listening socket, inherited by rank 0 in the default mode: no port is ever
    guessed."""
    process_group: ProcessGroupMode
    backend: Backend
    rendezvous_timeout_s: float
    extra_sys_path: tuple[str, ...]
    launcher: Launcher
    payload: bytes
    """cloudpickle of (fn or import string, args, kwargs)."""


@dataclass(frozen=True)
class LaunchPage:
    """What a rank process finds when it starts: its order, and the surroundings that a forked
    one must put on.
    """

    launch: RankLaunch
    environment: dict[str, str]
    folder: str
    scratch: str
    """Where the rank's multiprocessing puts its sockets, and by whose name it calls its
    semaphores; removed when it has ended."""


COPIES = "records"
"""The folder in `scratch` where a rank keeps copies of the records that the storage doesn't
have yet."""


@dataclass(frozen=True)
class RankFailure:
    """How one rank failed, as a value."""

    rank: int
    host: str
    pid: int
    kind: Literal["exception", "exit", "signal", "returned", "worker_lost", "start"]
    summary: str
    """One or a few lines for people: `ValueError: boom`, `was killed by SIGKILL (9)`."""
    is_collateral: bool = False
    """Whether it looks like the consequence of another rank's failure (a connection that a peer
    closed)."""
    traceback_text: str = ""
    exception_type: str = ""
    exception_pickle: bytes | None = None
    exit_code: int | None = None
    signal: int | None = None
    stderr_tail: tuple[str, ...] = ()
    step: int | None = None
    """The optimizer step under way, or the last one; None before the first."""
    retryability: Retryability = "transient"


NO_RANK = -1


@dataclass(frozen=True)
class LogLine:
    """A line a rank printed, or a record it logged."""

    rank: int
    """NO_RANK: the gang itself says it."""
    level: int
    """A level of the logging module."""
    text: str
    logger: str = ""
    """Name of the rank's logger; empty for a printed line."""


@dataclass(frozen=True)
class Progress:
    """How far rank 0 of a training is."""

    step: int
    epoch: int
    total_steps: int | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    trouble: str = ""
    """What a person should know of: `no checkpoint since step 40: ...`."""


@dataclass(frozen=True)
class FunctionEnded:
    """A rank's function came to its end; its last checkpoint and metrics may still be being
    written.
    """

    rank: int


@dataclass(frozen=True)
class RankReturned:
    """A rank's function returned, and all that it leaves is written."""

    rank: int


@dataclass(frozen=True)
class RankFailedEvent:
    """A rank failed."""

    failure: RankFailure


@dataclass(frozen=True)
class AttemptBegan:
    """A gang has its workers and starts its ranks; after a failure it may have another size."""

    attempt: int
    world_size: int


@dataclass(frozen=True)
class RankStack:
    """Where a rank is, asked for because its gang makes no progress."""

    rank: int
    text: str
    """All its threads as faulthandler writes them, the main one last; or why there is none."""


@dataclass(frozen=True)
class Hang:
    """How a gang hung, as a value."""

    summary: str
    """One line for people: who did not arrive, where it is, and who waits for it."""
    ranks: tuple[int, ...]
    """Those that the others wait for; all of them where each waits for another."""
    hosts: tuple[str, ...]
    """Theirs, in the same order."""
    phase: str
    """What the first of them is at: `step`, `loading`, `saving`, ..."""
    step: int
    """The step that it is in, or made last."""
    silent_s: float
    """How long no rank of the gang made progress."""
    stacks: Mapping[int, str] = field(default_factory=dict)
    """The threads of each rank that answered."""


@dataclass(frozen=True)
class FailureRecord:
    """What is remembered of a failed attempt, to tell whether the next one fails in the same
    way.
    """

    attempt: int
    world_size: int
    summary: str
    """One line for people."""
    fingerprint: str | None
    """Type and text of the exception; None where another attempt may well go better, e.g. after
    a kill or an OSError."""
    step: int | None
    """The optimizer step it failed in; None before the first, or where steps aren't known."""


@dataclass(frozen=True)
class Stopped:
    """A rank's training stopped at a step that all ranks agreed on, before its end and not by
    its own wish.
    """

    step: int
    by: StoppedBy
    checkpoint_step: int | None = None
    """Step of the newest checkpoint; known to rank 0 once it is written."""


@dataclass(frozen=True)
class RankStopped:
    """A rank stopped; it comes a second time when rank 0 has written the last checkpoint."""

    rank: int
    stopped: Stopped


@dataclass(frozen=True)
class RecordsLeft:
    """Records of a rank that ended, or was killed, before the storage had them."""

    key: str
    """Where they belong."""
    content: bytes
    """Lines of JSON."""


GangEvent = (
    LogLine
    | Progress
    | FunctionEnded
    | RankReturned
    | RankFailedEvent
    | RankStopped
    | AttemptBegan
    | RankStack
    | RecordsLeft
)
