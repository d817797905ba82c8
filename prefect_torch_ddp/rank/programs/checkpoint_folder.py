"""`ctx.checkpoint_folder` and `ctx.commit`: checkpoints that user code writes as files."""

import shutil
import tempfile
import time
from collections.abc import Iterable
from multiprocessing.util import get_temp_dir
from pathlib import Path

from prefect_torch_ddp.checkpoint.files import name_below, open_files
from prefect_torch_ddp.data.sampler import whole_number
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.protocol.heartbeat import Phase
from prefect_torch_ddp.rank.heartbeat_writer import HeartbeatWriter
from prefect_torch_ddp.rank.training.saver import Saver
from prefect_torch_ddp.rank.training.training_state import TrainingState


class CheckpointFolder:
    """A rank's local folder, which begins with the newest folder that all ranks committed."""

    def __init__(self, state: TrainingState, saver: Saver, heartbeat: HeartbeatWriter) -> None:
        """Restore; see `TrainingState.open_folder` for what it raises.

        It lies in the rank's scratch folder, which its agent removes, so that it needs no name
        that is free on every host. What lies beside `root` in its parent is removed with it.
        """
        self._saver = saver
        self._heartbeat = heartbeat
        self.root = Path(tempfile.mkdtemp(prefix="checkpoints-", dir=get_temp_dir()), "committed")
        self.root.mkdir()
        restorer = state.open_folder(self.root)
        manifest = restorer.manifest
        self.committed = None if manifest is None else self.root / (manifest.folder or "")
        """The restored folder; None: there was none."""
        is_ours = manifest is not None and restorer.is_ours
        self._least = manifest.step if manifest is not None and is_ours else 0
        self.due_since_s: float | None = None
        """Since when the training has been making the checkpoint that it was asked for."""

    def commit(self, folder: Path, step: object, files: Iterable[str | Path] | None) -> None:
        """See `RankContext.commit`."""
        number = whole_number("step", step, 0)
        if number < self._least:
            msg = (
                f"ctx.commit was given step {number}, and this run needs {self._least} or a later "
                "one next: steps count on over all attempts, from ctx.committed, and each has one "
                "commit"
            )
            raise InvalidParamsError(msg)
        self._saver.raise_failure()
        with self._heartbeat.during(Phase.SAVING):
            name = name_below(folder, self.root)
            opened = open_files(folder, name, files)
            since_s, self.due_since_s = self.due_since_s, None
            stall_s = 0.0 if since_s is None else time.monotonic() - since_s
            self._saver.save_folder(number, name, opened, stall_s)
        self._least = number + 1

    def close(self) -> None:
        """Remove the local folder: what was committed is in the storage."""
        shutil.rmtree(self.root.parent, ignore_errors=True)
