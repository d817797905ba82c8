"""Replicas that drift apart on real ranks are refused at the first checkpoint."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from prefect_torch_ddp import RankContext
from prefect_torch_ddp.checkpoint.manifest import list_manifests
from tests.support.ranks import config_for, train_on
from tests.support.tracked import Tracked, steps_over

pytestmark = pytest.mark.timeout(120)


PAST_IT = ["past the wrapped model, updated by hand"]


class Net(nn.Module):
    """Two layers, with a norm between them."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.body(x)).relu())


def train(ctx: RankContext, how: str, epochs: int = 1) -> list[float]:
    """Train as healthy programs do, or as those do whose replicas drift apart."""
    torch.manual_seed(0)
    net = Net()
    wrapped = ctx.wrap(net, broadcast_buffers=how != "own buffers")
    model = net if how in PAST_IT else wrapped
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    averaged = torch.optim.swa_utils.AveragedModel(wrapped)
    ctx.track(model=net, optimizer=optimizer, averaged=averaged)
    x = torch.linspace(-1, 1, 64).reshape(16, 4)
    loader = ctx.loader(TensorDataset(x, x.sum(1, keepdim=True)), global_batch_size=4)
    for inputs, targets in ctx.steps(loader, epochs=epochs):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        if how in PAST_IT:
            with torch.no_grad():  # by hand, of which torch tells nobody
                for each in net.parameters():
                    each.sub_(each.grad)
            continue
        if how == "a step skipped by one rank" and (ctx.rank, ctx.step) == (1, 1):
            continue
        optimizer.step()
        if ctx.rank == 0:
            averaged.update_parameters(wrapped)
        meddle(ctx, how, net)
    return [each.sum().item() for each in net.parameters()]


def meddle(ctx: RankContext, how: str, net: nn.Module) -> None:
    """Flip one bit of a weight, once; or change running statistics on each rank."""
    if how == "a flipped bit" and (ctx.rank, ctx.step, ctx.attempt) == (1, 2, 1):
        chance, words = random.Random(2), net.body.weight.detach().view(torch.int32)
        words[chance.randrange(4), chance.randrange(4)] ^= 1 << chance.randrange(31)
    if how == "a forward pass after the step":
        net(torch.randn(3, 4))


DRIFTS = [*PAST_IT, "a step skipped by one rank", "a flipped bit"]


@pytest.mark.parametrize("how", DRIFTS)
def test_replicas_that_drift_apart_are_refused(tmp_path: Path, how: str) -> None:
    """The first checkpoint isn't committed; the error names object, tensor and rank."""
    config = config_for(tmp_path)
    said = r"ReplicasDifferError: .*'model' have drifted apart: body.weight .*differs on rank 1 "
    with pytest.raises(AssertionError, match=said):
        train_on(2, config, train, how)
    assert list_manifests(config.storage, "run") == []


@pytest.mark.parametrize("how", ["right", "own buffers", "a forward pass after the step"])
def test_healthy_trainings_are_let_alone(tmp_path: Path, how: str) -> None:
    """Checkpoints are committed although buffers and averaged weights differ by rank."""
    config = config_for(tmp_path)
    first, second = train_on(2, config, train, how)
    assert first == second
    assert [each.step for each in list_manifests(config.storage, "run")] == [2, 4]


def test_the_next_attempt_goes_back_to_replicas_that_agreed(tmp_path: Path) -> None:
    """A flipped bit doesn't come back: a restart ends with the undisturbed weights."""
    (undisturbed, _) = train_on(2, config_for(tmp_path / "a"), train, "right", 2)
    with pytest.raises(AssertionError, match="ReplicasDifferError"):
        train_on(2, config_for(tmp_path / "b"), train, "a flipped bit", 2)
    (again, _) = train_on(2, config_for(tmp_path / "b"), train, "a flipped bit", 2)
    assert again == undisturbed


def test_the_comparison_can_be_turned_off(tmp_path: Path) -> None:
    """`compare_replicas=False` saves one rank's weights although the ranks differ."""
    config = config_for(tmp_path)
    policy: Any = config.checkpoint.model_copy(update={"compare_replicas": False})
    first, second = train_on(2, replace(config, checkpoint=policy), train, PAST_IT[0])
    assert first != second


def read_on(ctx: RankContext, by: str) -> list[Any]:
    """Track each rank's position in its own data and a prefetched tensor; continue to read."""
    reader = Tracked({"position": 10 * ctx.rank, "batch": torch.full((2,), float(ctx.rank))})
    if by == "track":
        ctx.track(reader=reader)
    else:
        ctx.track_each(on_other_world_size=by, reader=reader)
    for _ in steps_over(ctx, 24, size=6, epochs=ctx.attempt):
        reader.value["position"] += 1
    return [reader.value["position"], *reader.value["batch"].tolist()]


def test_state_that_is_each_ranks_own_is_refused_in_track(tmp_path: Path) -> None:
    """The first checkpoint is refused with the object's name and the way out."""
    said = r"'reader' differs between the ranks: value on rank 1 .*call ctx.track_each\(reader="
    with pytest.raises(AssertionError, match=said):
        train_on(2, config_for(tmp_path), read_on, "track")


def read_by_rank(ctx: RankContext, *how: str) -> list[Any]:
    """Track the same object in another way on each rank."""
    return read_on(ctx, how[ctx.rank])


@pytest.mark.parametrize(
    ("how", "why"),
    [
        (("refuse", "track"), "the shard of rank 1 is missing"),
        (("track", "refuse"), "it was written as by_rank and as whole"),
    ],
)
def test_an_object_of_which_a_shard_lacks_is_not_committed(
    tmp_path: Path, how: tuple[str, str], why: str
) -> None:
    """The error names the object and the shard; `ctx.track` is for all ranks or for none."""
    config = config_for(tmp_path)
    with pytest.raises(AssertionError, match=rf"'reader' differs between the ranks \({why}\)"):
        train_on(2, config, read_by_rank, *how)
    assert list_manifests(config.storage, "run") == []


def test_each_rank_gets_its_own_state_back(tmp_path: Path) -> None:
    """`ctx.track_each` stores one shard of the object for each rank, and restores it there."""
    config = config_for(tmp_path)
    assert train_on(2, config, read_on, "refuse") == [[4, 0, 0], [14, 1, 1]]
    names = [item.name for item in list_manifests(config.storage, "run")[-1].objects]
    assert sorted(names) == ["rank-00000", "rank-00001", "reader.rank-00000", "reader.rank-00001"]
    assert train_on(2, config_for(tmp_path), read_on, "refuse") == [[8, 0, 0], [18, 1, 1]]


@pytest.mark.parametrize("choice", ["refuse", "begin"])
def test_own_states_at_another_number_of_ranks(tmp_path: Path, choice: str) -> None:
    """The states are refused by name, or start from the beginning if the call says so."""
    train_on(2, config_for(tmp_path), read_on, choice)
    if choice == "refuse":
        said = "'reader' was tracked by ctx.track_each on 2 ranks, and here are 3"
        with pytest.raises(AssertionError, match=said):
            train_on(3, config_for(tmp_path), read_on, choice)
    else:
        values = train_on(3, config_for(tmp_path), read_on, choice)
        assert [value[1:] for value in values] == [[0, 0], [1, 1], [2, 2]]
        assert [value[0] - 10 * rank for rank, value in enumerate(values)] == [4, 4, 4]
