"""Owns the task that runs a function on a gang: its calls are told apart, and each is a
training that retries resume.

Owns what can be chosen of a ddp_task beyond Prefect's own options.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from typing import Any, ParamSpec, Self, TypeVar

from prefect.client.schemas.objects import State
from prefect.context import TaskRunContext
from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from prefect.utilities.callables import get_call_parameters

from prefect_torch_ddp.checkpoint.manifest import newest
from prefect_torch_ddp.checkpoint.resume_point import ResumePoint, parse_resume_from
from prefect_torch_ddp.gang.run import run_gang
from prefect_torch_ddp.params import (
    DEFAULT_STORAGE,
    CheckpointParams,
    Determinism,
    check_virtual_ranks,
)
from prefect_torch_ddp.protocol.rank import Backend
from prefect_torch_ddp.rank.config import RankConfig
from prefect_torch_ddp.storage.protocol import Storage
from prefect_torch_ddp.tasks.blocks import resolve_storage
from prefect_torch_ddp.tasks.call_book import begin_call, numbered
from prefect_torch_ddp.tasks.cluster import current_client
from prefect_torch_ddp.tasks.run import RUN_WITH_CONTEXT, RunAttemptLog, log_to_run, slug
from prefect_torch_ddp.tasks.watch.watched_task import WatchedTask


@dataclass(frozen=True)
class GangOptions:
    """The options of `ddp_task`, which explains them."""

    world_size: int | None = None
    ranks_per_worker: int = 1
    backend: Backend = "auto"
    storage: str = DEFAULT_STORAGE
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    checkpoint: CheckpointParams = field(default_factory=CheckpointParams)
    max_restarts: int = 0
    min_world_size: int | None = None
    workers_timeout_s: float = 60.0
    queue_timeout_s: float | None = None
    progress_timeout_s: float | None = 60.0
    resources: Mapping[str, float] | None = None
    interface: str | None = None
    stop_grace_s: float = 20.0
    determinism: Determinism = "default"
    virtual_ranks: int | None = None
    resume_from: str | None = None
    ledger: bool = False

    def __post_init__(self) -> None:
        """Refuse virtual ranks that can't be."""
        check_virtual_ranks(self.determinism, self.virtual_ranks, self.world_size)

    def rank_config(
        self, run_id: str, attempt: int, storage: Storage, resume_from: ResumePoint | None
    ) -> RankConfig:
        """Describe the context of the ranks of one attempt."""
        return RankConfig(
            run_id=run_id,
            attempt=attempt,
            stage="task",
            storage=storage,
            options=dict(self.options),
            seed=self.seed,
            checkpoint=self.checkpoint,
            resume_from=resume_from,
            determinism=self.determinism,
            virtual_ranks=self.virtual_ranks,
            ledger=self.ledger,
        )

    def for_gang(self) -> dict[str, Any]:
        """Return run_gang's arguments."""
        return {
            "world_size": self.world_size,
            "ranks_per_worker": self.ranks_per_worker,
            "backend": self.backend,
            "workers_timeout_s": self.workers_timeout_s,
            "queue_timeout_s": self.queue_timeout_s,
            "progress_timeout_s": self.progress_timeout_s,
            "resources": self.resources,
            "interface": self.interface,
            "stop_grace_s": self.stop_grace_s,
            "max_restarts": self.max_restarts,
            "min_world_size": self.min_world_size,
            "world_size_divides": self.virtual_ranks,
        }


P = ParamSpec("P")
R = TypeVar("R")

_OURS = {part.name for part in fields(GangOptions)}


class GangTask(WatchedTask[P, R]):
    """A task whose function runs on ranks."""

    gang = GangOptions()
    call: str | None = None
    """Which call of the flow run it is for; None before it is called."""

    @classmethod
    def of(cls, fn: Callable[P, R], gang: GangOptions, **task_options: Any) -> Self:
        """Make one."""
        made = cls(fn, **task_options)
        made.gang = gang
        made.stop_grace_s = gang.stop_grace_s
        return made

    def with_options(self, **options: Any) -> Self:
        """Make a task that differs in some options, Prefect's or those of `ddp_task`."""
        ours = {name: options.pop(name) for name in _OURS & options.keys()}
        made = super().with_options(**options)
        made.gang = replace(self.gang, **ours)
        made.stop_grace_s = made.gang.stop_grace_s
        return made

    def for_call(self, key: str) -> Self:
        """Return the task for one call."""
        made = copy.copy(self)
        made.call = key
        return made

    def submitting(self) -> AbstractContextManager[None]:
        """Tell the calls apart that are submitted in here."""
        return numbered(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it, as any task."""
        given = {
            name: value
            for name, value in kwargs.items()
            if name not in ("return_state", "wait_for")
        }
        call = (
            begin_call(self, get_call_parameters(self.fn, args, given))
            if self.call is None
            else None
        )
        if call is None:
            return super().__call__(*args, **kwargs)
        try:
            value = super(GangTask, self.for_call(call.key)).__call__(*args, **kwargs)
        except BaseException:
            call.is_lost = True
            raise
        call.is_lost = isinstance(value, State) and not value.is_completed()
        return value


def run_as_task(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run the function on the ranks of the task that this process runs, and return rank 0's
    value.
    """
    context = TaskRunContext.get()
    assert context is not None
    task = context.task
    assert isinstance(task, GangTask)
    where = resolve_storage(task.gang.storage)
    where.check_writable()  # one that ignores conditions would let two attempts commit
    run_id = _run_id(task, str(context.task_run.id))
    resume_from = _source(task.gang.resume_from, where, run_id)
    get_run_logger().info("trains as run %s in %s", run_id, where.uri)
    with current_client() as client:
        values: list[Any] = run_gang(
            client,
            RUN_WITH_CONTEXT,
            args=lambda attempt: (
                task.gang.rank_config(run_id, attempt, where, resume_from),
                fn,
                args,
                kwargs,
            ),
            name=run_id,
            attempt_log=RunAttemptLog(where, run_id, knows_steps=False),
            on_event=log_to_run(),
            **task.gang.for_gang(),
        )
    return values[0]


def _run_id(task: GangTask[Any, Any], task_run_id: str) -> str:
    """Name the training: the same for every retry of the flow run, where the task knows its
    call.
    """
    if task.call is None or flow_run.id is None:
        return f"{slug(task.name)}-{task_run_id}"
    return f"{slug(task.name)}-{flow_run.id[:8]}-{task.call}"


def _source(reference: str | None, own: Storage, run_id: str) -> ResumePoint | None:
    """Read resume_from, and refuse it before a rank starts where there is nothing to begin
    from.
    """
    if reference is None:
        return None
    source = parse_resume_from(reference, own, resolve_storage)
    if newest(own, run_id) is None:  # else it resumes from its own
        source.find()
    return source
