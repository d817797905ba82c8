"""The plan of a gang: what is fixed before it is placed."""

import time
import uuid
from dataclasses import dataclass
from typing import Self

from pydantic import model_validator

from prefect_torch_ddp.gang.caller.placement import Placement
from prefect_torch_ddp.gang.caller.sent.code import own_code_paths
from prefect_torch_ddp.gang.liveness import liveness_timeout_s
from prefect_torch_ddp.params import Count, GangParams
from prefect_torch_ddp.protocol.messages import Reservation, Seniority, StartOrder, WorkerIdentity
from prefect_torch_ddp.protocol.rank import (
    TORCH_ALONE,
    CodePaths,
    Preload,
    ProcessGroupMode,
    RankLaunch,
)

RANK_EXTRA_S = 2.0
"""How much longer than its caller a rank waits for its agent, so that the caller names a silent
worker before that worker's ranks end themselves and their peers fail."""


class CallParams(GangParams):
    """The parameters of one run_gang call."""

    process_group: ProcessGroupMode = "default"
    """default: initialised before the function runs; user: the function initialises it from the
    environment, as under torchrun; none: there is none. If not given: user for a script, default
    for anything else."""
    world_size_divides: Count | None = None
    """A number that must be a multiple of the number of ranks in every attempt."""

    @model_validator(mode="after")
    def _check_group(self) -> Self:
        self.check_has_group(self.process_group)
        return self

    @model_validator(mode="after")
    def _check_divides(self) -> Self:
        divides, world_size, least = self.world_size_divides, self.world_size, self.min_world_size
        if divides is not None and world_size is not None and divides % world_size:
            msg = f"world_size is {world_size} and has to divide {divides}; give one that does"
            raise ValueError(msg)
        if divides is not None and least is not None and least > divides:
            has_to = f"the number of ranks has to divide {divides}; give at most that"
            msg = f"min_world_size is {least}, and {has_to}"
            raise ValueError(msg)
        return self


@dataclass(frozen=True)
class GangPlan:
    """One attempt of one call of run_gang."""

    name: str
    seniority: Seniority
    options: CallParams
    liveness_timeout_s: float
    code_paths: CodePaths
    watched_from_start: bool
    """Whether progress is expected before a rank has shown any: of a plain function whose
    caller gave a limit."""
    payload: bytes = b""
    preload: Preload = TORCH_ALONE
    attempt: int = 1
    max_restarts: int = 0
    logs: bytes = b""
    """Where the ranks' lines are kept; see `StartOrder`."""
    full_size_s: float = 0.0
    """How long the gang waits for all its ranks while there are workers for its fewest."""

    @classmethod
    def new(cls, name: str, options: CallParams, logs: bytes, *, watched_from_start: bool) -> Self:
        """Plan a call that queues for workers from now on."""
        return cls(
            name=name,
            seniority=Seniority(time.time(), uuid.uuid4().hex[:12]),
            options=options,
            liveness_timeout_s=liveness_timeout_s(),
            code_paths=own_code_paths(),
            watched_from_start=watched_from_start,
            logs=logs,
        )

    @property
    def resources(self) -> dict[str, float]:
        """What the gang takes from each of its workers."""
        return dict(self.options.resources or {})

    def reservation(self, worker: WorkerIdentity, placement: Placement) -> Reservation:
        """Make the reservation for one worker; its token is never used twice."""
        first = placement.places[0]
        return Reservation(
            token=f"{self.seniority.gang_id}-{uuid.uuid4().hex[:12]}",
            gang_name=self.name,
            seniority=self.seniority,
            worker=worker.address,
            process_id=worker.process_id,
            store_host=first.address if first.worker == worker.address else None,
            stop_grace_s=self.options.stop_grace_s,
            liveness_timeout_s=self.liveness_timeout_s,
        )

    def start_order(self, placement: Placement, worker: str, store_port: int) -> StartOrder:
        """Make the order that starts one worker's ranks."""
        launches = tuple(
            RankLaunch(
                place=place,
                shape=placement.shape,
                gang_id=self.seniority.gang_id,
                attempt=self.attempt,
                max_restarts=self.max_restarts,
                master_addr=placement.places[0].address,
                master_port=store_port,
                store_fd=None,
                process_group=self.options.process_group,
                backend=self.options.backend,
                rendezvous_timeout_s=self.options.rendezvous_timeout_s,
                collective_timeout_s=self.options.collective_timeout_s,
                agent_timeout_s=self.liveness_timeout_s + RANK_EXTRA_S,
                code_paths=self.code_paths,
                launcher=self.options.launcher,
                preload=self.preload,
            )
            for place in placement.ranks_of(worker)
        )
        limit_s = self.options.progress_timeout_s
        return StartOrder(launches, self.payload, limit_s, self.logs)
