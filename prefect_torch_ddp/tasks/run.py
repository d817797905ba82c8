"""What the tasks of one run share: its description, its name, its log and its attempt log."""

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import UUID

from prefect.logging import get_run_logger

from prefect_torch_ddp.checkpoint.attempts import (
    claim_attempt,
    claim_attempt_after,
    read_failures,
    write_failure,
)
from prefect_torch_ddp.checkpoint.resume_point import ResumePoint
from prefect_torch_ddp.errors import GangError
from prefect_torch_ddp.gang.caller.lines import rank_text, stack_line
from prefect_torch_ddp.gang.caller.workers import until_gone
from prefect_torch_ddp.params import ContextParams, TrainParams
from prefect_torch_ddp.protocol.call import Call
from prefect_torch_ddp.protocol.events import (
    AttemptBegan,
    FailureRecord,
    GangEvent,
    LogLine,
    RankStack,
    RecordsLeft,
)
from prefect_torch_ddp.rank.config import RankConfig, Stage
from prefect_torch_ddp.records.log import put_part
from prefect_torch_ddp.records.rank_log import LogFolder
from prefect_torch_ddp.storage.protocol import Readable, Storage
from prefect_torch_ddp.tasks.report.progress import TrainingProgress
from prefect_torch_ddp.tasks.watch.terminal import Teller

if TYPE_CHECKING:
    import logging

    from distributed import Client


# Named, not imported: what it leads to loads torch, which only ranks do.
RUN_STAGE = Call("prefect_torch_ddp.rank.stages:run_stage", takes_context=True)
RUN_TASK = Call("prefect_torch_ddp.rank.stages:run_task", takes_context=True)


@dataclass(frozen=True)
class Run:
    """One run of train-ddp: its parameters, its id and its storage."""

    run_id: str
    params: TrainParams
    storage: Storage
    dataset_id: str
    experiment: str
    """What its report is compared with: runs of the same deployment, or flow, and workload."""
    resume_from: ResumePoint | None = None
    source: Readable | None = None
    """Where the raw data is."""

    def rank_config(
        self, stage: Stage, attempt: int, restore_step: int | None = None
    ) -> RankConfig:
        """Describe the context of one stage's ranks; a checkpoint to restore is this attempt's."""
        params = self.params
        config = partial(
            rank_config, params, self.run_id, attempt, stage, self.storage, source=self.source
        )
        if stage == "prepare":
            # What it draws belongs to the dataset, which all seeds share; a seed for it is one of
            # data_options.
            return config(dataset_id=self.dataset_id, options=params.data_options, seed=0)
        return config(
            dataset_id=self.dataset_id,
            options={**params.data_options, **params.options},
            resume_from=self.resume_from if stage == "train" else None,
            restore_step=restore_step,
            restore_attempt=None if restore_step is None else attempt,
            evaluate_on=params.evaluate_on,
        )


def rank_config(
    params: ContextParams, run_id: str, attempt: int, stage: Stage, storage: Storage, **more: Any
) -> RankConfig:
    """Describe the context of a gang's ranks, as the parameters and what comes on top say."""
    chosen = {
        "options": dict(params.options),
        "seed": params.seed,
        "checkpoint": params.checkpoint,
        "determinism": params.determinism,
        "virtual_ranks": params.virtual_ranks,
        "ledger": params.ledger,
    }
    return RankConfig(run_id, attempt, stage, storage, **{**chosen, **more})


def run_id_of(name: str, prefect_id: UUID) -> str:
    """Name a training so that a person finds it in the storage and in the UI.

    Of Prefect's id, equal for all retries, the last 12 digits count: they are random. The first
    ones are the time, and those of runs that are scheduled together are equal.
    """
    return f"{slug(name)}-{prefect_id.hex[-12:]}"


def slug(name: str) -> str:
    """Return a name as a part of a key."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:60] or "run"


def log_to_run(
    and_then: Callable[[GangEvent], None] = lambda _: None,
    training: TrainingProgress | None = None,
    name: str = "",
) -> Callable[[GangEvent], None]:
    """Make a receiver of gang events that logs the ranks' lines to the Prefect run, rank first.

    The flow is told what its display shows, how far the training is included.

    Args:
        and_then: receives all other events too.
        training: what is known of it.
        name: what the attempts train, to be logged.
    """
    teller = Teller(training)
    asked = training.world_size if training else 0
    logger: logging.Logger | logging.LoggerAdapter[Any] = get_run_logger()

    def receive(event: GangEvent) -> None:
        if isinstance(event, RankStack):
            event = stack_line(event)
        if isinstance(event, LogLine):
            logger.log(event.level, "%s", rank_text(event))
            return
        if isinstance(event, AttemptBegan) and name:
            of = f" of {asked}" if event.world_size < asked else ""
            values = event.attempt, name, event.world_size, of
            logger.info("attempt %d trains %s on %d ranks%s", *values)
        and_then(event)
        teller.receive(event)

    return receive


MAX_PARALLEL = 16


def wait_for_earlier(client: "Client", name: str, params: ContextParams) -> None:
    """Wait until a gang of this name has stopped, for as long as one gets to stop.

    Dask runs the task of a retired worker again at once, elsewhere: that attempt must not fence
    off the last checkpoint of the one that still stops there.
    """
    limit_s = params.stop_grace_s
    say = get_run_logger().info
    with suppress(GangError, OSError):  # workers that can't be asked: the gang that comes says so
        client.sync(until_gone, client, name, params.resources or {}, limit_s, say)


@dataclass
class RunAttemptLog:
    """Claims the attempts of one task run, each of which fences off those before it."""

    storage: Storage
    run_id: str
    knows_steps: bool
    """Whether its function makes its steps by `ctx.steps`, as a workload does."""
    _own_attempt: int | None = None

    @property
    def logs(self) -> LogFolder:
        """Where the ranks' lines are kept."""
        return LogFolder(self.storage, self.run_id)

    def begin(self) -> int:
        """Claim the next attempt: any at first, then the one that follows this task run's own.

        Raises:
            SupersededError: the training was begun elsewhere meanwhile, since this task run was
                taken for lost.
        """
        if self._own_attempt is None:
            self._own_attempt = claim_attempt(self.storage, self.run_id)
        else:
            self._own_attempt = claim_attempt_after(self.storage, self.run_id, self._own_attempt)
        return self._own_attempt

    def last_failure(self) -> FailureRecord | None:
        """Return the newest failure on record."""
        failures = read_failures(self.storage, self.run_id)
        return failures[-1] if failures else None

    def record_failure(self, record: FailureRecord) -> None:
        """Put a failure on record."""
        write_failure(self.storage, self.run_id, record)

    def keep_records(self, left: Sequence[RecordsLeft]) -> None:
        """Write them as the ranks would have, each rank's in order.

        Raises:
            StorageError: some can't be written; the others are.
        """
        by_rank: defaultdict[str, list[RecordsLeft]] = defaultdict(list)
        for part in left:
            by_rank[part.key.rpartition("/")[0]].append(part)

        def keep(parts: list[RecordsLeft]) -> None:
            for part in parts:
                put_part(self.storage, part.key, part.content)

        with ThreadPoolExecutor(MAX_PARALLEL, thread_name_prefix="keep-records") as pool:
            list(pool.map(keep, by_rank.values()))
