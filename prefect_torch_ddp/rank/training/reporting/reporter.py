"""The reporter: a rank's metrics and samples of each step, and the progress that people see."""

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from numbers import Real
from typing import TYPE_CHECKING, Any

from prefect_torch_ddp.errors import InvalidParamsError, StorageError
from prefect_torch_ddp.protocol.events import CheckpointCommitted, Progress
from prefect_torch_ddp.rank.config import RankConfig, RankInfo
from prefect_torch_ddp.rank.link import Link
from prefect_torch_ddp.rank.named_metrics import refuse_control
from prefect_torch_ddp.rank.training.replay import Replay
from prefect_torch_ddp.rank.training.reporting.measured import Measurements
from prefect_torch_ddp.rank.training.reporting.newest import NewestMetrics
from prefect_torch_ddp.rank.training.reporting.phase_times import TimingLog
from prefect_torch_ddp.records.ledger import EndLine, LoopLine, StepLine
from prefect_torch_ddp.records.log import UNKNOWN_SAMPLES, RecordLog

if TYPE_CHECKING:
    from prefect_torch_ddp.checkpoint.manifest import Manifest
    from prefect_torch_ddp.data.sampler import BatchShare, GlobalBatches

logger = logging.getLogger(__name__)

PROGRESS_INTERVAL_S = 1.0
"""Each one goes by three other processes, whose time is taken from steps if cores are few."""
FAILED_GRACE_S = 5.0
"""How long a rank that failed still writes: a checkpoint under way, then its records."""


