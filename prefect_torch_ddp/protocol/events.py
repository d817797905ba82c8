"""The events of a gang, failures included, and the datagrams in which a rank sends its own."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from prefect_torch_ddp.lazy import exported_by

Retryability = Literal["open", "hopeless", "transient"]
"""What a failure says about another attempt: it may end the same way (open), it is bound to
(hopeless), or the failure had nothing to do with the code (transient)."""
StoppedBy = Literal["order", "SIGTERM", "peer"]
"""Why a rank stopped: its agent ordered it, the signal did, or only another rank wanted it."""
NO_RANK = -1


@exported_by("prefect_torch_ddp")
class GangEvent:
    """Something that happened to a gang, as `on_event` of `run_gang` gets it: a frozen dataclass.

    Tell events apart by the names of their classes; `vars(event)` has the fields. `LogLine` has
    `rank` (-1: the gang itself), `level`, as in `logging`, and `text`; `Progress` has `step` and
    `epoch`; `Waiting` has `text`; `AttemptBegan` has `attempt`, `world_size` and `hosts`;
    `CheckpointCommitted` has `step`, `epoch` and `num_bytes`; `RankReturned` and `RankStopped` have
    `rank`; `FailureRecord` has `attempt` and `summary`. Others are `FunctionEnded`, `RankStack` and
    `RankFailure`. Later versions may add others.

    Example:
        Print the lines of the ranks:

            from prefect_torch_ddp import GangEvent, run_gang

            def show(event: GangEvent) -> None:
                if type(event).__name__ == "LogLine":
                    print(vars(event)["rank"], vars(event)["text"])

            run_gang(client, fn, world_size=2, on_event=show)
    """


@exported_by("prefect_torch_ddp")
@dataclass(frozen=True)
class RankFailure(GangEvent):
    """How one rank failed, as a value.

    Example:
        What is known of the rank that failed first:

            from prefect_torch_ddp import RankFailedError, run_gang

            try:
                run_gang(client, "math:sqrt", (-1,), world_size=2)
            except RankFailedError as error:
                first = error.failure
                print(first.kind, first.summary, first.step, first.stderr_tail)
    """

    rank: int
    host: str
    """Where its Dask worker runs."""
    pid: int
    """Of its process there; 0 if unknown."""
    kind: Literal["exception", "exit", "signal", "returned", "worker_lost", "start"]
    """What ended it. `returned`: it had returned while others waited for it; `start`: it could not
    be started."""
    summary: str
    """One or a few lines for people: `ValueError: boom`, `was killed by SIGKILL (9)`."""
    is_collateral: bool = False
    """Whether it looks like a consequence of another rank's failure: a peer closed a connection."""
    traceback_text: str = ""
    """The formatted traceback of its exception; empty if there is none."""
    exception_type: str = ""
    """Module and name of the exception's class: `builtins.ValueError`."""
    exception_pickle: bytes | None = None
    """The exception, if it can be unpickled elsewhere."""
    exit_code: int | None = None
    """Exit code of its process, if the process ended by itself."""
    signal: int | None = None
    """Number of the signal that killed it."""
    stderr_tail: tuple[str, ...] = ()
    """The last lines that it wrote to stderr."""
    step: int | None = None
    """The optimizer step under way, or the last one; None before the first."""
    retryability: Retryability = "transient"
    """Whether another attempt may end differently. "open": it may end in the same way. "hopeless":
    it is bound to. "transient": the failure had nothing to do with the code."""
    log_uri: str = ""
    """Where its lines and the whole traceback are kept, with `*` for the number of the part; empty
    if they aren't kept."""
    hint: str = ""
    """One line for people about what may have ended it, if nothing proves it; mostly empty."""


@dataclass(frozen=True)
class FailureRecord(GangEvent):
    """What is kept of a failed attempt, to tell whether the next one fails in the same way."""

    attempt: int
    world_size: int
    summary: str
    """One line for people."""
    fingerprint: str | None
    """Type and text of the exception; None if another attempt may succeed, e.g. after
    a kill or an OSError."""
    step: int | None
    """The optimizer step it failed in; None before the first, or if steps aren't known."""
    time: float = field(default_factory=time.time, compare=False)
    """When it was known to have failed, in Unix seconds."""
    is_move: bool = False
    """Whether it is no failure: all saved, and the gang continues elsewhere or with more ranks."""


@exported_by("prefect_torch_ddp")
@dataclass(frozen=True)
class Hang:
    """How a gang hung, as a value.

    Example:
        Who was late, and in which step:

            from prefect_torch_ddp import GangHungError, run_gang

            try:
                run_gang(client, fn, world_size=2, progress_timeout_s=60)
            except GangHungError as error:
                print(error.hang.summary, error.hang.step)
    """

    summary: str
    """One line for people: who did not arrive, where it is, and who waits for it."""
    ranks: tuple[int, ...]
    """Those that the others wait for; all of them if each waits for another."""
    hosts: tuple[str, ...]
    """Theirs, in the same order."""
    step: int
    """The step that the first of them is in, or made last."""
    stacks: Mapping[int, str] = field(default_factory=dict)
    """The threads of each rank that answered."""


