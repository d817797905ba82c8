"""The recorder: keeps a training's record in its storage and tells Prefect's bus of it."""

import contextvars
import math
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from prefect.context import TaskRunContext
from prefect.logging import get_run_logger

from prefect_torch_ddp.checkpoint.keys import manifest_key
from prefect_torch_ddp.errors import SupersededError
from prefect_torch_ddp.params import CheckpointParams
from prefect_torch_ddp.protocol.events import (
    AttemptBegan,
    CheckpointCommitted,
    FailureRecord,
    GangEvent,
    Progress,
)
from prefect_torch_ddp.records.hiding import without_credentials
from prefect_torch_ddp.records.run_record import (
    AttemptRecord,
    RunRecord,
    find_record,
    write_record,
)
from prefect_torch_ddp.records.timing import newest_lines
from prefect_torch_ddp.results import CheckpointRef, TrainingSummary
from prefect_torch_ddp.storage.protocol import Storage
from prefect_torch_ddp.tasks.reading import read_goodput
from prefect_torch_ddp.tasks.record.bus import RunEvents
from prefect_torch_ddp.tasks.record.draft import plain_value, split_of
from prefect_torch_ddp.tasks.record.versions import git_commit, versions_for
from prefect_torch_ddp.tasks.report.live import CANCELS, FINISH_TIMEOUT_S

if TYPE_CHECKING:
    import logging

MAX_CAUSE = 500
NO_WORD = "its process ended without a word"