class Reporter:
    """Merges what is reported in a step, and hands it on at the step's end."""

    def __init__(  # noqa: PLR0913, PLR0917 - what a record is made of
        self,
        config: RankConfig,
        info: RankInfo,
        replay: Replay,
        link: Link,
        tracked: Mapping[str, Any],
        trouble: Callable[[], str] = str,
    ) -> None:
        """Only a training writes records: those of an evaluation would count as the training's.

        Args:
            config: of the run.
            info: which rank this is.
            replay: what runs again on resume, whose reports are on record; its numbers are those
                of the training's checkpoints.
            link: takes the progress.
            tracked: the tracked objects; the optimizers among them have learning rates.
            trouble: says, on rank 0, what people should know of the training, or nothing.
        """
        numbers = replay.numbers
        run = (config.storage, config.run_id)
        self._who: dict[str, Any] = {"rank": info.rank, "attempt": config.attempt}
        kept = {**self._who, "copies": link.copies}
        self._log = RecordLog(*run, "metrics", **kept) if config.trains else None
        keeps_ledger = config.trains and config.ledger
        self._ledger = RecordLog(*run, "ledger", **kept) if keeps_ledger else None
        timing = (RecordLog(*run, "timing", **kept), config.attempt, info, numbers, link)
        self._timing = TimingLog(*timing) if config.trains else None
        logs = (self._log, self._ledger, self._timing)
        self._logs = [log for log in logs if log is not None]
        self._policy = config.checkpoint
        self._info = info
        self._numbers = numbers
        self._progress = numbers.progress
        self._replay = replay
        self._link = link
        self._measurements = Measurements(tracked)
        self._trouble = trouble
        self.newest = NewestMetrics(config.checkpoint, numbers)
        self._now: dict[str, Any] = {}
        self._next_progress = 0.0
        self._stage = config.stage
        self._has_warned = False
        self._closed = False

    def report(self, metrics: Mapping[str, Any]) -> None:
        """Take metrics of the step under way; outside of one they are a separate record."""
        if self._log is None and not self._has_warned:
            self._has_warned = True
            words = "ctx.report records the metrics of a training, and %s is none: return %s"
            logger.warning(words, self._stage, "Report(num_samples=n, metrics={...}) from evaluate")
        for name, value in metrics.items():
            refuse_control(name)
            found = _scalar(name, value)
            if not self._replay.is_on_record(name):
                self._now[name] = found
        if self._progress.share is None:
            self.end_step()

    def show_progress(self) -> None:
        """Tell people how far a loop of the user's own is, once in a while."""
        if self._info.rank == 0 and time.monotonic() >= self._next_progress:
            self._send_progress()

    def begin_loop(self, batches: "GlobalBatches | None") -> None:
        """Put on record what a loop goes over, from where the training is."""
        if self._timing is not None:
            self._timing.begin_loop()
        if self._ledger is None or batches is None:
            return
        position = self._progress.position
        line = LoopLine(
            step=self._progress.step + 1,
            epoch=position.epoch + 1,
            loop=position.loop,
            offset=position.batch * position.global_batch_size,
            num_samples=batches.num_samples,
            global_batch_size=batches.global_batch_size,
            drop_last=batches.drop_last,
            world_size=self._info.world_size,
            is_drawn=batches.is_drawn,
            num_places=None if batches.own_order is None else batches.num_places,
            **self._who,
        )
        self._ledger.append(line)

    def end_loop(self) -> None:
        """Put on the ledger that a loop has ended in order, and where."""
        if self._ledger is not None:
            position = self._progress.position
            offset = position.batch * position.global_batch_size
            at = (self._progress.step + 1, position.epoch + 1, position.loop, offset)
            self._ledger.append(EndLine(*at, **self._who))

    def end_step(self) -> None:
        """Hand on the step's records."""
        share = self._progress.share
        self._measurements.count(share)
        if self._ledger is not None and share is not None and not self._closed:
            self._ledger.append(self._step_line(share))
        now_s = time.monotonic()
        is_first = self._info.rank == 0
        is_due = is_first and self._measurements.is_due(now_s) and not self._replay.is_under_way
        if (self._now or (is_due and self._log is not None)) and not self._closed:
            metrics, self._now = self._now, {}
            if self._log is not None:
                self.newest.warn_if_repeated(metrics)
            self.newest.take(metrics, max(self._num_samples(), 0))
            if self._log is not None:
                measured = self._measurements.measure(now_s) if is_due else {}
                self._log.append(self._record(metrics) | measured)
        if self._timing is not None and not self._closed:
            self._timing.end_step()
        if is_first and now_s >= self._next_progress:
            self._send_progress()

    def restore(self, manifest: "Manifest") -> None:
        """Start with the metrics of a checkpoint."""
        self.newest.restore(manifest.metrics, manifest.reports)
        self.mark_checkpoint()

    def mark_checkpoint(self) -> None:
        """Put on record where the time went up to a checkpoint, made or restored."""
        if self._timing is not None:
            self._timing.write()

    def committed(self, manifest: "Manifest", every_s: float | None = None) -> None:
        """Tell the gang's caller of a checkpoint that is complete, and how often one is due."""
        best = self._policy.best_metric
        value = manifest.metrics.get(best) if best is not None else None
        num_bytes = sum(item.num_bytes for item in manifest.objects)
        with suppress(OSError):  # the agent is gone, and with it the training
            at = manifest.step, manifest.epoch
            self._link.send(CheckpointCommitted(*at, num_bytes, value, every_s))

    def flush(self) -> None:
        """Write the records of the steps that have ended; raises StorageError."""
        for log in self._logs:
            log.flush()

    def close(self, within_s: float | None = None) -> None:
        """Write all records.

        Args:
            within_s: what isn't written by then is left; None: it takes as long as the storage
                takes.

        Raises:
            StorageError: records can't be written, or weren't in time.
        """
        if self._now:
            self.end_step()
        if not self._closed and self._info.rank == 0 and self._numbers.step_done > 0:
            self._send_progress()  # else what people see would end up to a second too early
        if self._timing is not None and not self._closed:
            self._timing.write(knows_step=False)
        self._closed = True
        self._close_logs(within_s)

    def _close_logs(self, within_s: float | None) -> None:
        errors: list[Exception] = []

        def close_all() -> None:
            for log in self._logs:
                try:
                    log.close()
                except Exception as error:  # noqa: BLE001 - raised once all are closed
                    errors.append(error)

        # In a thread that may outlive this: a storage may keep one waiting for minutes.
        thread = threading.Thread(target=close_all, daemon=True)
        thread.start()
        thread.join(within_s)
        if thread.is_alive():
            errors.append(StorageError(f"the storage didn't take them within {within_s:g} s"))
        for error in errors:
            if not isinstance(error, StorageError):
                raise error
        if errors:
            raise StorageError("; ".join(map(str, errors))) from errors[0]

    def _send_progress(self) -> None:
        self._next_progress = time.monotonic() + PROGRESS_INTERVAL_S
        progress = self._progress
        total_steps, total_epochs = _known(progress.total_steps), _known(progress.total_epochs)
        if (own := self._numbers.own_progress) is not None:
            total_steps, total_epochs = own.total, None
        at = (self._numbers.record_step, self._epoch(), total_steps, self._trouble())
        of_all = (total_epochs, self._measurements.num_samples, progress.is_one_epoch)
        self._link.send(Progress(*at, *of_all))

    def _step_line(self, share: "BatchShare") -> StepLine:
        progress = self._progress
        offset = share.batch * progress.position.global_batch_size
        batch = (offset, share.num_global, share.is_last, share.samples)
        return StepLine(progress.step, progress.epoch, progress.position.loop, *batch, **self._who)

    def _epoch(self) -> int:
        own = self._numbers.own_progress
        return self._progress.epoch if own is None else own.epoch

    def _num_samples(self) -> int:
        """Return how many samples of the step under way are this rank's; 0 outside of one."""
        share, own = self._progress.share, self._numbers.own_progress
        if own is not None or (share is not None and not share.has_data):
            return UNKNOWN_SAMPLES
        return 0 if share is None else share.num_local - share.num_skipped

    def _record(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        # Its step is 0 until then, also in a resumed attempt, which doesn't take all back by that.
        early: dict[str, Any] = {} if self._numbers.is_start_known else {"is_before_start": True}
        return {
            "step": self._numbers.record_step,
            "epoch": self._epoch(),
            **self._who,
            "time": time.time(),
            "num_samples": self._num_samples(),
            "metrics": metrics,
            **early,
        }


def _known(total: float | None) -> int | None:
    return None if total is None or total == math.inf else int(total)


class _DeviceScalar:
    """A number that a device still computes: asking for it waits, which a step must not do."""

    def __init__(self, value: Any) -> None:
        import torch  # noqa: PLC0415 - loaded by whoever made the tensor

        self._value = value.detach().clone()  # the user may continue to add to it in place
        self._done: Any = None
        if self._value.is_cuda:
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record()

    def is_ready(self) -> bool:
        return self._done is None or bool(self._done.query())

    def __float__(self) -> float:
        if self._done is not None:
            self._done.synchronize()
        return float(self._value.item())


def _scalar(name: str, value: Any) -> Any:
    """Return a float, or something that becomes one later."""
    shape = f" of shape {list(value.shape)}" if hasattr(value, "shape") else ""
    kind = f"a {type(value).__name__}{shape}"
    try:
        if hasattr(value, "dtype"):
            if _is_number(value):
                device = getattr(value, "device", "cpu")
                is_here = getattr(device, "type", device) == "cpu"
                return float(value.item()) if is_here else _DeviceScalar(value)
        elif isinstance(value, Real):
            return float(value)
    except OverflowError as error:
        msg = (
            f"metric {name!r} is {kind} that is too large for a float; report its logarithm, or "
            "divide it"
        )
        raise InvalidParamsError(msg) from error
    msg = f"metric {name!r} is {kind}; report a number or a 0-d tensor, such as loss.mean()"
    raise InvalidParamsError(msg)


def _is_number(value: Any) -> bool:
    """Tell if it is a 0-d tensor or array of real numbers, and has a value."""
    if getattr(value, "ndim", None) != 0 or getattr(value, "is_meta", False):
        return False
    # By its name: torch's and numpy's types have nothing in common.
    return any(word in str(value.dtype) for word in ("bool", "int", "float"))
