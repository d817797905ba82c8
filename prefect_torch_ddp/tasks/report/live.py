"""The live report: a progress bar and a page in Prefect, updated in place while ranks train."""

import contextvars
import logging
import threading
import time
from collections import deque
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal, Self

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
from prefect_torch_ddp.tasks.report.markdown import code, duration, fact_table, join, number, text
from prefect_torch_ddp.tasks.report.plot import render_curves

REQUEST_TIMEOUT_S = 5.0
FINISH_TIMEOUT_S = 10.0
READ_SHARE = 1 / 64
"""Records are read again after this share of the training's age: as often as ranks write them."""
SPEED_WINDOW_S = 30.0
MAX_LINE_METRICS = 3


@dataclass
class TrainingProgress:
    """What is known of a running training; bounded in size, however long it runs."""

    run_id: str
    workload: str
    world_size: int
    attempt: int = 1
    status: Literal["training", "finished", "stopped"] = "training"
    newest: Progress | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    """The newest value of each, on rank 0."""
    _seen: deque[tuple[float, int]] = field(default_factory=deque)
    """(time, step) of the events of the last half minute."""

    def begin_attempt(self, began: AttemptBegan) -> None:
        """Take in that the ranks start, perhaps again, perhaps fewer."""
        self.attempt, self.world_size = began.attempt, began.world_size

    def add(self, progress: Progress, now_s: float) -> None:
        """Take in one event; its step may be lower than the last, after a restart.

        Args:
            progress: of rank 0.
            now_s: a monotonic clock's time.
        """
        if self.newest is not None and progress.step < self.newest.step:
            self._seen.clear()  # the speed would have the restart's pause in it
        self.newest = progress
        self.metrics |= progress.metrics
        self._seen.append((now_s, progress.step))
        # Two make a speed.
        while len(self._seen) > 2 and now_s - self._seen[1][0] > SPEED_WINDOW_S:  # noqa: PLR2004
            self._seen.popleft()

    @property
    def steps_per_s(self) -> float | None:
        """The speed of the last half minute; None before there are two events."""
        if len(self._seen) < 2:  # noqa: PLR2004
            return None
        (start_s, start), (end_s, end) = self._seen[0], self._seen[-1]
        return (end - start) / (end_s - start_s) if end_s > start_s and end > start else None

    @property
    def eta_s(self) -> float | None:
        """Seconds that the steps left will take; None where that can't be known."""
        if self.newest is None or self.newest.total_steps is None or self.steps_per_s is None:
            return None
        return max(0, self.newest.total_steps - self.newest.step) / self.steps_per_s

    @property
    def percent(self) -> float:
        """How much of the training is done, 0 to 100; 0 where its length isn't known."""
        if self.status == "finished":
            return 100.0
        if self.newest is None or not self.newest.total_steps:
            return 0.0
        return min(100.0, 100 * self.newest.step / self.newest.total_steps)

    @property
    def trouble(self) -> str:
        """What rank 0 warns of, such as checkpoints that fail; empty where all is well."""
        return self.newest.trouble if self.newest is not None and self.newest.trouble else ""

    @property
    def line(self) -> str:
        """One plain line: `epoch 3, step 120/400, loss 0.123, ETA 40 s`."""
        newest, status = self.newest, self.status
        if newest is None:
            return "no step yet" if status == "training" else f"{status} before the first step"
        total = f"/{newest.total_steps}" if newest.total_steps else ""
        shown = list(self.metrics.items())[:MAX_LINE_METRICS]
        metrics = [f"{' '.join(name.split())} {number(value)}" for name, value in shown]
        ending = [] if self.eta_s is None else [f"ETA {duration(self.eta_s)}"]
        ending = ending if status == "training" else [status]
        return ", ".join([f"epoch {newest.epoch}", f"step {newest.step}{total}", *metrics, *ending])


def render_live(
    training: TrainingProgress, elapsed_s: float, updated_at: str = "", curve: str = ""
) -> str:
    """Render the report of a training that runs.

    Args:
        training: what is known now.
        elapsed_s: seconds since it began.
        updated_at: when, so that a page that stands still shows since when it does.
        curve: a markdown image, or nothing.
    """
    speed = training.steps_per_s
    eta_s = training.eta_s if training.status == "training" else None
    facts = {
        "Run": code(training.run_id),
        "Workload": code(training.workload),
        "World size": f"{training.world_size} ranks",
        "Attempt": str(training.attempt),
        "Elapsed": duration(elapsed_s),
        "Updated": text(updated_at),
        "Throughput": "" if speed is None else f"{number(speed)} steps/s",
        "ETA": "" if eta_s is None else duration(eta_s),
    }
    metrics = {text(name): number(value) for name, value in training.metrics.items()}
    return join(
        f"# Training: {text(training.line)}",
        f"**{text(training.trouble)}**" if training.trouble else "",
        curve,
        fact_table(facts),
        f"## Latest metrics of rank 0\n\n{fact_table(metrics)}" if metrics else "",
    )


class LiveReport:
    """Shows a training in Prefect while it runs: a progress artifact and a markdown report.

    Made in a task, used as a context manager around the training. `update` costs microseconds: a
    thread of its own talks to Prefect and reads the run's records, at most every `interval_s` and
    once at the end. Nothing that goes wrong there reaches the training.
    """

    def __init__(
        self, storage: Storage, training: TrainingProgress, *, interval_s: float = 3.0
    ) -> None:
        self._storage = storage
        self._training = training
        self._interval_s = interval_s
        self._known: set[str] = set()
        """The parts of the run's records that are in the curves."""
        self._curves = MetricCurves()
        self._picture = ""
        self._lock = threading.Lock()
        self._has_news = True
        self._finishing = threading.Event()
        self._started_s = time.monotonic()
        self._run_ids = get_task_and_flow_run_ids()
        self._logger: logging.Logger | logging.LoggerAdapter[Any] = logging.getLogger(__name__)
        with suppress(MissingContextError):
            self._logger = get_run_logger()
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

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # The end is shown at once, if the API answers.
        with self._lock:
            self._training.status = "finished" if kind is None else "stopped"
            self._has_news = True
        self._finishing.set()
        self._thread.join(FINISH_TIMEOUT_S)

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
            records = read_all_records(self._storage, self._training.run_id, known=self._known)
            if records:
                self._curves.add(records)
                self._picture = render_curves(self._curves.curves, self._curves.epoch_ends)
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
            page = render_live(training, elapsed_s, now, self._picture)
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
