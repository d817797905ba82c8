"""The parts behind a RankContext: made when first needed, closed in order, and their outcome."""

import logging
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypedDict

from prefect_torch_ddp.checkpoint.attempts import claim_attempt, newest_attempt
from prefect_torch_ddp.checkpoint.resume_point import parse_resume_from
from prefect_torch_ddp.data.images.location import readable_at
from prefect_torch_ddp.params import CheckpointParams, Determinism, check_virtual_ranks
from prefect_torch_ddp.protocol.events import NO_RANK, RankStopped, Stopped
from prefect_torch_ddp.protocol.heartbeat import Phase
from prefect_torch_ddp.rank.config import RankConfig, RankInfo, Stage
from prefect_torch_ddp.rank.link import Link
from prefect_torch_ddp.rank.training.progress import TrainingState
from prefect_torch_ddp.rank.training.reporter import FAILED_GRACE_S, Reporter
from prefect_torch_ddp.rank.user_code import advise, default_to_fork
from prefect_torch_ddp.storage.locate import storage_at, storage_from_uri
from prefect_torch_ddp.storage.protocol import Readable, Storage

if TYPE_CHECKING:
    import torch

    from prefect_torch_ddp.rank.strategies.strategy import Strategy
    from prefect_torch_ddp.rank.training.steps import StepLoop
    from prefect_torch_ddp.rank.training.tracker import Tracker

logger = logging.getLogger(__name__)


class ContextParts:
    """What one stage on one rank is made of; parts that load torch are made when needed."""

    def __init__(
        self,
        config: RankConfig,
        info: RankInfo,
        link: Link | None = None,
        *,
        device: "torch.device | None" = None,
        folder: Path | None = None,
    ) -> None:
        """Make the light ones.

        Args:
            config: equal on all ranks.
            info: which rank this is.
            link: the way to the supervisor; None: there is none.
            device: None: CUDA's current one, else the CPU.
            folder: the local dataset, or in prepare the folder to write to; None: in the storage.
        """
        self.config = config
        self.info = info
        self.link = link or Link()
        self.link.heartbeat.enter(Phase.SETUP)
        self.state = TrainingState()
        self.folder = folder
        if config.is_elastic:
            _ = self.gradients  # from now on torch computes alike
        self.reporter = Reporter(config, info, self.state, self.link)
        self.temporary: TemporaryDirectory[str] | None = None
        self._device = device
        self._closed = False

    @cached_property
    def device(self) -> "torch.device":
        """Where this rank computes."""
        import torch  # noqa: PLC0415 - user code has loaded it by now

        if self._device is not None:
            return self._device
        has_cuda = torch.cuda.is_available()
        return (
            torch.device("cuda", torch.cuda.current_device()) if has_cuda else torch.device("cpu")
        )

    @cached_property
    def gradients(self) -> "Strategy":
        """What makes gradients those of the global batch."""
        # Loads torch.
        from prefect_torch_ddp.rank.strategies.ddp import ShareWeights  # noqa: PLC0415
        from prefect_torch_ddp.rank.strategies.elastic import VirtualRanks  # noqa: PLC0415

        if self.config.is_elastic:
            return VirtualRanks(self.config, self.info, self.link.heartbeat)
        return ShareWeights(self.info.world_size, self.link.heartbeat)

    @cached_property
    def tracker(self) -> "Tracker":
        """What saves and restores."""
        from prefect_torch_ddp.rank.training.tracker import Tracker  # noqa: PLC0415 - loads torch

        return Tracker(self.config, self.info, self.state, self.reporter, self.link.heartbeat)

    @cached_property
    def loop(self) -> "StepLoop":
        """What goes through the steps."""
        from prefect_torch_ddp.rank.training.steps import StepLoop  # noqa: PLC0415 - loads torch

        self.tracker.take_passes = self.gradients.take_passes
        here = (self.config, self.info, self.state, self.link)
        return StepLoop(*here, self.reporter, self.tracker, self.gradients)

    def close(self, *, failed: bool, error: BaseException | None = None) -> None:
        """See `RankContext.close`; the error is what it failed with."""
        if self._closed:
            return
        self._closed = True
        if error is not None:
            advise(error)
        state = self.state
        try:
            if self._has("loop"):
                self.loop.close(failed=failed)
            if self._has("tracker") or (self.info.world_size > 1 and not failed):
                self.tracker.close(failed=failed, error=error)
            if state.stopped_by is not None and not failed:
                last = self.tracker.last
                last_step = None if last is None else last.step
                stopped = Stopped(state.step, state.stopped_by, last_step)
                self.link.send(RankStopped(NO_RANK, stopped))
        except BaseException:
            failed = True
            raise
        finally:
            if self._has("gradients"):
                self.gradients.close()
            self._close_reporter(failed=failed)

    def outcome(self) -> dict[str, Any]:
        """Return counts, checkpoints and the step resumed from, of a closed training."""
        tracked = self.tracker.outcome() if self._has("tracker") else {}
        none = {"last_checkpoint": None, "best_checkpoint": None, "resumed_from_step": None}
        state = self.state
        return {"num_steps": state.step, "num_epochs": state.position.epoch, **none, **tracked}

    def export_models(self, workload: str) -> dict[str, str]:
        """Export a closed training's models, on rank 0; return their URIs by name.

        None where none was tracked or the training was stopped.
        """
        if self.info.rank != 0 or self.state.stopped_by is not None or not self._has("tracker"):
            return {}
        return self.tracker.export(workload)

    def _has(self, part: str) -> bool:
        return part in vars(self)

    def _close_reporter(self, *, failed: bool) -> None:
        try:
            self.reporter.close(FAILED_GRACE_S if failed else None)
        except Exception as error:
            if not failed:
                raise
            # Beside the error that is on its way. What is in files, whoever started this rank
            # brings to the storage.
            what = "are lost" if self.link.copies is None else "are left to the gang's caller"
            logger.warning("its records %s: %s", what, error)
        finally:
            if self.temporary is not None:
                self.temporary.cleanup()


