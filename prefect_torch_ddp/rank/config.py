"""Owns the description a RankContext is made from: equal on all ranks, picklable, free of
torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from prefect_torch_ddp.checkpoint.resume_point import ResumePoint
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.params import CheckpointParams
from prefect_torch_ddp.storage.protocol import Readable, Storage

Stage = Literal["prepare", "train", "evaluate", "task"]
Determinism = Literal["default", "elastic"]


@dataclass(frozen=True)
class RankConfig:
    """What the ranks of one gang share beyond torch.distributed."""

    run_id: str
    """Names the run's folder: `<storage>/runs/<run_id>/`."""
    attempt: int
    stage: Stage
    storage: Storage
    dataset_id: str | None = None
    """The dataset below `<storage>/datasets/` that ctx.data stands for."""
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    checkpoint: CheckpointParams = field(default_factory=CheckpointParams)
    resume_from: ResumePoint | None = None
    """Where to take the first checkpoint from when this run has none of its own."""
    restore_step: int | None = None
    """In the evaluate stage: the step of the checkpoint to restore."""
    restore_attempt: int | None = None
    """Who made it; None: the newest attempt whose checkpoint of that step counts."""
    evaluate_on: Literal["last", "best"] = "last"
    """Which checkpoint's model a finished training leaves to others."""
    determinism: Determinism = "default"
    """"elastic": a training's bits are the same for every number of ranks that divides
    `virtual_ranks`."""
    virtual_ranks: int | None = None
    ledger: bool = False
    """Whether each step's samples are put on record."""
    source: Readable | None = None
    """Where the raw data is."""

    def __post_init__(self) -> None:
        """Refuse virtual ranks that can't be."""
        check_virtual_ranks(self.determinism, self.virtual_ranks, None)


def check_virtual_ranks(
    determinism: str, virtual_ranks: int | None, world_size: int | None
) -> None:
    """Refuse a kind of determinism and numbers of ranks that don't fit together.

    Args:
        determinism: what was chosen.
        virtual_ranks: how many, for elastic determinism.
        world_size: how many ranks there are to be; None: not known yet.

    Raises:
        InvalidParamsError: says which, and what to give.
    """
    if determinism not in get_args(Determinism):
        msg = f"determinism is {determinism!r}; choose one of {', '.join(get_args(Determinism))}"
    elif determinism == "default" and virtual_ranks is not None:
        msg = f"virtual_ranks is {virtual_ranks}, which needs determinism='elastic'"
    elif determinism == "elastic" and (virtual_ranks is None or virtual_ranks < 1):
        msg = f"determinism is 'elastic' and virtual_ranks is {virtual_ranks}; give the most ranks the training may ever have"
    elif virtual_ranks is not None and world_size is not None and virtual_ranks % world_size:
        msg = f"virtual_ranks is {virtual_ranks} and world_size {world_size}; give a world_size that divides virtual_ranks"
    else:
        return
    raise InvalidParamsError(msg)
