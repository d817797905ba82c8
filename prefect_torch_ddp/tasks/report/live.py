"""Owns what a run shows in Prefect: its artifacts' keys, and the live report that is updated in
place while ranks train.

Owns what rank 0's progress adds up to while a training runs: curves, speed, time left.
"""

import contextvars
import json
import logging
import re
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Literal, Self
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    ArtifactFilterKey,
    ArtifactFilterTaskRunId,
)
from prefect.exceptions import MissingContextError
from prefect.logging import get_run_logger
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.utilities.context import get_task_and_flow_run_ids

from prefect_torch_ddp.protocol.events import AttemptBegan, Progress
from prefect_torch_ddp.tasks.report.curves import downsample, render_curves
from prefect_torch_ddp.tasks.report.report import LiveView, progress_line, render_live

ArtifactType = Literal["markdown", "table", "progress"]

REQUEST_TIMEOUT_S = 5.0
FINISH_TIMEOUT_S = 10.0


def key(name: str, kind: str = "train-ddp") -> str:
    """Return an artifact's key, one series of versions for each kind of run: lowercase letters,
    digits and dashes alone.
    """
    return re.sub(r"[^a-z0-9]+", "-", f"{kind}-{name}".lower()).strip("-")


class ArtifactWriter:
    """Writes the artifacts of one flow run, each key once: a task that is retried, or comes
    later, updates what is there.
    """

    def __init__(
        self, client: SyncPrefectClient, task_run_id: UUID | None, flow_run_id: UUID | None
    ) -> None:
        self._client = client
        self._task_run_id = task_run_id
        self._flow_run_id = flow_run_id
        self._ids: dict[str, UUID] = {}

    def put(
        self, type_: ArtifactType, key: str, data: object, description: str | None = None
    ) -> UUID:
        """Create the artifact, or update it in place where this flow run has it; return its
        id.
        """
        artifact_id = self._ids.get(key) or self._find(key)
        if artifact_id is None:
            request = ArtifactCreate(
                type=type_,
                key=key,
                data=data,
                description=description,
                task_run_id=self._task_run_id,
                flow_run_id=self._flow_run_id,
            )
            artifact_id = self._client.create_artifact(request).id
        else:
            self._client.update_artifact(
                artifact_id, ArtifactUpdate(data=data, description=description)
            )
        self._ids[key] = artifact_id
        return artifact_id

    def put_table(
        self, key: str, rows: Sequence[Mapping[str, Any]], description: str | None = None
    ) -> UUID:
        """Write a table.

        Raises:
            ValueError: a cell is nan or infinite, which crashes the page that shows it.
        """
        return self.put("table", key, json.dumps(list(rows), allow_nan=False), description)

    def _find(self, key: str) -> UUID | None:
        whose: dict[str, ArtifactFilterFlowRunId | ArtifactFilterTaskRunId]
        if self._flow_run_id is not None:
            whose = {"flow_run_id": ArtifactFilterFlowRunId(any_=[self._flow_run_id])}
        elif self._task_run_id is not None:
            whose = {"task_run_id": ArtifactFilterTaskRunId(any_=[self._task_run_id])}
        else:
            return None
        mine = ArtifactFilter.model_validate({"key": ArtifactFilterKey(any_=[key]), **whose})
        found = self._client.read_artifacts(artifact_filter=mine, limit=1)
        return found[0].id if found else None


