"""The recorder: keeps a training's record in its storage and tells Prefect's bus of it."""

import threading
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from prefect.context import TaskRunContext

from prefect_torch_ddp.checkpoint.keys import manifest_key
from prefect_torch_ddp.errors import is_superseded
from prefect_torch_ddp.gang.liveness import own_worker_leaves
from prefect_torch_ddp.gang.policy import Action, TaskFailure, decide
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
    find_run_record,
    write_run_record,
)
from prefect_torch_ddp.records.timing import TimingLine
from prefect_torch_ddp.results import CheckpointRef, Goodput, TrainingSummary
from prefect_torch_ddp.storage.protocol import Storage
from prefect_torch_ddp.tracking.bus import RunEvents
from prefect_torch_ddp.tracking.description import (
    MAX_CAUSE,
    best_of,
    cause_of,
    split_of,
    state_of,
    stored_checkpoints,
    value_for_record,
)
from prefect_torch_ddp.tracking.provenance import git_commit, versions_for

NO_WORD = "its process ended without a word"


class RunRecorder:
    """Keeps a training's record, from its beginning over each attempt to its end.

    The live report drives it: the task's thread hands on events, which takes microseconds, or a
    fraction of a millisecond if one goes to the bus; the report's own thread calls `write`.
    """

    def __init__(self, storage: Storage, draft: RunRecord, source: Path | None = None) -> None:
        """Make it.

        Args:
            storage: of the run.
            draft: what is known of it now.
            source: the workload's file; None if it has none, as in a notebook.
        """
        self.record = draft
        """What is known by now."""
        self._storage = storage
        self._source = source
        self._own: list[AttemptRecord] = []
        self._earlier: tuple[AttemptRecord, ...] = ()
        self._newest: Progress | None = None
        self._has_looked_up = False
        self.is_superseded = False
        """Whether a newer attempt has begun elsewhere: then the record, and the page, are of that
        one."""
        self._said = 0, 0
        """The attempt and the epoch of the last event."""
        self._ends_here = False
        self._has_news = True
        self._lock = threading.RLock()
        self._events = RunEvents(draft)

    @property
    def is_last(self) -> bool:
        """Whether the training has ended, and is not tried again."""
        return self._ends_here and not self.is_superseded

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
            value=value_for_record(summary.value),
            best_value=best.metrics.get(name) if best and name else None,
        )

    def returned(self, value: Any) -> None:
        """Take in what rank 0's function returned."""
        self._update(value=value_for_record(value))

    def end(self, error: BaseException | None) -> None:
        """Take in how it ended."""
        self.is_superseded = self.is_superseded or is_superseded(error)
        cause, newest = cause_of(error), self._newest
        is_last = error is None or _is_last(error)
        self._close(self._own[-1].attempt if self._own else 0, cause, None)
        self._update(
            state=state_of(error),
            cause=cause,
            is_tried_again=not is_last,
            ended=datetime.now(UTC),
            num_steps=self.record.num_steps or (newest and newest.step),
            num_epochs=self.record.num_epochs or (newest and newest.epoch),
        )
        self._has_news = True
        self._ends_here = is_last

    def flush(self, report_uri: str = "") -> None:
        """Say how it ended, and wait until Prefect's bus has heard all, or for a few seconds.

        Args:
            report_uri: where the run's report is, if it was written.
        """
        newest = self._newest
        is_whole = self.record.state == "completed" and newest and newest.step == newest.total_steps
        if newest and is_whole and self._own:
            self._say_epoch(self._own[-1].attempt, newest.epoch)
        if self.is_last:
            step = self._own[-1].step if self._own else None  # of the failure, if it failed
            self._events.emit_end(self.record, report_uri, **{**self._where(), "step": step})
        self._events.flush()

    def write(self) -> None:
        """Write what is new to the storage; raises StorageError, and may be tried again."""
        if not self._has_looked_up:
            self._take_up_earlier()
            self._look_at_code()
            self._has_looked_up = True
        if not self._has_news or self.is_superseded:
            return
        self.is_superseded = self._has_newer_attempt()
        if not self.is_superseded:
            self._has_news = False
            try:
                write_run_record(self._storage, self.record)
            except Exception:
                self._has_news = True
                raise

    def read(self, metrics: Mapping[str, float], attempt: int, epoch: int) -> None:
        """Take in what was read from the ranks' records.

        Args:
            metrics: the last value of each.
            attempt: the newest one with records.
            epoch: its newest one of which all records have been read.
        """
        self._update(metrics=dict(metrics))
        if self._own and attempt == self._own[-1].attempt:  # not of an earlier task run
            self._say_epoch(attempt, epoch)

    def settle(self, attempt: int, step: int, epoch: int) -> tuple[int, int] | None:
        """Take in where the training was at its end, by what the ranks recorded.

        What rank 0 said last may be a second older, or never have come.

        Args:
            attempt: the newest one that recorded anything.
            step: the last that it recorded.
            epoch: of that step.

        Returns:
            The last step that is known, and its epoch; None if no attempt of this task run made
            one.
        """
        if not self._own or self._own[-1].attempt != attempt or not step:
            return None
        last, newest = self._own[-1], self._newest
        said = (newest.step, newest.epoch) if newest else (0, 0)
        known = max((step, epoch), said)
        if not last.cause or last.step in (None, said[0]):
            self._own[-1] = last.model_copy(update={"step": known[0]})
        num_steps = max(known[0], self.record.num_steps or 0)
        self._update(num_steps=num_steps, num_epochs=max(known[1], self.record.num_epochs or 0))
        return known

    def measure(self, lines: Sequence[TimingLine], goodput: Goodput | None) -> None:
        """Add what the ranks wrote down of themselves: where their time went, and on what."""
        if lines and self._own and self._own[-1].attempt == lines[0].attempt:
            devices = tuple(line.device for line in lines)
            self._own[-1] = self._own[-1].model_copy(update={"devices": devices})
        self._update(goodput=goodput)
        self._has_news = True

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
        self._update()
        self._has_news = True
        kind = "training.started" if began.attempt == 1 else "training.resumed"
        checkpoint = self.record.checkpoint
        self._emit(kind, step=checkpoint.step if checkpoint else 0)

    def _advance(self, progress: Progress) -> None:
        self._newest = progress
        self._events.send_due()

    def _commit(self, committed: CheckpointCommitted) -> None:
        attempt, value = self._own[-1].attempt if self._own else 1, committed.value
        key = manifest_key(self.record.run_id, committed.step, attempt)
        uri = f"{self._storage.uri.rstrip('/')}/{key}"
        metrics = {} if value is None else {str(self.record.best_metric): value}
        ref = CheckpointRef(step=committed.step, attempt=attempt, uri=uri, metrics=metrics)
        with self._lock:
            best = best_of(self.record.best_mode, self.record.best_value, value)
            self._update(checkpoint=ref, best_value=best)
        about = {"epoch": committed.epoch, "num_bytes": committed.num_bytes, "metrics": metrics}
        self._emit("checkpoint.committed", step=committed.step, checkpoint=uri, **about)

    def _fail(self, failed: FailureRecord) -> None:
        cause = without_credentials(failed.summary)
        self._close(failed.attempt, cause, failed.step)
        self._update()
        self._has_news = True
        if not failed.is_move:
            self._emit("rank.failed", step=failed.step, cause=cause)

    def _close(self, attempt: int, cause: str, step: int | None) -> None:
        newest = self._newest
        step = newest.step if step is None and newest is not None else step
        end = {"ended": datetime.now(UTC), "cause": cause[:MAX_CAUSE], "step": step}
        for i, each in enumerate(self._own):
            if each.attempt == attempt and each.ended is None:
                self._own[i] = each.model_copy(update=end)

    def _say_epoch(self, attempt: int, epoch: int) -> None:
        with self._lock:
            is_new = epoch > 0 and (attempt, epoch) > self._said
            self._said = max((attempt, epoch), self._said)
        if is_new:
            self._emit("epoch.completed", epoch=epoch, metrics=dict(self.record.metrics))

    def _emit(self, name: str, **payload: Any) -> None:
        self._events.emit(name, **{**self._where(), **payload})

    def _where(self) -> dict[str, int | None]:
        last = self._own[-1] if self._own else None
        return {
            "step": self._newest.step if self._newest else None,
            "attempt": last.attempt if last else None,
            "world_size": last.world_size if last else None,
        }

    def _update(self, **changes: Any) -> None:
        with self._lock:
            changes |= {"attempts": (*self._earlier, *self._own)}
            self.record = self.record.model_copy(update=changes)

    def _take_up_earlier(self) -> None:
        """Continue the record of an earlier task run of the training, if there is one."""
        earlier = find_run_record(self._storage, self.record.run_id, self.record.experiment)
        if earlier is None:
            return
        self._earlier = tuple(
            each if each.ended else each.model_copy(update={"cause": NO_WORD})
            for each in earlier.attempts
        )
        # If that task run was killed, or the storage was full, its record lacks the newest ones.
        metric, mode = self.record.best_metric, self.record.best_mode
        is_comparable = (earlier.best_metric, earlier.best_mode) == (metric, mode)
        asked: dict[str, Any] = {"best_metric": metric, "best_mode": mode}
        asked["best_value"] = earlier.best_value if is_comparable else None
        known = earlier.model_copy(update=asked)
        checkpoint, best = stored_checkpoints(self._storage, known)
        with self._lock:
            self.record.keep(earlier.unknown)
            best = best_of(mode, self.record.best_value, best)
            kept: dict[str, Any] = {"began": earlier.began, "best_value": best}
            if self.record.checkpoint is None:
                kept |= {"checkpoint": checkpoint}
            self._update(**kept)

    def _has_newer_attempt(self) -> bool:
        """Look for an attempt on record that is newer than all of this task run."""
        known = [each.attempt for each in (*self._earlier, *self._own)]
        stored = find_run_record(self._storage, self.record.run_id, self.record.experiment)
        return stored is not None and any(
            each.attempt > max(known, default=0) for each in stored.attempts
        )

    def _look_at_code(self) -> None:
        source, draft = self._source, self.record
        commit, is_dirty = git_commit(source.parent) if source else (None, False)
        self._update(
            commit=commit,
            is_dirty=is_dirty,
            versions=versions_for(source, draft.workload.partition(":")[0]),
            split=split_of(self._storage, draft.dataset),
        )


def _is_last(error: BaseException) -> bool:
    context = TaskRunContext.get()
    num_left = context.task.retries + 1 - context.task_run.run_count if context else 0
    return decide(TaskFailure(error, own_worker_leaves()), None, num_left).action is Action.RAISE
