"""A rank's records of where its time went: at a low rate, at checkpoints, and at the end."""

import logging
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from prefect_torch_ddp.errors import StorageError
from prefect_torch_ddp.rank.config import RankInfo
from prefect_torch_ddp.rank.link import Link
from prefect_torch_ddp.rank.training.numbers import CheckpointNumbers
from prefect_torch_ddp.records.log import RecordLog, next_part_s
from prefect_torch_ddp.records.timing import UNKNOWN_STEP, TimingLine

FIRST_INTERVAL_S = 1.0

logger = logging.getLogger(__name__)


class TimingLog:
    """Writes timing records; between them a step costs a fraction of a microsecond."""

    def __init__(
        self, log: RecordLog, attempt: int, info: RankInfo, numbers: CheckpointNumbers, link: Link
    ) -> None:
        """Write nothing yet."""
        self._log = log
        self._who: dict[str, Any] = {"rank": info.rank, "attempt": attempt, "host": link.host}
        self._numbers = numbers
        self._heartbeat = link.heartbeat
        self._num_samples = self._num_steps = self._num_epoch_ends = 0
        self._knows_step = False
        self._began_s = time.monotonic()
        self._interval_s = FIRST_INTERVAL_S
        self._due_s = self._began_s + FIRST_INTERVAL_S

    def begin_loop(self) -> None:
        """Count the code before a loop as the start."""
        self._heartbeat.count_setup_as_start()
        self.write()

    def end_step(self) -> None:
        """Count a step, or a report outside of one."""
        if (share := self._numbers.progress.share) is not None:
            self._num_steps += 1
            self._num_samples += share.num_local - share.num_skipped
            self._num_epoch_ends += share.is_last
        now_s = time.monotonic()
        if now_s >= self._due_s:
            self._interval_s = next_part_s(self._interval_s, now_s - self._began_s)
            self._due_s = now_s + self._interval_s
            self.write(knows_step=share is not None)
            self._log.write_soon()

    def write(self, *, knows_step: bool = True) -> None:
        """Put on record where the time went so far.

        Args:
            knows_step: whether the training has found the step that it begins with by now.
        """
        self._knows_step |= knows_step
        device, cuda_bytes, gpu = _device()
        line = TimingLine(
            step=self._numbers.current if self._knows_step else UNKNOWN_STEP,
            time=time.time(),
            device=device,
            num_samples=self._num_samples,
            num_steps=self._num_steps,
            num_epoch_ends=self._num_epoch_ends,
            rss_bytes=_peak_rss_bytes(),
            cuda_bytes=cuda_bytes,
            seconds=self._heartbeat.seconds(),
            cpus=f"{sum(1 << cpu for cpu in os.sched_getaffinity(0)):x}",
            gpu=gpu,
            **self._who,
        )
        self._log.append(line)

    def flush(self) -> None:
        """Write the records; a training is none the worse if that fails, as the log says."""
        with suppress(StorageError):
            self._log.flush()

    def close(self) -> None:
        """Write the remaining times; what can't be written is lost, with a warning."""
        try:
            self._log.close()
        except StorageError as error:
            logger.warning("this rank's time measurements are lost: %s", error)


def _device() -> tuple[str, int, str]:
    """Return the device's name, the most memory that torch had in use there, and the UUID of a GPU.

    It asks no GPU.
    """
    torch: Any = sys.modules.get("torch")
    try:
        if torch is None or not torch.cuda.is_initialized():
            return "cpu", 0, ""
        number = torch.cuda.current_device()
        name = f"cuda:{number} {torch.cuda.get_device_name(number)}"
        uuid = str(torch.cuda.get_device_properties(number).uuid)
        return name, torch.cuda.max_memory_allocated(number), uuid
    except (AttributeError, RuntimeError):  # half loaded, or the GPU has failed
        return "unknown", 0, ""


def _peak_rss_bytes() -> int:
    """Return the most memory that this process had; 0 if the kernel doesn't say.

    Not getrusage's: that of a process started by exec begins with its parent's.
    """
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        return 0
