"""What the tasks of one run share: its description, its name, its log and its attempt log."""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound
from prefect.logging import get_run_logger
from prefect.utilities.context import get_flow_run_id

from prefect_torch_ddp.checkpoint.attempts import (
    claim_attempt,
    claim_attempt_after,
    read_failures,
    write_failure,
)
from prefect_torch_ddp.checkpoint.manifest import list_manifests
from prefect_torch_ddp.checkpoint.resume_point import ResumePoint, parse_resume_from
from prefect_torch_ddp.errors import GangError
from prefect_torch_ddp.gang.caller.lines import rank_text, stack_line
from prefect_torch_ddp.gang.caller.workers import until_gone
from prefect_torch_ddp.params import ContextParams, TrainParams
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
from prefect_torch_ddp.records.run_record import RunRecord, list_records
from prefect_torch_ddp.storage.protocol import Readable, Storage
from prefect_torch_ddp.tasks.blocks import resolve_storage
from prefect_torch_ddp.tasks.report.progress import TrainingProgress
from prefect_torch_ddp.tasks.watch.terminal import Teller

if TYPE_CHECKING:
    import logging

    from distributed import Client


# Named, not imported: what it leads to loads torch, which only ranks do.
RUN_STAGE = "prefect_torch_ddp.rank.stages:run_stage"
RUN_TASK = "prefect_torch_ddp.rank.stages:run_task"


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


def resume_point(
    params: ContextParams, own: Storage, run_id: str, experiment: str
) -> ResumePoint | None:
    """Find the checkpoint that a run begins from, which has to be there if it was named.

    A run that has checkpoints of its own resumes from them: then it may be gone.

    Raises:
        InvalidParamsError, CheckpointError: there is none by that name, or it is damaged.
        StorageError: earlier runs can't be read.
    """
    reference = params.resume_from
    if reference is None:
        return None
    if reference in {"latest", "best"}:
        earlier = [each for each in list_records(own, experiment) if each.run_id != run_id]
        found = _unfinished(own, earlier) if reference == "latest" else _best(own, earlier, params)
        words = "resume_from=%r: %s"
        said = found.uri if found else f"{experiment} has no such run yet, so this one begins anew"
        get_run_logger().info(words, reference, said)
        return found
    point = parse_resume_from(reference, own, resolve_storage)
    if not list_manifests(own, run_id):
        point.find()
    return point


def weights_from(point: ResumePoint | None) -> str | None:
    """Return the run whose weights alone a run begins with, if it does."""
    return point.run_id if point is not None and point.only_weights else None


def _unfinished(own: Storage, earlier: Sequence[RunRecord]) -> ResumePoint | None:
    """Return the newest run that didn't finish and has a checkpoint; none once one finished."""
    over = (each for each in earlier if not _still_trains(each))
    for record in takewhile(lambda each: each.state != "completed", over):
        if list_manifests(own, record.run_id):
            return ResumePoint(own, record.run_id)
    return None


def _still_trains(record: RunRecord) -> bool:
    """Whether a run goes on in this very flow run, or in another that hasn't ended for Prefect.

    That is also one which was suspended: its record says cancelled, as the training did stop. What
    this very flow run cancelled is over: it was resumed or retried, and its tasks have new ids.
    """
    if record.state not in ("training", "cancelled") or record.flow_run_id is None:
        return False
    if record.state == "cancelled" and record.flow_run_id == str(get_flow_run_id()):
        return False
    with get_client(sync_client=True) as client, suppress(ObjectNotFound):
        state = client.read_flow_run(UUID(record.flow_run_id)).state
        return state is not None and not state.is_final()
    return False


def _best(own: Storage, earlier: Sequence[RunRecord], params: ContextParams) -> ResumePoint | None:
    """Return the best checkpoint of the best completed run by the metric that chooses checkpoints.

    Without such a metric, the newest run's.
    """
    metric, sign = params.checkpoint.best_metric, 1 if params.checkpoint.best_mode == "max" else -1

    def score(value: float | None) -> float:
        return sign * value if value is not None and math.isfinite(value) else -math.inf

    done = [each for each in earlier if each.state == "completed"]
    of_run = {each.run_id: each.best_value if each.best_metric == metric else None for each in done}
    for run_id in sorted(of_run, key=lambda each: score(of_run[each]), reverse=True):
        # Both sorts are stable: of equals the newest.
        found = reversed(list_manifests(own, run_id))
        ranked = sorted(found, key=lambda each: score(each.metrics.get(metric or "")), reverse=True)
        if ranked:
            return ResumePoint(own, run_id, ranked[0].step, ranked[0].attempt, only_weights=True)
    return None


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
