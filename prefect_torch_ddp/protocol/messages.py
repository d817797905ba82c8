"""The messages between the caller of a gang and the agents on its Dask workers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from prefect_torch_ddp.protocol.events import GangEvent
from prefect_torch_ddp.protocol.heartbeat import Heartbeat
from prefect_torch_ddp.protocol.rank import RankLaunch

AgentState = Literal["absent", "waiting", "reserved", "running", "ended"]
AgentOrder = Literal["abort", "stop", "pause", "leave", "look", "look_by_signal"]
"""Have the ranks stop at an agreed step, in the time for it or whenever they come to it; have those
that returned end; fetch their stacks, and those of ranks that don't answer by a signal, which may
cut a system call short. Abort: kill the ranks at once."""

POLL = "prefect_torch_ddp_poll"
"""The handler that a Dask worker offers to callers, who may give an order with a poll. It answers
with a dict of one pickle, `{"answer": ...}`: Dask reports a broken connection by bare bytes."""


@dataclass(frozen=True)
class WorkerIdentity:
    """A Dask worker as a place for ranks."""

    address: str
    process_id: str
    """Of this process: a worker restarted at the same address has another."""
    host: str
    visible_devices: str | None
    """Its CUDA_VISIBLE_DEVICES."""
    occupant: str | None
    """Who holds its slot or its threads now, for people; None when it is free."""
    machine: str = ""
    """Tells machines and containers apart; one may have several hosts' addresses."""
    addresses: tuple[tuple[str, str], ...] = ()
    """Its machine's (interface, address) pairs."""
    free_resources: Mapping[str, float] = field(default_factory=dict)
    """Dask resources that no task holds now."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of Python and of the packages that it shares with its caller, by name."""


@dataclass(frozen=True, order=True)
class Seniority:
    """Which gang came first; orders all gangs of a cluster."""

    born_s: float
    gang_id: str


@dataclass(frozen=True)
class Reservation:
    """One gang's claim on one worker's slot."""

    token: str
    gang_name: str
    seniority: Seniority
    worker: str
    process_id: str
    store_host: str | None
    """Where rank 0 runs: the address at which this agent opens the socket of the rendezvous."""
    stop_grace_s: float
    """How long ranks in `ctx.steps` get to stop at an agreed step, when the gang is cancelled."""
    liveness_timeout_s: float
    """After how long a silence the caller counts as lost."""


@dataclass(frozen=True)
class Occupant:
    """Who holds a worker's slot."""

    text: str
    seniority: Seniority | None = None
    """Set while the holder is a gang that still waits for its other agents."""


@dataclass(frozen=True)
class RankHeartbeat:
    """What an agent knows of one rank's progress."""

    rank: int
    heartbeat: Heartbeat
    silent_s: float
    """Since its last progress."""
    idle_s: float
    """How long its processes have used next to no CPU and moved next to no data; 0: unknown."""
    stopped: str = ""
    """Which of its processes is stopped (SIGSTOP), for people."""


@dataclass(frozen=True)
class AgentNews:
    """An agent's answer to a poll, or to the order to end."""

    state: AgentState
    events: tuple[GangEvent, ...] = ()
    next_event: int = 0
    store_port: int = 0
    occupant: Occupant | None = None
    why_ended: str = ""
    """Set if the agent ended its ranks by itself: it lost its caller, or its worker closes."""
    heartbeats: tuple[RankHeartbeat, ...] = ()
    """Of the agent's ranks, if they are watched."""

    @property
    def has_ended(self) -> bool:
        """Whether there are no ranks any more."""
        return self.state in ("absent", "ended")


@dataclass(frozen=True)
class StartOrder:
    """Has an agent start its ranks."""

    launches: tuple[RankLaunch, ...]
    payload: bytes
    """cloudpickle of (fn or import string, args, kwargs): opened by ranks and by nobody else."""
    progress_timeout_s: float | None = None
    """Set if the ranks' progress is watched."""
    logs: bytes = b""
    """Pickle of the LogFolder where the ranks' lines are kept; empty: nowhere."""
