"""Waiting for a submitted task under watch, where Dask and Prefect would wait forever."""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from contextvars import Context, copy_context
from typing import Any, TypeVar
from uuid import UUID

from distributed import Client, Future
from distributed.client import FutureCancelledError
from distributed.scheduler import KilledWorker
from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext
from prefect.exceptions import CancelledRun
from prefect.futures import PrefectFuture, PrefectFutureList
from prefect.states import Crashed
from prefect_dask import DaskTaskRunner
from prefect_dask.task_runners import PrefectDaskFuture

from prefect_torch_ddp.errors import (
    GangCancelledError,
    NotEnoughWorkersError,
    SchedulerLostError,
    SupervisorLostError,
)
from prefect_torch_ddp.gang.caller.workers import WaitingSign
from prefect_torch_ddp.gang.liveness import own_task_watch
from prefect_torch_ddp.tasks.cancel.api import set_state_if_known
from prefect_torch_ddp.tasks.cancel.left_tasks import obey_ctrl_c, stop_tasks
from prefect_torch_ddp.tasks.cancel.request import (
    cancel_request,
    close_cancelled,
    run_without_runner,
)
from prefect_torch_ddp.tasks.watch.task_watch import CALLED_EVERY_S, TaskWatch
from prefect_torch_ddp.tasks.watch.terminal import Display

R = TypeVar("R")

TASKS = "prefect_torch_ddp_tasks"
"""The attribute of a task runner's stack that holds the tasks that its flow submitted."""

logger = logging.getLogger(__name__)


def follow(
    task: PrefectDaskFuture[Any],
    client: Client,
    *,
    owns_workers: bool,
    left_s: Callable[[], float] = lambda: math.inf,
    workers_timeout_s: float = math.inf,
) -> None:
    """Wait until the task has ended, well or not, or no time is left.

    `left_s` is asked about every second.

    Raises:
        SupervisorLostError, SchedulerLostError: what ran the task is lost. Then the task run is
            Crashed at Prefect, where it would stay Running forever.
        NotEnoughWorkersError: the cluster has had no worker for `workers_timeout_s`; after the task
            had begun, that is a SupervisorLostError.
        GangCancelledError: who waits is a Dask task itself, and isn't wanted any more.
        Pause: the flow run was suspended.
        CancelledRun: the flow run was cancelled in Prefect, and has no runner that would stop it.
    """
    obey_ctrl_c()
    future: Future[Any] = task.wrapped_future
    watch = TaskWatch(
        client, future, owns_workers=owns_workers, workers_timeout_s=workers_timeout_s
    )
    try:
        display = Display(_name_of(future), client, task.task_run_id)
        _watch(task, watch, display, left_s)
        if future.status != "pending":
            future.result()  # Prefect's state, also of a task that failed
    except KilledWorker as error:
        died = f"Dask worker {error.last_worker.address} died while it ran the task itself"
        raise _crashed(task, SupervisorLostError(died)) from error
    except FutureCancelledError as error:
        if error.reason != "scheduler-connection-lost":
            raise
        gone = "the connection to the scheduler was lost while a task ran"
        raise _crashed(task, SchedulerLostError(gone)) from error
    except (SupervisorLostError, SchedulerLostError, NotEnoughWorkersError) as error:
        _crashed(task, error)
        raise


def _watch(
    task: PrefectDaskFuture[Any], watch: TaskWatch, display: Display, left_s: Callable[[], float]
) -> None:
    future, started_s = task.wrapped_future, time.monotonic()
    sign, why_unwanted = WaitingSign(display.take), own_task_watch()
    with display, cancel_request() as is_cancelled:
        while future.status == "pending" and (wait_s := min(CALLED_EVERY_S, left_s())) > 0:
            # Not result(), which fetches it too: a time-out just as that begins leaves the client
            # unable to fetch any, with an UnboundLocalError (dask/distributed#8514).
            with suppress(TimeoutError):
                future.exception(wait_s)
            _raise_if_suspended()
            if is_cancelled():
                msg = "the flow run was cancelled in Prefect"
                raise CancelledRun(msg)
            if why := why_unwanted():
                msg = f"the wait for {_name_of(future)} was ended by {why}"
                raise GangCancelledError(msg)
            if future.status == "pending":
                watch.look()
                if display.is_shown and not display.has_news:
                    if why := watch.why_not_begun(time.monotonic() - started_s):
                        sign.show(why)
                    else:
                        display.show("")  # it has begun, and hasn't told anything yet
                display.turn()


