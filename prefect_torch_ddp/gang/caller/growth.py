"""Growing: a gang that has fewer ranks than it may have takes in free workers at a checkpoint."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from distributed import Client

from prefect_torch_ddp.errors import PrefectTorchDdpError
from prefect_torch_ddp.gang.caller.placement import GangSize, num_workers_needed, rank_addresses
from prefect_torch_ddp.gang.caller.plan import GangPlan
from prefect_torch_ddp.gang.caller.wanted import WorkersWanted
from prefect_torch_ddp.gang.caller.workers import free_workers
from prefect_torch_ddp.gang.versions import refuse_conflicts
from prefect_torch_ddp.protocol.events import (
    NO_RANK,
    CheckpointCommitted,
    FunctionEnded,
    GangEvent,
    LogLine,
    RankFailure,
    RankStopped,
)
from prefect_torch_ddp.protocol.messages import WorkerIdentity

LOOK_EVERY_S = 5.0
"""The least time between two looks for free workers, however often checkpoints are written."""


@dataclass
class Growth:
    """Says when a gang is to stop and begin again with more ranks; of one attempt.

    That is after a checkpoint: what has written one can resume, and a gang that lost a race for
    free workers waits for its next one.
    """

    client: Client
    plan: GangPlan
    size: GangSize
    workers: Sequence[WorkerIdentity]
    num_now: int
    """How many ranks it has."""
    sink: Callable[[GangEvent], None]
    wanted: WorkersWanted
    why: str = ""
    """Why the ranks were asked to stop, if they were."""
    _said: str = ""
    _has_saved: bool = False
    _is_ending: bool = False
    _has_news: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, event: GangEvent) -> None:
        """Take in what the gang says."""
        if isinstance(event, CheckpointCommitted):
            self._has_saved = True
            self._has_news.set()
        elif isinstance(event, FunctionEnded | RankFailure | RankStopped):
            if isinstance(event, FunctionEnded) and self._may_grow and not self._has_saved:
                self._say("no checkpoint was written while it ran, and it can grow only then")
            self._is_ending = True

    async def until_due(self) -> None:
        """Wait until the gang has saved and there are workers for more ranks; else for ever."""
        while self._may_grow:
            await self._until_saved()
            try:
                size = await self._attainable()
            except PrefectTorchDdpError as error:
                size = 0
                self._say(str(error))
            if size > self.num_now and not self._is_ending:
                self.why = f"there are workers for {size} ranks instead of {self.num_now}"
                text = f"{self.why}: the ranks stop and save, to continue with those"
                self.sink(LogLine(NO_RANK, logging.INFO, text))
                return
            await asyncio.sleep(LOOK_EVERY_S)
        self.wanted.withdraw()
        await asyncio.Event().wait()

    async def _until_saved(self) -> None:
        """Wait for a checkpoint; have autoscalers start workers, and keep them, meanwhile."""
        has_news = False
        while not has_news:
            await self._ask_for_workers()
            with contextlib.suppress(TimeoutError):
                has_news = await asyncio.wait_for(self._has_news.wait(), LOOK_EVERY_S)
        self._has_news.clear()

    async def _ask_for_workers(self) -> None:
        # A training that writes no checkpoint can't grow, nor can one that has said why.
        if self._said:
            self.wanted.withdraw()
        elif self._has_saved:
            await self.wanted.ask(self._num_lacking, {worker.address for worker in self.workers})

    @property
    def _num_lacking(self) -> int:
        each = self.size.ranks_per_worker
        largest = num_workers_needed(self.size.grown or 0, each)
        return num_workers_needed(self.size.on(len(self.workers), largest), each) - len(
            self.workers
        )

    @property
    def _may_grow(self) -> bool:
        return self.num_now < (self.size.grown or 0) and not self._is_ending

    def _say(self, why: str) -> None:
        text = f"the gang does not grow beyond {self.num_now} ranks: {why}"
        if text != self._said:
            self._said = text
            self.sink(LogLine(NO_RANK, logging.WARNING, text))

    async def _attainable(self) -> int:
        own = {worker.address for worker in self.workers}
        free = await free_workers(self.client, self.plan.resources, own)
        everybody = [*self.workers, *free]
        size = self.size.on(len(own), len(everybody))
        if size > self.num_now:  # what would end the gang at its start keeps it from growing
            refuse_conflicts(everybody)
            rank_addresses(everybody, self.plan.options.interface)
        return size