class RunRecorder:
    """Writes a training's record when it begins, when an attempt begins or fails, and at its end.

    Made in a task, used as a context manager around the training. `receive` costs microseconds, or
    a fraction of a millisecond where it sends an event: a thread of its own asks git and talks to
    the storage. Nothing that goes wrong there reaches the training.
    """

    def __init__(
        self,
        storage: Storage,
        draft: RunRecord,
        source: str | None,
        policy: CheckpointParams,
        is_final: Callable[[BaseException], bool],
    ) -> None:
        """Make it.

        Args:
            storage: of the run.
            draft: what is known of it now.
            source: the workload's file; None where it has none, as in a notebook.
            policy: says which checkpoints are the best.
            is_final: whether Prefect won't try again after an error.
        """
        self.record = draft
        """What is known by now."""
        self._storage = storage
        self._source = Path(source) if source and Path(source).is_file() else None
        self._pick = max if policy.best_mode == "max" else min
        self._is_final = is_final
        self._own: list[AttemptRecord] = []
        self._earlier: tuple[AttemptRecord, ...] = ()
        self._newest: Progress | None = None
        self._checkpoint_step = 0
        self._is_superseded = False
        self._lock = threading.Lock()
        self._news, self._over = threading.Event(), threading.Event()
        self._events = RunEvents(draft.run_id, draft.experiment, draft.workload)
        self._logger: logging.Logger | logging.LoggerAdapter[Any] = get_run_logger()
        context = contextvars.copy_context()  # the run's logger looks for it
        self._thread = threading.Thread(
            target=context.run, args=(self._keep_writing,), name="run-record", daemon=True
        )

    def __enter__(self) -> Self:
        self._news.set()
        self._thread.start()
        return self

    def receive(self, event: GangEvent) -> None:
        """Take in what the gang says."""
        match event:
            case AttemptBegan():
                self._begin(event)
            case Progress():
                self._advance(event)
            case CheckpointCommitted():
                self._commit(event)
            case FailureRecord():
                self._fail(event)

    def trained(self, summary: TrainingSummary) -> None:
        """Take in what a workload's training gave."""
        best, name = summary.best_checkpoint, self.record.best_metric
        self._update(
            num_steps=summary.num_steps,
            num_epochs=summary.num_epochs,
            checkpoint=summary.last_checkpoint,
            model_uris=summary.model_uris,
            value=plain_value(summary.value),
            best_value=best.metrics.get(name) if best and name else None,
        )

    def returned(self, value: Any) -> None:
        """Take in what rank 0's function returned."""
        self._update(value=plain_value(value))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        self._is_superseded = isinstance(error, SupersededError)  # then the record is another's
        state = "completed" if error is None else "failed"
        state = "cancelled" if isinstance(error, CANCELS) else state
        cause = _cause_of(error)
        if error is None and self._newest and self._newest.step == self._newest.total_steps:
            self._emit("epoch.completed", epoch=self._newest.epoch, metrics=self._newest.metrics)
        self._close(self._own[-1].attempt if self._own else 0, cause, None)
        newest = self._newest
        self._update(
            state=state,
            cause=cause,
            ended=datetime.now(UTC),
            num_steps=self.record.num_steps or (newest and newest.step),
            num_epochs=self.record.num_epochs or (newest and newest.epoch),
        )
        self._over.set()
        self._news.set()
        if error is None or (self._is_last(error) and not self._is_superseded):
            step = self._own[-1].step if self._own else None  # of the failure, if it failed
            self._emit("training.finished", step=step, state=state, cause=cause)
        self._events.flush()
        self._thread.join(FINISH_TIMEOUT_S)

    def _is_last(self, error: BaseException) -> bool:
        context = TaskRunContext.get()
        if context is None or context.task_run.run_count > context.task.retries:
            return True
        return self._is_final(error)

    def _begin(self, began: AttemptBegan) -> None:
        self._own.append(
            AttemptRecord(
                attempt=began.attempt,
                world_size=began.world_size,
                began=datetime.now(UTC),
                hosts=began.hosts,
            )
        )
        self._newest = None
        self._write()
        kind = "training.started" if began.attempt == 1 else "training.resumed"
        self._emit(kind, step=self._checkpoint_step)

    def _advance(self, progress: Progress) -> None:
        before, self._newest = self._newest, progress
        if before is not None and progress.epoch > before.epoch:
            metrics = before.metrics
            self._emit("epoch.completed", epoch=progress.epoch - 1, metrics=metrics)
        else:
            self._events.send_due()

    def _commit(self, committed: CheckpointCommitted) -> None:
        self._checkpoint_step = committed.step
        attempt, value = self._own[-1].attempt if self._own else 1, committed.value
        key = manifest_key(self.record.run_id, committed.step, attempt)
        uri = f"{self._storage.uri.rstrip('/')}/{key}"
        metrics = {} if value is None else {str(self.record.best_metric): value}
        ref = CheckpointRef(step=committed.step, attempt=attempt, uri=uri, metrics=metrics)
        values = (self.record.best_value, value)
        best = [each for each in values if each is not None and math.isfinite(each)]
        with self._lock:
            changes = {"checkpoint": ref, "best_value": self._pick(best) if best else None}
            self.record = self.record.model_copy(update=changes)
        about = {"epoch": committed.epoch, "num_bytes": committed.num_bytes, "metrics": metrics}
        self._emit("checkpoint.committed", step=committed.step, checkpoint=uri, **about)

    def _fail(self, failed: FailureRecord) -> None:
        self._close(failed.attempt, without_credentials(failed.summary), failed.step)
        self._write()
        self._emit("rank.failed", step=failed.step, cause=without_credentials(failed.summary))

    def _close(self, attempt: int, cause: str, step: int | None) -> None:
        newest = self._newest
        step = newest.step if step is None and newest is not None else step
        end = {"ended": datetime.now(UTC), "cause": cause[:MAX_CAUSE], "step": step}
        for i, each in enumerate(self._own):
            if each.attempt == attempt and each.ended is None:
                self._own[i] = each.model_copy(update=end)

    def _emit(self, name: str, **payload: Any) -> None:
        last = self._own[-1] if self._own else None
        at = {
            "step": self._newest.step if self._newest else None,
            "attempt": last.attempt if last else None,
            "world_size": last.world_size if last else None,
        }
        self._events.emit(name, **{**at, **payload})

    def _write(self) -> None:
        self._update()
        self._news.set()

    def _update(self, **changes: Any) -> None:
        metrics = dict(self._newest.metrics) if self._newest else self.record.metrics
        with self._lock:
            attempts = (*self._earlier, *self._own)
            changes = {"metrics": metrics, **changes, "attempts": attempts}
            self.record = self.record.model_copy(update=changes)

    def _keep_writing(self) -> None:
        self._try(self._look_up)
        is_over = False
        while not is_over:
            self._news.wait()
            self._news.clear()
            is_over = self._over.is_set()
            if is_over:
                self._try(self._measure)
            if not self._is_superseded:
                self._try(lambda: write_record(self._storage, self.record))

    def _measure(self) -> None:
        """Add what the ranks wrote down of themselves: where their time went, and on what."""
        run = self._storage, self.record.run_id
        lines, attempts = newest_lines(*run), list(self.record.attempts)
        if lines and attempts and attempts[-1].attempt == lines[0].attempt:
            devices = tuple(line.device for line in lines)
            attempts[-1] = attempts[-1].model_copy(update={"devices": devices})
        changes = {"goodput": read_goodput(*run), "attempts": tuple(attempts)}
        self.record = self.record.model_copy(update=changes)

    def _try(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - the training goes on without its record
            self._logger.warning("the run record can't be written now: %r", error)

    def _look_up(self) -> None:
        """Add what takes a look at the code, the data and an earlier task run of the training."""
        draft, source = self.record, self._source
        earlier = find_record(self._storage, draft.run_id, draft.experiment)
        if earlier is not None:  # before all else that may fail, or this run had two records
            with self._lock:
                self._earlier = tuple(
                    each if each.ended else each.model_copy(update={"cause": NO_WORD})
                    for each in earlier.attempts
                )
                kept = {"began": earlier.began, "attempts": (*self._earlier, *self._own)}
                for name in ("checkpoint", "best_value"):
                    if getattr(self.record, name) is None:
                        kept[name] = getattr(earlier, name)
                self.record = self.record.model_copy(update=kept)
        commit, is_dirty = git_commit(source.parent) if source else (None, False)
        found: dict[str, Any] = {
            "commit": commit,
            "is_dirty": is_dirty,
            "versions": versions_for(source, draft.workload.partition(":")[0]),
            "split": split_of(self._storage, draft.dataset),
        }
        with self._lock:
            self.record = self.record.model_copy(update=found)


def _cause_of(error: BaseException | None) -> str:
    first = without_credentials(str(error).partition("\n")[0]) if error is not None else ""
    return f"{type(error).__name__}: {first}"[:MAX_CAUSE] if error is not None else ""
