"""Owns what can be chosen of a ddp_task beyond Prefect's own options."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prefect_torch_ddp.checkpoint.source import Source
from prefect_torch_ddp.messages import Backend
from prefect_torch_ddp.params import DEFAULT_STORAGE, CheckpointParams
from prefect_torch_ddp.rank.config import CheckpointPolicy, Determinism, RankConfig, check_virtual_ranks
from prefect_torch_ddp.storage.protocol import Storage


@dataclass(frozen=True)
class GangOptions:
    """The options of `ddp_task`, which explains them."""

    world_size: int | None = None
    ranks_per_worker: int = 1
    backend: Backend = "auto"
    storage: str = DEFAULT_STORAGE
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    checkpoint: CheckpointParams = field(default_factory=CheckpointParams)
    max_restarts: int = 0
    min_world_size: int | None = None
    workers_timeout_s: float = 60.0
    queue_timeout_s: float | None = None
    progress_timeout_s: float | None = 60.0
    resources: Mapping[str, float] | None = None
    interface: str | None = None
    stop_grace_s: float = 20.0
    determinism: Determinism = "default"
    virtual_ranks: int | None = None
    resume_from: str | None = None
    ledger: bool = False

    def __post_init__(self) -> None:
        """Refuse virtual ranks that can't be."""
        check_virtual_ranks(self.determinism, self.virtual_ranks, self.world_size)

    def rank_config(self, run_id: str, attempt: int, storage: Storage, resume_from: Source | None) -> RankConfig:
        """Describe the context of the ranks of one attempt."""
        return RankConfig(
            run_id=run_id,
            attempt=attempt,
            stage="task",
            storage=storage,
            options=dict(self.options),
            seed=self.seed,
            checkpoint=CheckpointPolicy(**self.checkpoint.model_dump()),
            resume_from=resume_from,
            determinism=self.determinism,
            virtual_ranks=self.virtual_ranks,
            ledger=self.ledger,
        )

    def for_gang(self) -> dict[str, Any]:
        """Return run_gang's arguments."""
        return {
            "world_size": self.world_size,
            "ranks_per_worker": self.ranks_per_worker,
            "backend": self.backend,
            "workers_timeout_s": self.workers_timeout_s,
            "queue_timeout_s": self.queue_timeout_s,
            "progress_timeout_s": self.progress_timeout_s,
            "resources": self.resources,
            "interface": self.interface,
            "stop_grace_s": self.stop_grace_s,
            "max_restarts": self.max_restarts,
            "min_world_size": self.min_world_size,
            "world_size_divides": self.virtual_ranks,
        }
