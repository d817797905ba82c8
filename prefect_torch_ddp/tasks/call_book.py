"""Owns which training a call of a ddp_task is: the same call, when its flow run is retried, is
the same training.
"""

import dataclasses
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from enum import Enum
from pathlib import PurePath
from typing import Any, Protocol
from uuid import UUID

from prefect import Task
from prefect.context import FlowRunContext, TaskRunContext
from prefect.task_runners import TaskRunner
from prefect_dask import DaskTaskRunner
from prefect_dask.task_runners import PrefectDaskFuture
from pydantic import BaseModel

_PLACE = "prefect_torch_ddp_calls"


class Numbered(Protocol):
    """A task whose calls are told apart."""

    def for_call(self, key: str) -> Task[Any, Any]:
        """Return the task for one call."""
        ...


@dataclass
class Call:
    """One call, and what became of it."""

    key: str
    future: PrefectDaskFuture[Any] | None = None
    is_lost: bool = False
    """Whether it failed, as far as the flow knows: another call of the same goes on with it."""

    def is_free(self) -> bool:
        """Tell whether it failed, by the flow's word or by Dask's."""
        if self.is_lost or self.future is None:
            return self.is_lost
        dask = self.future.wrapped_future
        if dask.status == "finished":
            state = dask.result()
            return bool(state.is_final() and not state.is_completed())
        return dask.status != "pending"


@dataclass
class CallBook:
    """The calls of one flow run since it began, or since it was retried."""

    _calls: dict[str, list[Call]] = field(default_factory=dict)
    _writing: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, what: str) -> Call:
        """Return the call that this is: one of the same that failed, or else the next one."""
        with self._writing:
            calls = self._calls.setdefault(what, [])
            for number, call in enumerate(calls):
                if call.is_free():
                    calls[number] = Call(call.key)
                    return calls[number]
            calls.append(Call(f"{what}-{len(calls)}"))
            return calls[-1]

    def lose(self, task_run_id: UUID) -> None:
        """Take note that a task run was given up, though Dask doesn't know."""
        with self._writing:
            for call in (call for calls in self._calls.values() for call in calls):
                call.is_lost |= call.future is not None and call.future.task_run_id == task_run_id


def begin_call(task: Task[Any, Any], parameters: Mapping[str, Any]) -> Call | None:
    """Return the call that this is, by the flow run, the task and its arguments; None outside
    of a flow run.

    Arguments count by what they are where that is plain: numbers, texts, paths, collections and
    models of them. Anything else counts by its type, so that it is the same one after a retry;
    equal calls are told apart by their order.
    """
    context, parent = FlowRunContext.get(), TaskRunContext.get()
    if context is None or context.flow_run is None:
        return None
    caller = [str(context.flow_run.id)]
    if (
        parent is not None
    ):  # a task that calls it: other task runs do so as well, in no certain order
        caller.append(str(parent.task_run.id))
    what = json.dumps(
        [*caller, task.name, getattr(task.fn, "__qualname__", ""), _plain(parameters)],
        sort_keys=True,
    )
    return book_of(context).begin(hashlib.sha256(what.encode()).hexdigest()[:10])


def book_of(context: FlowRunContext) -> CallBook:
    """Return the flow run's book; a retry has a task runner of its own, and so a new one."""
    book: CallBook = vars(context.task_runner).setdefault(_PLACE, CallBook())
    return book


@contextmanager
def numbered(task: Numbered) -> Iterator[None]:
    """Have what is submitted in here told apart, each element of a map as well."""
    context = FlowRunContext.get()
    if context is None or not isinstance(context.task_runner, DaskTaskRunner):
        yield
        return
    with context.model_copy(update={"task_runner": _NumberingRunner(context, task)}):
        yield


class _NumberingRunner(TaskRunner[Any]):
    """Stands before the flow's runner, since that is where a call's arguments are known, and
    each element of a map is a call.
    """

    def __init__(self, context: FlowRunContext, task: Numbered) -> None:
        super().__init__()
        self._started = True
        self._inner = context.task_runner
        self._task = task
        vars(self)[_PLACE] = book_of(context)

    def duplicate(self) -> "_NumberingRunner":
        return self

    def submit(
        self, task: Any, parameters: dict[str, Any], wait_for: Any = None, dependencies: Any = None
    ) -> Any:
        call = begin_call(task, parameters)
        assert call is not None
        call.future = self._inner.submit(
            self._task.for_call(call.key), parameters, wait_for, dependencies
        )
        return call.future


def _plain(value: Any) -> Any:
    """Return what of an argument is the same in another process; JSON takes it."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return sorted(([_plain(key), _plain(item)] for key, item in value.items()), key=json.dumps)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((_plain(item) for item in value), key=json.dumps)
    return [type(value).__qualname__, _content(value)]


def _content(value: Any) -> Any:
    if isinstance(value, bytes):
        return hashlib.sha256(value).hexdigest()
    if isinstance(value, PurePath | UUID | Enum | date):
        return str(value)
    if isinstance(value, BaseModel):
        return _plain(dict(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [
            [part.name, _plain(getattr(value, part.name))] for part in dataclasses.fields(value)
        ]
    return None  # a tensor, a future, a model: its type has to do