class LocalOptions(TypedDict, total=False):
    """What `RankContext.local` takes by name."""

    run_id: str
    """Names the run's folder; the same one again resumes it. "local", where it isn't given."""
    stage: Stage
    """"evaluate" restores the checkpoint of `restore_step`, or the newest; "train", where it isn't
    given."""
    checkpoint: CheckpointParams | None
    """When checkpoints are written, and which are kept."""
    resume_from: str | None
    """Run to take the first checkpoint from: its id, or `<path or s3:// URI of its
    storage>/runs/<id>`, either perhaps with `/checkpoints/step-00000400`."""
    restore_step: int | None
    """See stage."""
    determinism: Determinism
    """"elastic" gives the bits that any number of ranks dividing `virtual_ranks` gives."""
    virtual_ranks: int | None
    """See determinism."""
    ledger: bool
    """Record which samples each step trains on; `read_ledger` checks it."""
    source: Readable | str | Path | None
    """What `ctx.source` is to be: a storage, a path or an s3:// URI."""


def local_parts(
    data: str | Path | None,
    options: Mapping[str, Any] | None,
    seed: int,
    storage: Storage | str | Path | None,
    chosen: LocalOptions,
) -> ContextParts:
    """Make the parts of one rank here, as `RankContext.local` says; claim an attempt, seed."""
    from prefect_torch_ddp.rank.generators import seed_stage  # noqa: PLC0415 - loads torch

    unknown = sorted(chosen.keys() - LocalOptions.__annotations__.keys())
    if unknown:  # before an attempt is claimed
        msg = f"RankContext.local() got an unexpected keyword argument {unknown[0]!r}"
        raise TypeError(msg)
    given = {name: value for name, value in chosen.items() if value is not None}
    config: dict[str, Any] = {"run_id": "local", "stage": "train", **given}
    check_virtual_ranks(config.get("determinism", "default"), config.get("virtual_ranks"))
    temporary = None
    if storage is None:
        temporary = TemporaryDirectory(prefix="prefect-torch-ddp-")
        storage = temporary.name
    where = storage_at(storage)
    if isinstance(config.get("resume_from"), str):
        config["resume_from"] = parse_resume_from(config["resume_from"], where, storage_from_uri)
    if "source" in config:
        config["source"], _ = readable_at(config["source"])
    default_to_fork()
    seed_stage(seed, config["stage"])
    # Only a training is an attempt: who evaluates a checkpoint of a run, or prepares data for
    # it, must not end one that is alive.
    trains = config["stage"] in ("train", "task")
    run = (where, config["run_id"])
    attempt = claim_attempt(*run) if trains else max(newest_attempt(*run), 1)
    config |= {"attempt": attempt, "storage": where, "options": dict(options or {}), "seed": seed}
    folder = None if data is None else Path(data)
    parts = ContextParts(RankConfig(**config), RankInfo(), folder=folder)
    parts.temporary = temporary
    return parts
