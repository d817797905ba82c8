"""The parts behind a RankContext: made when first needed, closed in order, and their outcome."""

import logging
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefect_torch_ddp.lazy import exported_by
from prefect_torch_ddp.protocol.heartbeat import Phase
from prefect_torch_ddp.rank.config import RankConfig, RankInfo
from prefect_torch_ddp.rank.link import Link
from prefect_torch_ddp.rank.training.loop_progress import LoopProgress, Requests
from prefect_torch_ddp.rank.training.numbers import CheckpointNumbers
from prefect_torch_ddp.rank.training.replay import Replay
from prefect_torch_ddp.rank.training.reporting.reporter import FAILED_GRACE_S, Reporter
from prefect_torch_ddp.rank.user_code import advise

if TYPE_CHECKING:
    from tempfile import TemporaryDirectory

    import torch

    from prefect_torch_ddp.rank.programs.program import Program
    from prefect_torch_ddp.rank.strategies.strategy import Strategy
    from prefect_torch_ddp.rank.training.saver import Saver
    from prefect_torch_ddp.rank.training.steps import StepLoop
    from prefect_torch_ddp.rank.training.training_state import TrainingState

logger = logging.getLogger(__name__)


@exported_by("prefect_torch_ddp")
class ContextAssembly:
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
        self.progress = LoopProgress()
        self.requests = Requests()
        self.replay = Replay(CheckpointNumbers(self.progress), config.trains)
        self.tracked: dict[str, Any] = {}
        self.categories: dict[str, tuple[str, ...]] = {}
        """Of the tables that were given to `ctx.loader`, by column name: the first one's."""
        self.folder = folder
        if config.is_elastic:
            _ = self.gradients  # from now on torch computes deterministically
        self.reporter = Reporter(config, info, self.replay, self.link, self.tracked, self._trouble)
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
        from prefect_torch_ddp.rank.strategies.choice import strategy_for  # noqa: PLC0415 - torch

        return strategy_for(self.config, self.info, self.link.heartbeat)

    @cached_property
    def saver(self) -> "Saver":
        """What saves."""
        from prefect_torch_ddp.rank.training.saver import Saver  # noqa: PLC0415 - loads torch

        shown = (self.reporter, self.link.heartbeat)
        return Saver(self.config, self.info, self.replay, *shown, self.tracked, self.gradients)

    @cached_property
    def training_state(self) -> "TrainingState":
        """What restores, and has the saver save."""
        from prefect_torch_ddp.rank.training.training_state import (  # noqa: PLC0415 - loads torch
            TrainingState,
        )

        shown = (self.reporter, self.link.heartbeat)
        return TrainingState(self.config, self.info, self.replay, self.saver, *shown)

    @cached_property
    def loop(self) -> "StepLoop":
        """What goes through the steps."""
        from prefect_torch_ddp.rank.training.steps import StepLoop  # noqa: PLC0415 - loads torch

        here = (self.config, self.info, self.requests, self.replay, self.link)
        return StepLoop(*here, self.reporter, self.training_state, self.gradients)

    @cached_property
    def program(self) -> "Program":
        """What a program with its own loop or checkpoints is given."""
        from prefect_torch_ddp.rank.programs.program import Program  # noqa: PLC0415 - loads torch

        here = (self.config, self.info, self.requests, self.replay.numbers, self.link)
        return Program(*here, self.saver, self.training_state)

    @property
    def saves_folders(self) -> bool:
        """Whether the training writes its own checkpoints."""
        return self._has("program") and self.program.saves_folders

    @property
    def asks_due(self) -> bool:
        """Whether the training has its own loop, and asks in it when to save."""
        return self._has("program") and self.program.step is not None

    @property
    def left(self) -> bool:
        """Whether user code took nothing of the model in the checkpoint that it was given."""
        resumed = self.training_state.resumed if self._has("training_state") else None
        return resumed is None or bool(resumed.left)

    def close(self, *, failed: bool, error: BaseException | None = None) -> None:
        """See `RankContext.close`; the error is what it failed with."""
        if self._closed:
            return
        self._closed = True
        if error is not None:
            advise(error)
        progress = self.progress
        try:
            self._close_loops(failed=failed)
            asks = self.info.world_size > 1 or self.config.resume_from is not None
            if self._has("saver") or (asks and not failed):
                self.training_state.close(failed=failed, error=error)
            if progress.stopped_by is not None:  # code after the loop may refuse what it finds
                last = self.saver.last
                last_saved = None if last is None else last.step
                own = self.program.step if self._has("program") else None
                step = self.replay.numbers.step_done if own is None else own
                is_saved = self.training_state.has_saved(step)
                self.link.say_stopped(step, progress.stopped_by, last_saved, is_saved=is_saved)
        except BaseException:
            failed = True
            raise
        finally:
            if self._has("gradients"):
                self.gradients.close()
            self._close_reporter(failed=failed)

    def outcome(self) -> dict[str, Any]:
        """Return counts, checkpoints and the step resumed from, of a closed training."""
        numbers = self.replay.numbers
        counts = {"num_steps": numbers.step_done, "num_epochs": numbers.epoch_done}
        if not self._has("saver"):
            none = {"last_checkpoint": None, "best_checkpoint": None, "resumed_from_step": None}
            return {**counts, **none}
        from prefect_torch_ddp.rank.training.outcome import checkpoints_of  # noqa: PLC0415 - torch

        has_ended = self.progress.stopped_by is None if self.info.rank == 0 else None
        found = (self.config, self.saver.last, self.training_state.resumed)
        return {**counts, **checkpoints_of(*found, has_ended=has_ended)}

    def export_models(self, workload: str, value: Mapping[str, Any]) -> dict[str, str]:
        """Export a closed training's models, on rank 0; return their URIs by name.

        Their cards have the value that the training returned. No model is exported if none was
        tracked or the training was stopped.
        """
        if self.info.rank != 0 or self.progress.stopped_by is not None or not self._has("saver"):
            return {}
        from prefect_torch_ddp.rank.training.outcome import (  # noqa: PLC0415 - loads torch
            categories_on_card,
            export_tracked,
        )

        about = {"workload": workload, "value": value}
        if self.categories:
            about["categories"] = categories_on_card(self.categories)
        return export_tracked(self.config, self.saver.last, self.tracked, about)

    def _close_loops(self, *, failed: bool) -> None:
        if self._has("loop"):
            self.loop.close(failed=failed)
        if self._has("program"):
            self.program.close_loop(failed=failed)

    def _trouble(self) -> str:
        return self.saver.trouble() if self._has("saver") else ""

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
            if self._has("program"):
                self.program.close()
