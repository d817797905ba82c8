"""Owns the parts behind a RankContext: made when they are first asked for, closed in order, and
what they amount to.

Owns what `RankContext.local()` needs in place of a gang.
"""

import logging
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from prefect_torch_ddp.checkpoint.attempts import claim_attempt, newest_attempt
from prefect_torch_ddp.checkpoint.resume_point import parse_resume_from
from prefect_torch_ddp.data.images.location import readable_at
from prefect_torch_ddp.errors import StorageError
from prefect_torch_ddp.params import check_virtual_ranks
from prefect_torch_ddp.protocol.events import Stopped
from prefect_torch_ddp.rank.config import RankConfig
from prefect_torch_ddp.rank.link import Link
from prefect_torch_ddp.rank.loop.state import Place, TrainingState
from prefect_torch_ddp.rank.reporter import Reporter
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.storage.locate import storage_from_uri
from prefect_torch_ddp.storage.protocol import Storage

if TYPE_CHECKING:
    from prefect_torch_ddp.rank.checkpointing import Tracker
    from prefect_torch_ddp.rank.loop.steps import StepLoop


FAILED_GRACE_S = 5.0
"""How long a rank that failed goes on writing its records, after a checkpoint that is under
way."""

logger = logging.getLogger(__name__)


class ContextParts:
    """What one stage on one rank is made of; those that load torch are made by whoever needs
    them.
    """

    def __init__(self, config: RankConfig, place: Place, link: Link) -> None:
        """Make the light ones."""
        self.config = config
        self.place = place
        self.link = link
        self.state = TrainingState()
        if config.determinism == "elastic" and config.stage in ("train", "task"):
            from prefect_torch_ddp.rank.gradients.elastic import VirtualRanks  # noqa: PLC0415 - loads torch

            self.state.virtual = VirtualRanks(config, place)
        self.reporter = Reporter(config, place, self.state, link)
        self.made_tracker: Tracker | None = None
        self.temporary: TemporaryDirectory[str] | None = None
        """A folder to remove at the end."""
        self._made_loop: StepLoop | None = None
        self._closed = False

    @property
    def tracker(self) -> "Tracker":
        """What saves and restores."""
        if self.made_tracker is None:
            from prefect_torch_ddp.rank.checkpointing import Tracker  # noqa: PLC0415 - loads torch

            self.made_tracker = Tracker(
                self.config, self.place, self.state, self.reporter, self.link.heartbeat
            )
        return self.made_tracker

    @property
    def loop(self) -> "StepLoop":
        """What goes through the steps."""
        if self._made_loop is None:
            from prefect_torch_ddp.rank.loop.steps import StepLoop  # noqa: PLC0415 - loads torch

            self._made_loop = StepLoop(
                self.config, self.place, self.state, self.link, self.reporter, self.tracker
            )
        return self._made_loop

    def close(self, *, failed: bool, error: BaseException | None = None) -> None:
        """See `RankContext.close`; the error is what it failed with."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._made_loop is not None:
                self._made_loop.close(failed=failed)
            if self.made_tracker is not None or (self.place.world_size > 1 and not failed):
                self.tracker.close(failed=failed, error=error)
            if self.state.stopped_by is not None and self.made_tracker is not None and not failed:
                self.link.send_stopped(
                    Stopped(
                        self.state.step,
                        self.state.stopped_by,
                        self.made_tracker.checkpoint_status.last_step,
                    )
                )
        except BaseException:
            failed = True
            raise
        finally:
            if self.state.virtual is not None:
                self.state.virtual.close()
            self._close_reporter(failed=failed)

    def _close_reporter(self, *, failed: bool) -> None:
        try:
            self.reporter.close(FAILED_GRACE_S if failed else None)
        except StorageError as error:
            if not failed:
                raise
            # Beside the error that is on its way. What is in files, whoever started this rank
            # brings to the storage.
            what = "are lost" if self.link.copies is None else "are left to the gang's caller"
            logger.warning("records of rank %d %s: %s", self.place.rank, what, error)
        finally:
            if self.temporary is not None:
                self.temporary.cleanup()

    def outcome(self) -> dict[str, Any]:
        """See `RankContext.outcome`."""
        tracked = (
            self.made_tracker.checkpoint_status.outcome() if self.made_tracker is not None else {}
        )
        none = {"last_checkpoint": None, "best_checkpoint": None, "resumed_from_step": None}
        return {
            "num_steps": self.state.step,
            "num_epochs": self.state.position.epoch,
            **none,
            **tracked,
        }

    def export_model(self, workload: str) -> str | None:
        """See `RankContext.export_model`."""
        if self.made_tracker is None or self.place.rank != 0 or self.state.stopped_by is not None:
            return None
        return self.made_tracker.checkpoint_status.export_model(workload)


def local_config(
    storage: Storage | str | Path | None, **config: Any
) -> tuple[RankConfig, TemporaryDirectory[str] | None]:
    """Describe a run of one rank in this process, claim its next attempt where it trains, and
    seed the process.

    Returns:
        The description, and the temporary folder to clean up where no storage was given.
    """
    from prefect_torch_ddp.rank.generators import seed_stage  # noqa: PLC0415 - loads torch

    check_virtual_ranks(config["determinism"], config["virtual_ranks"])
    temporary = None
    if storage is None:
        temporary = TemporaryDirectory(prefix="prefect-torch-ddp-")
        storage = temporary.name
    where = DirectoryStorage(Path(storage)) if isinstance(storage, str | os.PathLike) else storage
    seed_stage(config["seed"], config["stage"])
    if isinstance(config["resume_from"], str):
        config["resume_from"] = parse_resume_from(config["resume_from"], where, storage_from_uri)
    if config.get("source") is not None:
        config["source"], _ = readable_at(config["source"])
    # Only a training is an attempt: who evaluates a checkpoint of a run, or prepares data for
    # it, must not end one that is alive.
    trains = config["stage"] in ("train", "task")
    attempt = (
        claim_attempt(where, config["run_id"])
        if trains
        else max(newest_attempt(where, config["run_id"]), 1)
    )
    return RankConfig(attempt=attempt, storage=where, **config), temporary
