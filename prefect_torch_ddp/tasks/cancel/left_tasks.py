"""How a flow that ends stops the tasks that it leaves."""

import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NamedTuple, Self
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.exceptions import TerminationSignal
from prefect_dask.task_runners import PrefectDaskFuture

from prefect_torch_ddp.tasks.cancel.api import (
    LOOK_S,
    REQUEST_ERRORS,
    SLACK_S,
    close,
    close_all,
    is_away,
    own_client,
    run_logger,
    state_of,
)

SIGNALS = (KeyboardInterrupt, TerminationSignal)
"""What Ctrl-C, SIGTERM and Prefect's cancel are in a flow's thread."""
THEIRS = "dask_jobqueue.runner"
"""The module whose handler of Ctrl-C isn't Python's."""


def obey_ctrl_c() -> None:
    """Have Ctrl-C raise KeyboardInterrupt, if dask-jobqueue has it raise SystemExit.

    dask-jobqueue sets that handler when it is imported. The flow would crash, its ranks would be
    killed before they save, and its script would exit with 0.

    It is called before a run's cluster is started or connected to, and at each wait for a submitted
    task. So it holds from then on, unless user code imports dask-jobqueue later; before, Ctrl-C
    still raises SystemExit. Another handler is kept, and so is every one outside the main thread.
    """
    is_theirs = getattr(signal.getsignal(signal.SIGINT), "__module__", "") == THEIRS
    if is_theirs and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)


class _Limits(NamedTuple):
    """Until when a task may begin, which Prefect may hear late, and until when it may end."""

    begins_s: float
    ends_s: float


def stop_task(
    task: PrefectDaskFuture[Any],
    grace_s: float,
    why: str = "cancelled",
    cause: BaseException | None = None,
) -> str:
    """Stop one task, as `stop_tasks` does; return what its task run says about its end."""
    (said,) = stop_tasks([(task, grace_s)], why, cause)
    return said


def stop_tasks(
    tasks: Sequence[tuple[PrefectDaskFuture[Any], float]],
    why: str = "cancelled",
    cause: BaseException | None = None,
) -> list[str]:
    """Cancel the tasks' Dask keys, which their gangs notice, and wait for the task runs' ends.

    The cluster must live so long.

    Args:
        tasks: submitted tasks' futures, each with how long it gets to end; at least one.
        why: what became of their flow, cancelled or suspended.
        cause: what the flow left its wait by, if anything.

    Returns:
        What each task run says about it.
    """
    said: list[str] = []
    try:
        with _HeldSignals() as signals:
            _warn(len(tasks), max(grace_s for _, grace_s in tasks), f"{why}:", _again(cause))
            # All before the first wait, and by one message. Prefect kills the process of a run that
            # it cancels, and one that is stopped lets another that waits for its workers begin.
            futures = [task.wrapped_future for task, _ in tasks]
            if pending := [future for future in futures if future.status == "pending"]:
                pending[0].client.cancel(pending, force=True)
            begins_s = time.monotonic() + SLACK_S
            with own_client() as client:
                for task, grace_s in tasks:
                    limits = _Limits(begins_s, begins_s + grace_s)
                    said.append(_await_end(client, task.task_run_id, limits, why, signals.sleep))
    except SIGNALS:
        # Pressed again: the cluster goes at once, and nobody else would close the task runs.
        close_all([task.task_run_id for task, _ in tasks[len(said) :]], why)
        raise
    return said


def _warn(num_tasks: int, grace_s: float, why: str, again: str) -> None:
    say = run_logger().warning
    if num_tasks == 1:
        gets = "the task gets %g s to end, a training after one step and saved"
        say(f"{why} {gets}; {again} ends it at once", grace_s)
    else:
        get = "%d tasks get up to %g s to end, trainings after one step and saved"
        say(f"{why} {get}; {again} ends them at once", num_tasks, grace_s)


def _again(cause: BaseException | None) -> str:
    """Return what doesn't wait for the task: the signal that came, once more."""
    if isinstance(cause, TerminationSignal):
        return "a second SIGTERM"
    return "Ctrl-C again" if isinstance(cause, KeyboardInterrupt) else "Ctrl-C"


def _await_end(
    client: SyncPrefectClient,
    task_run_id: UUID,
    limits: _Limits,
    why: str,
    sleep: Callable[[float], None],
) -> str:
    """Wait for a task run's end; return what it says about it."""
    has_begun = False
    while True:
        state, is_silent = None, False
        # At least once: the wait for another task's end may have taken all the time.
        try:
            state = state_of(client, task_run_id)
        except REQUEST_ERRORS as error:
            if not is_away(error):
                raise
            is_silent = True  # perhaps restarted; the ranks stop and save all the same
        if state is not None and state.is_final():
            return state.message or ""
        if state is not None and state.is_scheduled():
            close(client, task_run_id, why, time.monotonic() + SLACK_S)
            return "its task waited for a retry"
        has_begun |= state is not None or is_silent
        ends_s = limits.ends_s if has_begun else limits.begins_s
        if time.monotonic() >= ends_s:
            break
        sleep(LOOK_S)
    # Of several tasks, whose time ends at once, only the first waits for an API that is away.
    close(client, task_run_id, why, ends_s + SLACK_S)
    if is_silent:
        return "Prefect did not say how its task ended"
    return "its task did not say how it ended" if has_begun else "its task had not begun"


class _HeldSignals:
    """Within its block, Ctrl-C and SIGTERM raise what they raise only in `sleep`, and at its end.

    Their handlers would raise at any point of the code: in a callback of the garbage collector
    that is lost, and a request or a cleanup is left half done. A signal that comes while another
    is still held raises at once.
    """

    def __init__(self) -> None:
        """Hold nothing yet."""
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._held: int | None = None

    def __enter__(self) -> Self:
        """Begin; signals come only to the main thread, and elsewhere nothing is held."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if callable(handler := signal.getsignal(number)):
                    self._handlers[number] = handler
                    signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        """End, and raise what is still held."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._obey()

    def sleep(self, seconds: float) -> None:
        """Sleep, then raise what is held."""
        time.sleep(seconds)
        self._obey()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._held is None:
            self._held = number
        else:
            self._held = None
            self._handlers[number](number, frame)

    def _obey(self) -> None:
        if self._held is not None:
            number, self._held = self._held, None
            self._handlers[number](number, None)
