"""The live report: a progress bar and a page in Prefect, updated in place while ranks train."""

import contextvars
import copy
import logging
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from typing import Any, Self

from prefect.exceptions import MissingContextError
from prefect.logging import get_run_logger
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.utilities.context import get_task_and_flow_run_ids

from prefect_torch_ddp.errors import DamagedObjectError, NewerFormatError, StorageError
from prefect_torch_ddp.protocol.events import (
    AttemptBegan,
    CheckpointCommitted,
    FailureRecord,
    GangEvent,
    Progress,
    Waiting,
)
from prefect_torch_ddp.records.rank_log import LogFolder
from prefect_torch_ddp.storage.protocol import Storage
from prefect_torch_ddp.tasks.report.artifacts import (
    ArtifactWriter,
    artifact_client,
    key,
    put_page,
    put_runs,
    ui_url,
)
from prefect_torch_ddp.tasks.report.curves import Curves
from prefect_torch_ddp.tasks.report.markdown import text
from prefect_torch_ddp.tasks.report.page.headline import RunView
from prefect_torch_ddp.tasks.report.page.links import Links
from prefect_torch_ddp.tasks.report.page.plot import render_curves
from prefect_torch_ddp.tasks.report.progress import Status, TrainingProgress
from prefect_torch_ddp.tasks.report.report_file import ReportFile, last_lines
from prefect_torch_ddp.tasks.report.stored import Readings
from prefect_torch_ddp.tracking.recorder import RunRecorder

FINISH_TIMEOUT_S = 20.0
"""How long a training's end waits for everything that is to be shown and recorded: a request that
meets a busy server is given up after 5 s, and tried again."""
RETRY_S = 0.5
"""Between two tries to read and write the end."""
LASTING = NewerFormatError, DamagedObjectError
"""Errors of a storage that reading again doesn't remove."""


