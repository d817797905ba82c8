"""Programs with checkpoints of their own, struck once at a drawn moment."""

import os
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from prefect_torch_ddp import RankContext
from tests.workloads import trainers
from tests.workloads.tiny import dask_worker_of

Victim = Literal["rank", "ranks", "worker", "flow"]
FLOW_PID = "flow.pid"

_timers: list[threading.Timer] = []


@dataclass(frozen=True)
class Strike:
    """SIGKILL for a rank, all ranks, a rank's Dask worker or the flow, some time after a rank
    began a step; once, whatever is tried again."""

    victim: Victim
    step: int
    rank: int
    delay_s: float
    folder: str

    def __call__(self, step: int) -> None:
        """Notice that this rank begins a step."""
        own = int(os.environ["RANK"])
        if step != self.step or (self.victim != "ranks" and own != self.rank):
            return
        try:
            (Path(self.folder) / f"struck-{own}").touch(exist_ok=False)
        except FileExistsError:
            return
        timer = threading.Timer(self.delay_s, os.kill, (self._pid(), signal.SIGKILL))
        timer.start()
        _timers.append(timer)

    def _pid(self) -> int:
        if self.victim == "worker":
            return dask_worker_of(os.getpid())
        if self.victim == "flow":
            return int((Path(self.folder) / FLOW_PID).read_text())
        return os.getpid()


def train(ctx: RankContext, program: str, folder: str, strike: Strike | None) -> str:
    """Run one of the programs; whoever has struck doesn't return."""
    value: str = getattr(trainers, program)(ctx, folder, strike)
    for timer in _timers:
        timer.join()
        signal.pause()
    return value
