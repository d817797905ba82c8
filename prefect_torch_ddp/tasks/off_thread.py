"""Submitting a Prefect task that holds no thread of its Dask worker while it waits.

Prefect's engine runs on the worker. It waits there before the task's function, for a slot of a
concurrency limit, and after it, for a retry. As prefect-dask submits a task, these waits take a
thread which the ranks of another training may need.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ParamSpec, Self, TypeVar
from uuid import uuid4

from distributed import Future
from prefect import Task
from prefect.client.schemas.objects import RunInput
from prefect.context import FlowRunContext, serialize_context
from prefect.futures import PrefectFuture
from prefect.settings import PREFECT_API_URL
from prefect.task_engine import run_task_sync
from prefect.task_runners import TaskRunner
from prefect.utilities.collections import visit_collection
from prefect.utilities.engine import collect_task_run_inputs_sync
from prefect_dask import DaskTaskRunner
from prefect_dask.task_runners import PrefectDaskFuture

from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.gang.caller.workers import workers_away
from prefect_torch_ddp.gang.own_task import leave_thread
from prefect_torch_ddp.server import flow_server
from prefect_torch_ddp.tasks.cancel.left_tasks import obey_ctrl_c

P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def off_thread() -> Iterator[None]:
    """Have the tasks submitted in the context leave their Dask worker's thread before they begin.

    Other task runners than a DaskTaskRunner submit as they always do.
    """
    context = FlowRunContext.get()
    if context is None or not isinstance(context.task_runner, DaskTaskRunner):
        yield
        return
    obey_ctrl_c()  # the first task that is submitted starts the cluster
    # On other hosts a temporary server, which only listens on this one, can't be reached.
    shares = not PREFECT_API_URL.value() and workers_away(context.task_runner.client) == {}
    with (
        flow_server() if shares else nullcontext(),
        OffThreadRunner(context.task_runner) as runner,
        context.model_copy(update={"task_runner": runner}),
    ):
        yield


def submit_off_thread(task: Task[P, R], *args: P.args, **kwargs: P.kwargs) -> PrefectFuture[R]:
    """Submit a task that leaves its Dask worker's thread before it begins."""
    with off_thread():
        future: PrefectFuture[R] = task.submit(*args, **kwargs)
        return future


class OffThreadRunner(TaskRunner[PrefectDaskFuture[Any]]):
    """Submits tasks through the client of a DaskTaskRunner."""

    def __init__(self, runner: DaskTaskRunner) -> None:
        """Use this runner's client."""
        super().__init__()
        self._runner = runner

    def duplicate(self) -> Self:
        """Return one for a duplicate of the same runner."""
        return type(self)(self._runner.duplicate())

    def submit(
        self,
        task: Task[Any, Any],
        parameters: dict[str, Any],
        wait_for: Iterable[PrefectFuture[Any]] | None = None,
        dependencies: dict[str, set[RunInput]] | None = None,
    ) -> PrefectDaskFuture[Any]:
        """Submit a task as the DaskTaskRunner and its client do, apart from the thread."""
        task_run_id = uuid4()
        parameters, wait_for = _dask_futures((parameters, wait_for))
        inputs: dict[str, set[Any]] = {
            name: collect_task_run_inputs_sync(value, future_cls=Future)
            | (dependencies or {}).get(name, set())
            for name, value in parameters.items()
        }
        asset = {"task": task, "task_run_id": task_run_id, "task_inputs": inputs}
        future: Any = self._client().submit(
            _run,
            key=f"{task.name}-{uuid4().hex}",
            pure=False,
            task=task,
            task_run_id=task_run_id,
            parameters=parameters,
            wait_for=wait_for,
            return_type="state",
            dependencies=inputs,
            context=serialize_context(asset_ctx_kwargs={**asset, "copy_to_child_ctx": True}),
        )
        future.task_run_id = task_run_id  # what the next task that takes it is shown to depend on
        return PrefectDaskFuture(task_run_id, future)

    def _client(self) -> Any:
        """Return the runner's client, which connects, or starts the cluster, the first time."""
        try:
            return self._runner.client
        except OSError as error:
            why = f"{type(error).__name__}: {error}"
            do = "is its scheduler running, and reachable from here?"
            msg = f"the flow's DaskTaskRunner gave no Dask cluster: {why}; {do}"
            raise InvalidParamsError(msg) from error


def _run(**call: Any) -> Any:
    leave_thread()
    return run_task_sync(**call)


def _dask_futures(given: Any) -> Any:
    """Return a structure with Dask's futures in the places of Prefect's."""

    def unwrap(each: Any) -> Any:
        return each.wrapped_future if isinstance(each, PrefectDaskFuture) else each

    return visit_collection(given, visit_fn=unwrap, return_data=True)