class LiveReport:
    """Shows a training in Prefect while it runs, and how it ended: a page and a progress artifact.

    Made in a task, used as a context manager around the training. `receive` costs microseconds: a
    separate thread talks to Prefect and the storage, has the run record written, and reads what
    ranks recorded: every `interval_s`, when an attempt begins or fails, and at the end. Nothing
    that goes wrong there reaches the training.
    """

    def __init__(
        self,
        storage: Storage,
        training: TrainingProgress,
        recorder: RunRecorder,
        *,
        is_published: bool = False,
        interval_s: float = 5.0,
    ) -> None:
        """Make it, without anything shown yet.

        Args:
            storage: of the run.
            training: what is known of it.
            recorder: of its run record; it hears of everything that this does.
            is_published: another task of the flow run completes the page; otherwise each task run
                has its own artifacts.
            interval_s: between two updates.
        """
        self._storage = storage
        self._training = training
        self._recorder = recorder
        self._interval_s = interval_s
        self._is_published = is_published
        self._readings = Readings(storage, interval_s)
        self._shown: dict[str, Any] = {}
        """What was read, by the names of RunView."""
        self._unread: dict[str, bool] = {}
        """What the last reading failed for, and whether it may be read later."""
        self._lock = threading.Lock()
        self._has_news = True
        self._give_up_s: float | None = None
        """Once the training is over: until when its end may be shown and recorded."""
        self._is_whole = False
        """Whether what was read of its end has been."""
        self._wake = threading.Event()
        self._started_s = time.monotonic()
        self._run_ids = get_task_and_flow_run_ids()
        self._logger: logging.Logger | logging.LoggerAdapter[Any] = logging.getLogger(__name__)
        with suppress(MissingContextError):
            self._logger = get_run_logger()
        self._links = Links(ui_url())
        self._kept = ""
        """Where the report is, once it has been written."""
        self._warned: set[str] = set()
        self._writer: ArtifactWriter | None = None
        # Prefect's settings, the API's address with them, live in a context variable that a new
        # thread would not see.
        context = contextvars.copy_context()
        self._thread = threading.Thread(
            target=context.run, args=(self._keep_writing,), name="live-report", daemon=True
        )

    def receive(self, event: GangEvent) -> None:
        """Take in what the gang says: where rank 0 is, and that ranks start, perhaps fewer."""
        with self._lock:
            self._has_news = True
            match event:
                case Progress():
                    self._training.add(event, time.monotonic())
                case CheckpointCommitted():
                    self._training.checkpoint_every_s = event.every_s
                case AttemptBegan():
                    self._training.begin_attempt(event)
                case Waiting():
                    self._training.waiting = event.text
        self._recorder.receive(event)
        if isinstance(event, AttemptBegan | FailureRecord):
            self._wake.set()

    def link_dashboard(self, url: str, tunnel: str) -> None:
        """Show where the Dask cluster's dashboard is, and the command that forwards its port."""
        with self._lock:
            self._shown.update(dashboard=url, dashboard_tunnel=tunnel)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        # The end is shown at once, if the API and the storage answer.
        self._recorder.end(error)
        with self._lock:
            state = self._recorder.record.state
            finished: Status = "trained" if self._is_published else "finished"
            self._training.status = finished if state == "completed" else state
            self._training.cause = "" if error is None else f"{type(error).__name__}: {error}"
            self._give_up_s = time.monotonic() + FINISH_TIMEOUT_S
        self._wake.set()
        self._thread.join(FINISH_TIMEOUT_S)
        if not self._is_whole:
            msg = "the run's record and page may lack the end: they weren't written within %.0f s"
            self._logger.warning(msg, FINISH_TIMEOUT_S)
        elif self._unread and not self._recorder.is_superseded:
            names = ["metrics" if name == "curves" else name for name in list(self._unread)]
            msg = "the run's record and page may lack the end: its %s couldn't be read"
            self._logger.warning(msg, ", ".join(names))
        record = self._recorder.record
        lines = last_lines(record, self._links, self._kept) if self._is_end else []
        self._recorder.flush(report_uri=self._kept if self._is_end else "")
        if error is not None and record.state == "failed":
            for line in lines:
                error.add_note(line)  # below the traceback, which is what the log ends with
        else:
            for line in lines:
                self._logger.info("%s", line)

    @property
    def _is_end(self) -> bool:
        """Whether the training has ended, isn't tried again, and no other task follows it."""
        is_followed = self._is_published and self._recorder.record.state == "completed"
        is_over = self._give_up_s is not None
        return is_over and self._recorder.is_last and not is_followed

    def _keep_writing(self) -> None:
        # Prefect's own retries last a minute; ours come at the interval.
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}), ExitStack() as stack:
            # Asked before writing: what is written after the training was over is the end.
            while self._give_up_s is None:
                self._try("write the run's record", self._recorder.write)
                self._read(is_last=False)
                # A training that continues elsewhere keeps its page.
                if not self._recorder.is_superseded:
                    self._try("be written", self._write, stack)
                self._wake.wait(self._interval_s)
                self._wake.clear()
            self._write_end(stack, self._give_up_s)

    def _write_end(self, stack: ExitStack, give_up_s: float) -> None:
        """Read the end, write the record and the page; again until all is done, or given up."""
        self._warned.clear()  # what fails now is logged, also if it failed before
        self._try("write the run's record", self._recorder.write)
        self._read(is_last=True)
        self._put_end(stack, is_new=True)
        missing = self._missing()
        while (missing or not self._is_whole) and time.monotonic() < give_up_s:
            self._wake.wait(RETRY_S)
            self._wake.clear()
            if missing:
                self._read(is_last=True, only=missing)
            before, missing = missing, self._missing()
            self._put_end(stack, is_new=missing != before)

    def _missing(self) -> frozenset[str]:
        """Return what couldn't be read of the end, but may be read later."""
        if self._recorder.is_superseded:
            return frozenset()
        return frozenset(name for name, may_be_read in self._unread.items() if may_be_read)

    def _put_end(self, stack: ExitStack, *, is_new: bool) -> None:
        """Write what isn't written; everything if more was read of the end."""
        if is_new:
            self._is_whole = False
            self._settle()
            self._recorder.measure(self._shown.get("ranks", ()), self._shown.get("goodput"))
            # What the last update wrote may have been the end already, before it was read.
            with self._lock:
                self._has_news = True
        is_recorded = self._try("write the run's record", self._recorder.write)
        is_elsewhere = self._recorder.is_superseded
        has_file = is_new and not is_elsewhere
        file = ReportFile(self._storage, self._view()).start() if has_file else None
        is_shown = is_elsewhere or self._try("be written", self._write, stack)
        self._keep(file)
        self._is_whole = is_recorded and is_shown

    def _read(self, *, is_last: bool, only: frozenset[str] = frozenset()) -> None:
        """Read what is due; if `only` has names, only those."""
        before = self._readings.curves
        due = self._readings.due(
            self._recorder.record,
            is_last=is_last,
            has_previous={"previous", "earlier"} <= self._shown.keys(),
            # Of train_flow the task that publishes reads the epochs.
            needs_epochs=self._training.status != "trained",
        )
        for name, read in due.items():
            if not only or name in only:
                self._try(f"read the run's {name}", self._take, name, read)
        if (curves := self._readings.curves) is not before:
            self._try("show the run's curves", self._show, curves)

    def _show(self, curves: Curves) -> None:
        self._recorder.read(curves.last, curves.attempt, curves.read_epoch)
        with self._lock:
            self._training.read(curves.last, curves.attempt)
            self._has_news = True
        self._shown["picture"] = render_curves(curves)

    def _take(self, name: str, read: Callable[[], Any]) -> None:
        self._unread[name] = True
        try:
            self._shown[name] = read()
        except Exception as error:
            is_of_storage = isinstance(error, StorageError | OSError)
            self._unread[name] = is_of_storage and not isinstance(error, LASTING)
            raise
        del self._unread[name]

    def _write(self, stack: ExitStack) -> None:
        if self._writer is None:
            client, per_task = stack.enter_context(artifact_client()), not self._is_published
            self._writer = ArtifactWriter(client, *self._run_ids, per_task=per_task)
        with self._lock:
            if not self._has_news:
                return
            self._has_news = False
        view = self._view()
        line = "; ".join(part for part in (view.training.line, view.training.trouble) if part)
        try:
            progress = view.training.percent, text(line)
            self._writer.put("progress", key("progress", view.record.experiment), *progress)
            put_page(self._writer, view)
            if self._is_end:
                put_runs(self._writer, view)
        except Exception:
            self._has_news = True
            raise

    def _view(self) -> RunView:
        record = self._recorder.record
        with self._lock:
            training = copy.deepcopy(self._training)
        return RunView(
            record,
            training,
            elapsed_s=time.monotonic() - self._started_s,
            updated_at=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
            is_tried_again=self._give_up_s is not None and not self._recorder.is_last,
            logs=LogFolder(self._storage, record.run_id).uri,
            links=self._links,
            **self._shown,
        )

    def _settle(self) -> None:
        """Have the end shown by what is on record, not by what rank 0 said last."""
        curves = self._readings.curves
        position = self._recorder.settle(curves.attempt, curves.step, curves.epoch)
        with self._lock:
            self._training.read(curves.last, curves.attempt)
            if position is not None:
                self._training.settle(*position)

    def _keep(self, file: ReportFile | None) -> None:
        if file is not None:
            if trouble := file.join():
                self._logger.warning("the report could not be written to %s: %s", file.uri, trouble)
            else:
                self._kept = file.uri

    def _try(self, what: str, work: Callable[..., None], *args: Any) -> bool:
        try:
            work(*args)
        except Exception as error:  # noqa: BLE001 - the training continues whatever happens here
            if what not in self._warned:
                self._warned.add(what)
                words = "" if self._give_up_s else "; training continues, and it is tried again"
                self._logger.warning("the live report can't %s now%s: %r", what, words, error)
            return False
        return True