def _raise_if_suspended() -> None:
    """Raise Prefect's Pause where the flow run was suspended: it ends, to run again once resumed.

    Prefect hears of it, and would itself only look at the next task, after the training.
    """
    context = FlowRunContext.get()
    if context is not None:
        context.flow_run_suspension_request.raise_if_requested()


def _name_of(future: Future[Any]) -> str:
    key = str(future.key)
    return key.rpartition("-")[0] or key  # Dask adds a digest to the function's name


def _crashed(task: PrefectDaskFuture[Any], error: Exception) -> Exception:
    """Set a task run that is lost Crashed; return how it was lost."""
    try:
        with get_client(sync_client=True) as client:
            set_state_if_known(client, task.task_run_id, Crashed(message=str(error)))
    except Exception as refused:  # noqa: BLE001 - the loss is what the flow has to hear of
        words = "Prefect could not be told that task run %s is lost: %s"
        logger.warning(words, task.task_run_id, refused)
    return error


class WatchedFuture(PrefectDaskFuture[R]):
    """A future that raises when the task's worker, or the scheduler, is lost."""

    def __init__(self, future: PrefectDaskFuture[R], client: Client) -> None:
        """Take the place of a task's future."""
        super().__init__(future.task_run_id, future.wrapped_future)
        self._client = client
        self._loss: Exception | None = None
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[PrefectFuture[R]], None]] = []
        self._watcher: threading.Thread | None = None

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the task has ended, or is lost, or the seconds are over."""
        until_s = math.inf if timeout is None else time.monotonic() + timeout
        self.wait_for(lambda: until_s - time.monotonic())

    def wait_for(self, left_s: Callable[[], float]) -> None:
        """Wait so, while there are seconds left; that is asked about every second."""
        if self._loss is not None or self._final_state is not None:
            return
        try:
            # Other tasks may run on these workers, and for good reasons be silent: the task's
            # own is watched, no other.
            follow(self, self._client, owns_workers=False, left_s=left_s)
        except (SupervisorLostError, SchedulerLostError) as error:
            self._loss = error
        except (GangCancelledError, CancelledRun):
            if self.wrapped_future.status == "pending":
                raise  # who waits was cancelled; else it is the task's own
        except Exception:  # noqa: BLE001 - `result` raises it
            return
        else:
            if self.wrapped_future.status != "pending":
                super().wait()

    def add_done_callback(self, fn: Callable[[PrefectFuture[R]], None]) -> None:
        """Call `fn` in another thread when the task has ended or is lost.

        Prefect's `as_completed`, and its `wait` with a timeout, wait for nothing else. What `fn`
        raises is logged.
        """
        with self._lock:
            self._callbacks.append(fn)
            if self._watcher is None:
                # The context has the flow run, which may be suspended.
                self._watcher = threading.Thread(
                    target=self._call_back, args=(copy_context(),), daemon=True
                )
                self._watcher.start()

    def _call_back(self, context: Context) -> None:
        with suppress(BaseException):  # `result` raises it, also that the flow was suspended
            context.run(self.wait)
        with self._lock:
            callbacks, self._callbacks, self._watcher = self._callbacks, [], None
        for fn in callbacks:
            try:
                fn(self)
            except Exception:  # the others may be what somebody waits for
                logger.exception("a callback of task run %s failed", self.task_run_id)

    # The signature is Prefect's.
    def result(
        self,
        timeout: float | None = None,
        raise_on_failure: bool = True,  # noqa: FBT001, FBT002
    ) -> R:
        """Return the result, or raise what the task raised or how it was lost.

        Raises:
            SupervisorLostError, SchedulerLostError: the task was lost.
            TimeoutError: it hasn't ended within `timeout` seconds.
        """
        self.wait(timeout)
        watcher = self._watcher
        if watcher is not None and self.wrapped_future.status != "pending":
            watcher.join()  # it may have cancelled a lost task just now, and says why
        if self._loss is None:
            if timeout is not None and self.wrapped_future.status == "pending":
                msg = f"task run {self.task_run_id} did not complete within {timeout:g} s"
                raise TimeoutError(msg)
            return super().result(None, raise_on_failure)
        if raise_on_failure:
            raise self._loss
        return self._loss  # type: ignore[return-value]  # as Prefect does with a failed task

    def has_failed(self) -> bool:
        """Tell whether the task has ended, and not well; without waiting."""
        if self._loss is None and self._final_state is None:
            if self.wrapped_future.status == "pending":
                return False
            self.wait()
        return self._final_state is None or not self._final_state.is_completed()


class WatchedFutures(PrefectFutureList[R]):
    """Futures of a mapped task. Prefect's own list waits for all at once, and watches none."""

    # The signature is Prefect's.
    def result(
        self,
        timeout: float | None = None,
        raise_on_failure: bool = True,  # noqa: FBT001, FBT002
    ) -> list[R]:
        """Return the results in their order; of a task that fails, its error as soon as it has.

        Raises:
            SupervisorLostError, SchedulerLostError: a task was lost.
        """
        own = [each for each in self if isinstance(each, WatchedFuture)]
        if timeout is not None or len(own) < len(self):
            return super().result(timeout, raise_on_failure)
        for future in own if raise_on_failure else ():
            future.wait_for(lambda: 0 if any(each.has_failed() for each in own) else math.inf)
            for failed in (each for each in own if each.has_failed()):
                failed.result()
        return [each.result(raise_on_failure=raise_on_failure) for each in own]


