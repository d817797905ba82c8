"""Starting and ending the process next to the flow that keeps experiment trackers up to date."""

import os
import pickle
import shlex
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import Any, Self

from prefect.context import FlowRunContext, TaskRunContext
from prefect.logging import get_run_logger
from prefect_dask import DaskTaskRunner

from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.params import ContextParams
from prefect_torch_ddp.storage.protocol import Storage
from prefect_torch_ddp.tracking.trackers.feed import OVER, Feed, Told
from prefect_torch_ddp.tracking.trackers.known import check_trackers

LAST_SYNC_S = 10.0
"""How long the end of a flow may wait for the last sync."""
CANCELLED_SYNC_S = 5.0
"""The same, of a flow that is cancelled: Prefect kills its process after 30 s."""
CLOCKS_DIFFER = timedelta(hours=1)
"""By how much the clocks of the server and of a Dask worker may."""


class _Feeds:
    """The feeds that a flow run's stack ends; it has each of them once."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._begun: set[tuple[str, ...]] = set()
        self._lock = threading.Lock()

    @classmethod
    def of(cls, runner: DaskTaskRunner) -> Self:
        """Return those of the flow run whose task runner it is."""
        # The stack lives as long as the flow run. Prefect has no public hook; see `watched`.
        stack = runner._exit_stack  # noqa: SLF001
        feeds: Self = vars(stack).setdefault(cls.__qualname__, cls(stack))
        return feeds

    def begin(self, params: ContextParams, storage: Storage, experiment: str) -> None:
        """Begin to feed these trackers, unless that was begun."""
        name = (*params.trackers, storage.uri, experiment)
        with self._lock:
            if name in self._begun:
                return
            self._begun.add(name)
        self._stack.callback(self._begun.discard, name)
        self._stack.enter_context(trackers_fed(params, storage, experiment))


@contextmanager
def trackers_fed(params: ContextParams, storage: Storage, experiment: str) -> Iterator[None]:
    """Have a process feed the trackers with the runs of this flow run in an experiment.

    At the end of the context it gets some seconds for a last sync. If a tracker isn't up to date
    then, a warning says which command sends the rest. If this process is killed, that one ends.

    Args:
        params: which trackers; none: nothing is started.
        storage: of the runs.
        experiment: of the runs.
    """
    context = FlowRunContext.get()
    if not params.trackers or context is None or context.flow_run is None:
        yield
        return
    run, logger = context.flow_run, get_run_logger()
    since = (run.created or datetime.now(UTC)) - CLOCKS_DIFFER
    feed = Feed(tuple(params.trackers), storage, experiment, str(run.id), since)
    with tempfile.TemporaryFile() as answers:
        process = _start(feed, answers)
        limit_s = LAST_SYNC_S
        try:
            yield
        except BaseException as error:
            limit_s = LAST_SYNC_S if isinstance(error, Exception) else CANCELLED_SYNC_S
            raise
        finally:
            status = _end(process, limit_s)
            late = "its process ended early" if status else ""
            late = f"its last sync took over {limit_s:g} s" if status is None else late
            answers.seek(0)
            for told in _last_of_each(answers.read(), params.trackers):
                _log(logger, told, told.trouble or ("" if told.is_last else late), params.storage)


def feed_until_flow_ends(params: ContextParams, storage: Storage, experiment: str) -> None:
    """Have a process feed the trackers, as `trackers_fed` does, until the flow ends.

    Further calls in the same flow run, for the same trackers, storage and experiment, do nothing.

    Raises:
        InvalidParamsError: as `check_trackers`; or this is within a task of the flow, or in another
            process that has its context.
    """
    check_trackers(params.trackers, storage)
    context, outer = FlowRunContext.get(), TaskRunContext.get()
    if not params.trackers or context is None or context.flow_run is None:
        return
    in_task = outer is not None and outer.task_run.flow_run_id == context.flow_run.id
    if in_task or context.detached:
        # Each of them would have a feed, and all of those feed the same runs.
        msg = (
            f"a ddp_task with trackers={list(params.trackers)} can't be called within a task, or "
            "in another process of the flow: call it in the flow's own, or leave out trackers and "
            "run `prefect-torch-ddp sync` later"
        )
        raise InvalidParamsError(msg)
    if not isinstance(context.task_runner, DaskTaskRunner):
        return  # the task itself refuses it
    _Feeds.of(context.task_runner).begin(params, storage, experiment)


def _start(feed: Feed, answers: Any) -> "subprocess.Popen[bytes]":
    # In its own session, as the flow watch: a Ctrl-C in the terminal isn't meant for it.
    process = subprocess.Popen(
        [sys.executable, "-m", "prefect_torch_ddp.tracking.trackers.feed"],
        env=dict(os.environ),
        stdin=subprocess.PIPE,
        stdout=answers,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it ended: `_end` sees that
        process.stdin.write(pickle.dumps(feed))
        process.stdin.flush()
    return process


def _end(process: "subprocess.Popen[bytes]", limit_s: float) -> int | None:
    """Let it sync once more; return how it ended, None if it took longer."""
    status = None
    try:
        with suppress(subprocess.TimeoutExpired):
            process.communicate(OVER, limit_s)
            status = process.returncode
    finally:
        process.kill()
        process.wait()
    return status


def _last_of_each(answers: bytes, trackers: Iterable[str]) -> Iterator[Told]:
    """Yield what was said last of each run and tracker; of a tracker, if it has no run."""
    # A process that died before it said anything is told of too.
    all_told = [*(Told(name, "") for name in trackers), *Told.read(answers)]
    last = {(each.tracker, each.run_id): each for each in all_told}
    with_runs = {each.tracker for each in last.values() if each.run_id}
    for each in last.values():
        if each.run_id or each.trouble or each.tracker not in with_runs:
            yield each


def _log(logger: Any, told: Told, trouble: str, storage: str) -> None:
    run = told.run_id or "RUN"
    sync = ["prefect-torch-ddp", "sync", run, "--tracker", told.tracker, "--storage", storage]
    if trouble:
        of = f"run {run}" if told.run_id else "the flow's runs"
        text = "%s doesn't have all of %s: %s; `%s` brings it up to date"
        logger.warning(text, told.tracker, of, trouble, shlex.join(sync))
    elif told.url:
        logger.info("run %s in %s: %s", run, told.tracker, told.url)
    elif not told.run_id:
        logger.info("%s got no run: the flow has none in %s", told.tracker, storage)
