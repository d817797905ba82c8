"""The live report: a progress bar and a page in Prefect, updated in place while ranks train."""

import contextvars
import logging
import threading
import time
from contextlib import ExitStack
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Self

from prefect.client.orchestration import get_client
from prefect.exceptions import MissingContextError
from prefect.logging import get_run_logger
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.utilities.context import get_task_and_flow_run_ids

from prefect_torch_ddp.protocol.events import AttemptBegan, Progress
from prefect_torch_ddp.records.metrics import read_all_records
from prefect_torch_ddp.storage.protocol import Storage
from prefect_torch_ddp.tasks.report.artifacts import ArtifactWriter, key
from prefect_torch_ddp.tasks.report.curves import MetricCurves
from prefect_torch_ddp.tasks.report.plot import render_curves
from prefect_torch_ddp.tasks.report.progress import TrainingProgress, render_live

REQUEST_TIMEOUT_S = 5.0
FINISH_TIMEOUT_S = 10.0
READ_SHARE = 1 / 64
"""Records are read again after this share of the training's age: as often as ranks write them."""


class LiveReport:
    """Shows a training in Prefect while it runs: a progress artifact and a markdown report.

    Made in a task, used as a context manager around the training. `update` costs microseconds: a
    thread of its own talks to Prefect and reads the run's records, at most every `interval_s` and
    once at the end. Nothing that goes wrong there reaches the training.
    """

    def __init__(
        self, storage: Storage, training: TrainingProgress, *, interval_s: float = 3.0
    ) -> None:
        self._records = _RunCurves(storage, training.run_id)
        self._training = training
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._has_news = True
        self._finishing = threading.Event()
        self._started_s = time.monotonic()
        self._run_ids = get_task_and_flow_run_ids()
        self._logger = _logger()
        self._warned: set[str] = set()
        # Prefect's settings, the API's address with them, live in a context variable that a new
        # thread would not see.
        context = contextvars.copy_context()
        self._thread = threading.Thread(
            target=context.run, args=(self._keep_writing,), name="live-report", daemon=True
        )

    def begin_attempt(self, began: AttemptBegan) -> None:
        """Take in that the ranks start, perhaps again, perhaps fewer."""
        with self._lock:
            self._training.begin_attempt(began)
            self._has_news = True

    def update(self, progress: Progress) -> None:
        """Take in how far rank 0 is."""
        with self._lock:
            self._training.add(progress, time.monotonic())
            self._has_news = True

    def finish(self, *, succeeded: bool = True) -> None:
        """Show the end at once; gives up after ten seconds on an API that doesn't answer."""
        with self._lock:
            self._training.status = "finished" if succeeded else "stopped"
            self._has_news = True
        self._finishing.set()
        self._thread.join(FINISH_TIMEOUT_S)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.finish(succeeded=error is None)

    def _keep_writing(self) -> None:
        # Prefect's own retries last a minute; ours come at the interval.
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}), ExitStack() as stack:
            writer: ArtifactWriter | None = None
            next_read_s = 0.0
            last = False
            while not last:
                # Asked before writing: what is written after the flag went up is the end.
                last = self._finishing.is_set()
                age_s = time.monotonic() - self._started_s
                if last or age_s >= next_read_s:
                    next_read_s = age_s + max(self._interval_s, age_s * READ_SHARE)
                    self._read()
                try:
                    writer = writer or self._connect(stack)
                    self._write(writer)
                except Exception as error:  # noqa: BLE001 - the training goes on whatever happens to its report
                    self._warn_once("be written", error)
                if not last:
                    self._finishing.wait(self._interval_s)

    def _read(self) -> None:
        try:
            if self._records.read_new():
                with self._lock:
                    self._has_news = True
        except Exception as error:  # noqa: BLE001 - as above
            self._warn_once("read the run's records", error)

    def _connect(self, stack: ExitStack) -> ArtifactWriter:
        # With settings of its own the client is not the one that the task's thread uses.
        client = get_client(sync_client=True, httpx_settings={"timeout": REQUEST_TIMEOUT_S})
        return ArtifactWriter(stack.enter_context(client), *self._run_ids)

    def _write(self, writer: ArtifactWriter) -> None:
        now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        with self._lock:
            if not self._has_news:
                return
            self._has_news = False
            training = self._training
            done = training.percent
            line = "; ".join(part for part in (training.line, training.trouble) if part)
            elapsed_s = time.monotonic() - self._started_s
            page = render_live(training, elapsed_s, now, self._records.picture)
        try:
            writer.put("progress", key("progress"), done, line)
            writer.put("markdown", key("report"), page, f"Run {training.run_id}, live")
        except Exception:
            with self._lock:
                self._has_news = True
            raise

    def _warn_once(self, what: str, error: Exception) -> None:
        if what not in self._warned:
            self._warned.add(what)
            self._logger.warning(
                "the live report can't %s now; training continues, and it is tried again: %r",
                what,
                error,
            )


class _RunCurves:
    """The picture of a run's curves, from the parts of its records that there are."""

    def __init__(self, storage: Storage, run_id: str) -> None:
        self._storage = storage
        self._run_id = run_id
        self._known: set[str] = set()
        self._curves = MetricCurves()
        self.picture = ""

    def read_new(self) -> bool:
        records = read_all_records(self._storage, self._run_id, known=self._known)
        if records:
            self._curves.add(records)
            self.picture = render_curves(self._curves.curves, self._curves.epoch_ends)
        return bool(records)


def _logger() -> "logging.Logger | logging.LoggerAdapter[Any]":
    try:
        return get_run_logger()
    except MissingContextError:
        return logging.getLogger(__name__)