def _stop_if_left(
    tasks: list[tuple[PrefectDaskFuture[Any], float]],
    is_suspended: Callable[[], bool],
    run_id: UUID | None,
    left_by: BaseException | None,
) -> None:
    # The flow leaves them by Ctrl-C, SIGTERM, a suspension or an error; the cluster closes next,
    # and would cut their ranks short.
    left = [each for each in tasks if each[0].wrapped_future.status == "pending"]
    tasks.clear()
    if not left:
        return
    try:
        stop_tasks(left, "suspended" if is_suspended() else "cancelled", left_by)
        close_cancelled(run_id)
    except Exception as trouble:  # noqa: BLE001 - what ended the flow must not be hidden by it
        words = "task runs %s could not be stopped gracefully: %s"
        logger.warning(words, ", ".join(str(each.task_run_id) for each, _ in left), trouble)


def watched(made: Any, grace_s: float) -> Any:
    """Return a submitted task's future as one that is watched, and stopped if its flow leaves it.

    Args:
        made: what `submit` returned.
        grace_s: how long it gets to stop.
    """
    context = FlowRunContext.get()
    if (
        isinstance(made, PrefectDaskFuture)
        and context is not None
        and isinstance(context.task_runner, DaskTaskRunner)
    ):
        future = WatchedFuture(made, context.task_runner.client)
        # The runner's client, and a cluster that it started, are closed by this stack too,
        # after what came later.
        # Prefect has no public hook.
        is_suspended = context.flow_run_suspension_request.is_requested
        stack = context.task_runner._exit_stack  # noqa: SLF001
        # The context of the flow run is left before that.
        run_id = run_without_runner()
        # One list a stack: the first of these calls, which is the one pushed last, stops all. So
        # no tracker's feed that was begun for one of them ends before.
        tasks = vars(stack).setdefault(TASKS, [])
        tasks.append((made, grace_s))
        stack.push(lambda _, error, __: _stop_if_left(tasks, is_suspended, run_id, error))
        return future
    return made  # a state, or another runner's future


def watched_list(made: Iterable[Any], grace_s: float) -> Any:
    """Return the futures of a mapped task in a list of their kind, each as `watched` returns it."""
    kind: Any = WatchedFutures
    return kind(watched(each, grace_s) for each in made)
