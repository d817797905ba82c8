"""Owns what a training has on record: its newest checkpoint, its best one, what is in the way of the next, and its model."""

from collections.abc import Mapping
from typing import Any

from prefect_torch_ddp.checkpoint.checkpointer import Checkpointer
from prefect_torch_ddp.checkpoint.manifest import Manifest, best, checkpoint_ref, read_manifest
from prefect_torch_ddp.checkpoint.restore import Restorer
from prefect_torch_ddp.rank.config import RankConfig
from prefect_torch_ddp.rank.export import leave_model, model_among
from prefect_torch_ddp.rank.state import Place


class Standing:
    """Where a training stands, for those who ask; rank 0 knows."""

    def __init__(self, config: RankConfig, place: Place, objects: Mapping[str, Any]) -> None:
        """Know of nothing yet but the objects that are tracked."""
        self._config = config
        self._place = place
        self._objects = objects
        self._restorer: Restorer | None = None
        self._checkpointer: Checkpointer | None = None

    def begin(self, restorer: Restorer, checkpointer: Checkpointer | None) -> None:
        """Learn where the training went on, and who writes its checkpoints."""
        self._restorer = restorer
        self._checkpointer = checkpointer

    @property
    def last(self) -> Manifest | None:
        """The run's newest checkpoint, on rank 0; None where there is none."""
        last = self._checkpointer.last if self._checkpointer is not None else None
        if last is None and self._place.rank == 0 and self._restorer is not None and self._restorer.is_ours:
            return self._restorer.manifest
        return last

    @property
    def last_step(self) -> int | None:
        """The number of that checkpoint."""
        last = self.last
        return None if last is None else last.step

    def trouble(self) -> str:
        """Say, on rank 0, since when there has been no checkpoint and why; nothing where the last one that was due is there."""
        reason = self._checkpointer.trouble if self._checkpointer is not None else ""
        if not reason:
            return ""
        return f"no checkpoint {'yet' if self.last_step is None else f'since step {self.last_step}'}: {reason}"

    def outcome(self) -> dict[str, Any]:
        """Return the run's checkpoints, on rank 0, and where this attempt went on from."""
        storage, run_id, policy = self._config.storage, self._config.run_id, self._config.checkpoint
        restored = self._restorer.manifest if self._restorer is not None else None
        last = self.last
        top = None
        if policy.best_metric is not None and self._place.rank == 0:
            top = best(storage, run_id, policy.best_metric, policy.best_mode)
        return {
            "last_checkpoint": None if last is None else checkpoint_ref(storage, last).model_dump(),
            "best_checkpoint": None if top is None else top.model_dump(),
            "resumed_from_step": None if restored is None else restored.step,
        }

    def export_model(self, workload: str) -> str | None:
        """Leave the model of the checkpoint that is evaluated, on rank 0; return its URI, None where there is none."""
        config, policy = self._config, self._config.checkpoint
        chosen = self.last
        if config.evaluate_on == "best" and policy.best_metric is not None:
            top = best(config.storage, config.run_id, policy.best_metric, policy.best_mode)
            chosen = None if top is None else read_manifest(config.storage, config.run_id, top.step, top.attempt)
        name = model_among(self._objects)
        return None if chosen is None or name is None else leave_model(config, workload, chosen, name)
