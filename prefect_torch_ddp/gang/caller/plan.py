"""Owns what is fixed about a gang before it is placed, and makes its tickets and launch orders.

Pure.
"""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field

from prefect_torch_ddp.gang.caller.placement import Placement
from prefect_torch_ddp.protocol.agent import Reservation, Seniority, WorkerIdentity
from prefect_torch_ddp.protocol.rank import Backend, Launcher, ProcessGroupMode, RankLaunch


@dataclass(frozen=True)
class GangPlan:
    """One attempt of one call of run_gang."""

    name: str
    seniority: Seniority
    payload: bytes
    process_group: ProcessGroupMode
    backend: Backend
    attempt: int
    max_restarts: int
    rendezvous_timeout_s: float
    extra_sys_path: tuple[str, ...]
    progress_timeout_s: float | None = None
    watched_from_start: bool = False
    """Whether progress is expected before a rank has shown any: of a plain function whose
    caller gave a limit."""
    launcher: Launcher = "auto"
    resources: Mapping[str, float] = field(default_factory=dict)
    interface: str | None = None
    stop_grace_s: float = 8.0

    def reservation(
        self, worker: WorkerIdentity, *, hosts_store: bool, store_host: str
    ) -> Reservation:
        """Make the reservation for one worker; its token is never used twice."""
        return Reservation(
            token=f"{self.seniority.gang_id}-{uuid.uuid4().hex[:12]}",
            gang_name=self.name,
            seniority=self.seniority,
            worker=worker.address,
            process_id=worker.process_id,
            hosts_store=hosts_store,
            stop_grace_s=self.stop_grace_s,
            store_host=store_host,
        )

    def launches(
        self, placement: Placement, worker: str, store_port: int
    ) -> tuple[RankLaunch, ...]:
        """Make the launch orders for one worker's ranks."""
        return tuple(
            RankLaunch(
                place=place,
                shape=placement.shape,
                gang_id=self.seniority.gang_id,
                attempt=self.attempt,
                max_restarts=self.max_restarts,
                master_addr=placement.places[0].address,
                master_port=store_port,
                store_fd=None,
                process_group=self.process_group,
                backend=self.backend,
                rendezvous_timeout_s=self.rendezvous_timeout_s,
                extra_sys_path=self.extra_sys_path,
                launcher=self.launcher,
            )
            for place in placement.ranks_of(worker)
        )
