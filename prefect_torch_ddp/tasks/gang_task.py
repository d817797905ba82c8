"""Owns the task that runs a function on a gang: its calls are told apart, and each is a training that retries resume."""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, replace
from typing import Any, ParamSpec, Self, TypeVar

from prefect.client.schemas.objects import State
from prefect.context import TaskRunContext
from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from prefect.utilities.callables import get_call_parameters

from prefect_torch_ddp.checkpoint.manifest import newest
from prefect_torch_ddp.checkpoint.source import Source, source_of
from prefect_torch_ddp.gang.launch import run_gang
from prefect_torch_ddp.storage.protocol import Storage
from prefect_torch_ddp.tasks.blocks import resolve_storage
from prefect_torch_ddp.tasks.call_book import begin_call, numbered
from prefect_torch_ddp.tasks.cluster import current_client
from prefect_torch_ddp.tasks.gang_options import GangOptions
from prefect_torch_ddp.tasks.run import RUN_WITH_CONTEXT, log_to_run, slug
from prefect_torch_ddp.tasks.run_journal import RunJournal
from prefect_torch_ddp.tasks.watched_task import WatchedTask

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
        given = {name: value for name, value in kwargs.items() if name not in ("return_state", "wait_for")}
        call = begin_call(self, get_call_parameters(self.fn, args, given)) if self.call is None else None
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
    """Run the function on the ranks of the task that this process runs, and return rank 0's value."""
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
            args=lambda attempt: (task.gang.rank_config(run_id, attempt, where, resume_from), fn, args, kwargs),
            name=run_id,
            journal=RunJournal(where, run_id, knows_steps=False),
            on_event=log_to_run(),
            **task.gang.for_gang(),
        )
    return values[0]


def _run_id(task: GangTask[Any, Any], task_run_id: str) -> str:
    """Name the training: the same for every retry of the flow run, where the task knows its call."""
    if task.call is None or flow_run.id is None:
        return f"{slug(task.name)}-{task_run_id}"
    return f"{slug(task.name)}-{flow_run.id[:8]}-{task.call}"


def _source(reference: str | None, own: Storage, run_id: str) -> Source | None:
    """Read resume_from, and refuse it before a rank starts where there is nothing to begin from."""
    if reference is None:
        return None
    source = source_of(reference, own, resolve_storage)
    if newest(own, run_id) is None:  # else it goes on from its own
        source.find()
    return source