@dataclass(frozen=True)
class LogLine(GangEvent):
    """A line a rank printed, or a record it logged."""

    rank: int
    """NO_RANK: the gang itself says it."""
    level: int
    """A level of the logging module."""
    text: str
    logger: str = ""
    """Name of the rank's logger; empty for a printed line."""
    ranks: tuple[int, ...] = ()
    """All ranks that wrote it, if several did within a second; the first of them is `rank`."""


@dataclass(frozen=True)
class Progress(GangEvent):
    """How far rank 0 of a training is."""

    step: int
    epoch: int
    total_steps: int | None
    trouble: str = ""
    """A warning for people: `no checkpoint since step 40: ...`."""
    total_epochs: int | None = None
    num_samples: int = 0
    """Samples that all ranks trained on in this attempt."""
    may_continue: bool = False
    """Whether the totals are those of a call of one epoch, which others may follow."""


@dataclass(frozen=True)
class CheckpointCommitted(GangEvent):
    """A checkpoint is complete; rank 0 sends it."""

    step: int
    """Its number, as in its manifest."""
    epoch: int
    num_bytes: int
    """Of all its objects."""
    value: float | None = None
    """Of the metric by which checkpoints are the best, the mean over the ranks that reported it."""
    every_s: float | None = None
    """How often one is due by time at present; None: never."""


@dataclass(frozen=True)
class FunctionEnded(GangEvent):
    """A rank's function ended; its last checkpoint and metrics may still be being written."""

    rank: int


@dataclass(frozen=True)
class RankReturned(GangEvent):
    """A rank's function returned, and everything that it leaves is written."""

    rank: int


@dataclass(frozen=True)
class FailureWritten:
    """Sent by a rank that failed; its outcome file holds the pickled RankFailure."""

    rank: int


@dataclass(frozen=True)
class Waiting(GangEvent):
    """A gang waits for its workers; sent about once a second, for displays."""

    text: str
    """One line: `waiting for workers: 3 of 8 after 40 s (limit 60 s)`."""


@dataclass(frozen=True)
class AttemptBegan(GangEvent):
    """A gang has its workers and starts its ranks; after a failure it may have another size."""

    attempt: int
    world_size: int
    hosts: tuple[str, ...] = ()
    """Of each rank, in rank order."""


@dataclass(frozen=True)
class RankStack(GangEvent):
    """Where a rank is; requested when its gang makes no progress."""

    rank: int
    text: str
    """All its threads as faulthandler writes them, the main one last; or why there is none."""
    cpu_s: float = 0.0
    """Processor time that its processes had used by then."""
    io_bytes: int = 0
    """What they had read and written by then, this text included."""
    is_traced: bool = False
    """Whether a debugger or tracer (gdb, strace, py-spy) is attached to the process."""


@dataclass(frozen=True)
class Stopped:
    """A training stopped before its end, at a step that all ranks agreed on."""

    step: int
    by: StoppedBy
    checkpoint_step: int | None = None
    """Number of the newest checkpoint; known to rank 0 once it is written."""
    is_saved: bool = False
    """Whether that checkpoint has this step: its number may be another one."""


@dataclass(frozen=True)
class RankStopped(GangEvent):
    """A rank stopped; it comes a second time when rank 0 has written the last checkpoint."""

    rank: int
    stopped: Stopped


@dataclass(frozen=True)
class RecordsLeft(GangEvent):
    """Records of a rank that ended, or was killed, before the storage had them."""

    key: str
    """Where they belong."""
    content: bytes
    """Lines of JSON."""


RankEvent = (
    LogLine
    | Progress
    | CheckpointCommitted
    | RankStopped
    | FunctionEnded
    | RankReturned
    | FailureWritten
)
"""Events that a rank itself sends."""

MAX_DATAGRAM_BYTES = 131_072
MAX_TEXT = 16_000
"""Characters of a text; in the worst case each takes six bytes of a datagram."""
_KINDS: dict[str, type[RankEvent]] = {kind.__name__: kind for kind in get_args(RankEvent)}


def encode_event(event: RankEvent) -> bytes:
    """Return a rank's event as one datagram, without its rank, which the agent knows."""
    fields = {"kind": type(event).__name__, **vars(event)}
    for name in ("rank", "ranks"):
        fields.pop(name, None)
    return json.dumps(fields, ensure_ascii=False, default=vars).encode(errors="replace")


def decode_event(datagram: bytes, rank: int) -> RankEvent:
    """Read a rank's event; raises ValueError, KeyError or TypeError if it is none."""
    fields = json.loads(datagram)
    kind = _KINDS[fields.pop("kind")]
    if kind not in (Progress, CheckpointCommitted):
        fields["rank"] = rank
    if kind is RankStopped:
        fields["stopped"] = Stopped(**fields["stopped"])
    return kind(**fields)