class LiveReport:
    """Shows a training in Prefect while it runs: a progress artifact and a markdown report.

    Made in a task, used as a context manager round the training. `update` costs microseconds: a
    thread of its own talks to Prefect, at most every `interval_s` and once at the end. Nothing
    that goes wrong there reaches the training.
    """

    def __init__(
        self,
        *,
        run_id: str,
        workload: str,
        world_size: int,
        attempt: int = 1,
        interval_s: float = 3.0,
    ) -> None:
        self._about = {
            "run_id": run_id,
            "workload": workload,
            "world_size": world_size,
            "attempt": attempt,
        }
        self._interval_s = interval_s
        self._history = History()
        self._lock = threading.Lock()
        self._has_news = True
        self._status: Literal["training", "finished", "stopped"] = "training"
        self._finishing = threading.Event()
        self._started_s = time.monotonic()
        self._run_ids = get_task_and_flow_run_ids()
        self._logger = _logger()
        self._warned = False
        # Prefect's settings, the API's address with them, live in a context variable that a new
        # thread would not see.
        context = contextvars.copy_context()
        self._thread = threading.Thread(
            target=context.run, args=(self._keep_writing,), name="live-report", daemon=True
        )

    def start(self) -> None:
        """Show that the training begins."""
        self._thread.start()

    def begin_attempt(self, began: AttemptBegan) -> None:
        """Take in that the ranks start, perhaps again, perhaps in another number."""
        with self._lock:
            self._about |= {"attempt": began.attempt, "world_size": began.world_size}
            self._has_news = True

    def update(self, progress: Progress) -> None:
        """Take in how far rank 0 is."""
        with self._lock:
            self._history.add(progress, time.monotonic())
            self._has_news = True

    def finish(self, *, succeeded: bool = True) -> None:
        """Show the end at once; gives up after ten seconds on an API that doesn't answer."""
        with self._lock:
            self._status = "finished" if succeeded else "stopped"
            self._has_news = True
        self._finishing.set()
        self._thread.join(FINISH_TIMEOUT_S)

    def __enter__(self) -> Self:
        self.start()
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
            last = False
            while not last:
                # Read before writing: what is written after the flag went up is the end.
                last = self._finishing.is_set()
                try:
                    writer = writer or self._connect(stack)
                    self._write(writer)
                except Exception as error:  # noqa: BLE001 - the training goes on whatever happens to its report
                    self._warn(error)
                if not last:
                    self._finishing.wait(self._interval_s)

    def _connect(self, stack: ExitStack) -> ArtifactWriter:
        # With settings of its own the client is not the one that the task's thread uses.
        client = stack.enter_context(
            get_client(sync_client=True, httpx_settings={"timeout": REQUEST_TIMEOUT_S})
        )
        return ArtifactWriter(client, *self._run_ids)

    def _write(self, writer: ArtifactWriter) -> None:
        with self._lock:
            if not self._has_news:
                return
            self._has_news = False
            view, percent = self._view(), self._history.percent
            curves = {name: list(curve) for name, curve in self._history.curves.items()}
            epoch_ends = list(self._history.epoch_ends)
        try:
            done = 100.0 if view.status == "finished" else percent
            trouble = (
                f"; {view.progress.trouble}"
                if view.progress is not None and view.progress.trouble
                else ""
            )
            writer.put("progress", key("progress"), done, progress_line(view) + trouble)
            writer.put(
                "markdown",
                key("report"),
                render_live(view, render_curves(curves, epoch_ends)),
                f"Run {view.run_id}, live",
            )
        except Exception:
            with self._lock:
                self._has_news = True
            raise

    def _view(self) -> LiveView:
        return LiveView(
            **self._about,  # type: ignore[arg-type] # a dict of four fields, each of its own type
            elapsed_s=time.monotonic() - self._started_s,
            status=self._status,
            progress=self._history.progress,
            metrics=dict(self._history.metrics),
            steps_per_s=self._history.steps_per_s,
            eta_s=self._history.eta_s,
            updated_at=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        )

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            self._logger.warning(
                "the live report can't be written now, training goes on and it is tried again: %r",
                error,
            )


def _logger() -> "logging.Logger | logging.LoggerAdapter[Any]":
    try:
        return get_run_logger()
    except MissingContextError:
        return logging.getLogger(__name__)


MAX_POINTS = 2000
SPEED_WINDOW_S = 30.0


class History:
    """Everything that was heard of one training so far; bounded in size however long it
    runs.
    """

    def __init__(self) -> None:
        self.progress: Progress | None = None
        self.metrics: dict[str, float] = {}
        """The latest value of each."""
        self.curves: dict[str, list[tuple[float, float]]] = {}
        self.epoch_ends: list[int] = []
        self._seen: deque[tuple[float, int]] = deque()

    def add(self, progress: Progress, now_s: float) -> None:
        """Take in one event.

        Args:
            progress: may go back, when the ranks were restarted from a checkpoint: what lies
                beyond is forgotten.
            now_s: a monotonic clock's time.
        """
        last = self.progress
        if last is not None and progress.step < last.step:
            self._forget(progress.step)
        elif last is not None and progress.epoch > last.epoch:
            self.epoch_ends.append(last.step)
        self.progress = progress
        self.metrics |= progress.metrics
        self._extend(progress.step, progress.metrics)
        self._seen.append((now_s, progress.step))
        while len(self._seen) > 2 and now_s - self._seen[1][0] > SPEED_WINDOW_S:  # noqa: PLR2004 - two make a speed
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
        """Seconds that the steps left will take; None when that can't be known."""
        if self.progress is None or self.progress.total_steps is None or self.steps_per_s is None:
            return None
        return max(0, self.progress.total_steps - self.progress.step) / self.steps_per_s

    @property
    def percent(self) -> float:
        """How much of the training is done, 0 to 100; 0 where its length isn't known."""
        if self.progress is None or not self.progress.total_steps:
            return 0.0
        return min(100.0, 100 * self.progress.step / self.progress.total_steps)

    def _extend(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            curve = self.curves.setdefault(name, [])
            if curve and curve[-1][0] == step:
                curve.pop()
            curve.append((step, value))
            if len(curve) > MAX_POINTS:
                self.curves[name] = downsample(curve, MAX_POINTS // 2)

    def _forget(self, step: int) -> None:
        """Drop what a restart does again, and the speed, which has the restart's pause in
        it.
        """
        self.curves = {
            name: [point for point in curve if point[0] < step]
            for name, curve in self.curves.items()
        }
        self.epoch_ends = [end for end in self.epoch_ends if end < step]
        self._seen.clear()
