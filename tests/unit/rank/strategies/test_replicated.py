"""Which shards each rank saves if every rank holds the models whole."""

from typing import Any

import pytest
import torch
from torch import nn

from prefect_torch_ddp.checkpoint.shard import Shard, uncovered
from prefect_torch_ddp.checkpoint.state.own_state import OwnState
from prefect_torch_ddp.params import CheckpointParams
from prefect_torch_ddp.rank.config import RankConfig, RankInfo
from prefect_torch_ddp.rank.heartbeat_writer import HeartbeatWriter
from prefect_torch_ddp.rank.strategies.choice import strategy_for
from prefect_torch_ddp.rank.strategies.replicated import dealt_out
from prefect_torch_ddp.storage.directory import DirectoryStorage
from tests.support.tracked import Tracked

MODEL, NORM, AVERAGED = nn.Linear(1, 1), nn.BatchNorm1d(1), nn.Linear(1, 1)
OPTIMIZER = torch.optim.SGD([*MODEL.parameters(), *NORM.parameters()])


def objects_on(rank: int, world_size: int) -> dict[str, Any]:
    """Return what a rank tracks."""
    return {
        "averaged": AVERAGED,
        "model": MODEL,
        "norm": NORM,
        "optimizer": OPTIMIZER,
        "history": Tracked([1, 2]),
        "reader": OwnState(Tracked(rank), rank, world_size),
    }


def saved_by(rank: int, world_size: int) -> list[str]:
    """Return the names of the shards that a rank saves."""
    shares = dealt_out(objects_on(rank, world_size), RankInfo(rank, world_size))
    return [shard.name for shard in shares]


@pytest.mark.parametrize(
    ("world_size", "expected"),
    [
        (1, [["averaged", "model", "norm", "optimizer", "history", "reader.rank-00000"]]),
        (
            2,
            [
                ["averaged", "norm", "history", "reader.rank-00000"],
                ["model", "optimizer", "reader.rank-00001"],
            ],
        ),
        (
            4,
            [
                ["averaged", "norm", "history", "reader.rank-00000"],
                ["model", "reader.rank-00001"],
                ["reader.rank-00002"],
                ["optimizer", "reader.rank-00003"],
            ],
        ),
    ],
)
def test_what_is_the_same_everywhere_is_dealt_out(
    world_size: int, expected: list[list[str]]
) -> None:
    """Optimizers, and the modules without buffers that they train. Rank 0 saves the rest, and each
    rank its own state."""
    assert [saved_by(rank, world_size) for rank in range(world_size)] == expected


class Counter(nn.Module):
    """A module with a state that is neither a parameter nor a buffer."""

    def __init__(self, *, is_trained: bool) -> None:
        super().__init__()
        self.inner = MODEL if is_trained else nn.Identity()
        self.count = 0

    def get_extra_state(self) -> int:
        return self.count

    def set_extra_state(self, state: int) -> None:
        self.count = state


@pytest.mark.parametrize(
    "module",
    [nn.Identity(), Counter(is_trained=False), nn.Sequential(Counter(is_trained=True))],
    ids=["without parameters", "only another state", "parameters and another state"],
)
def test_a_module_with_any_state_but_parameters_is_rank_0s(module: nn.Module) -> None:
    """Only rank 0 may have changed it, so it was lost if another rank saved it."""
    objects = {"first": OPTIMIZER, "module": module}
    assert [[*dealt_out(objects, RankInfo(rank, 2))] for rank in range(2)] == [
        [Shard("first"), Shard("module")],
        [],
    ]


@pytest.mark.parametrize("determinism", ["default", "elastic"])
def test_the_shares_of_all_ranks_are_each_object_once(determinism: Any, tmp_path: Any) -> None:
    """With each strategy, as the commit asks for it; and each share has what has its state."""
    virtual = 4 if determinism == "elastic" else None
    config = RankConfig(
        *("run", 1, "train", DirectoryStorage(tmp_path)),
        checkpoint=CheckpointParams(),
        determinism=determinism,
        virtual_ranks=virtual,
    )
    written: list[Shard] = []
    for rank in range(2):
        strategy = strategy_for(config, RankInfo(rank, 2), HeartbeatWriter())
        try:
            objects = objects_on(rank, 2)
            shares = strategy.shares(strategy.tracked(objects))
        finally:
            strategy.close()
        assert all(objects[shard.object] is item for shard, item in shares.items())
        written += shares
    assert uncovered(objects_on(0, 2), written, 2) is None
