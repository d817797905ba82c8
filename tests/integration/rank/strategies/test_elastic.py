"""Elastic determinism gives the same bits on any number of ranks that divides the virtual ranks."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from prefect_torch_ddp import InvalidParamsError, RankContext, read_ledger
from prefect_torch_ddp.rank.config import RankConfig
from tests.support.ranks import Died, config_for, train_on
from tests.workloads import healthy


def elastic_config(folder: Path, virtual_ranks: int = 4, **fields: Any) -> RankConfig:
    """Describe an elastic training with a checkpoint at each step; claims its next attempt."""
    return config_for(folder, 1, determinism="elastic", virtual_ranks=virtual_ranks, **fields)


def fit_on(world_size: int, config: RankConfig, *args: Any) -> list[Any]:
    """Train on so many ranks."""
    return train_on(world_size, config, healthy.fit_elastic, *args)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Train undisturbed on one rank with four virtual ones."""
    (value,) = fit_on(1, elastic_config(tmp_path_factory.mktemp("one")))
    return value


@pytest.mark.parametrize("world_size", [2, 4])
def test_one_two_and_four_ranks_end_with_the_same_bits(
    tmp_path: Path, expected: dict[str, Any], world_size: int
) -> None:
    """The weights' SHA-256 is the same with dropout, augmentation, clipping and uneven tails."""
    assert fit_on(world_size, elastic_config(tmp_path / "a")) == [expected] * world_size
    assert expected["steps"] == 8
    if world_size == 2:
        config = elastic_config(tmp_path / "b")
        one, other = fit_on(2, replace(config, determinism="default", virtual_ranks=None))
        assert one == other
        assert one["sha256"] != expected["sha256"]


def test_another_number_of_virtual_ranks_is_another_training(
    tmp_path: Path, expected: dict[str, Any]
) -> None:
    """Six virtual ranks give the same bits on 1 and 3 ranks."""
    (one,), three = (fit_on(n, elastic_config(tmp_path / str(n), 6)) for n in (1, 3))
    assert three == [one] * 3
    assert one["sha256"] != expected["sha256"]


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "scaled", "max_samples": 2},
        {"global_batch_size": 22},
        {"sharded": True},
    ],
    ids=["micro-batches and a scaler", "a tail of one", "shards"],
)
def test_it_holds_for_other_trainings(tmp_path: Path, options: dict[str, Any]) -> None:
    """Smaller micro-batches, mixed precision, short tails and shards give the same bits."""
    sizes = (1, 4) if "global_batch_size" in options else (1, 2)
    (one,), several = (fit_on(n, elastic_config(tmp_path / str(n), options=options)) for n in sizes)
    assert several == [one] * sizes[1]


def test_a_local_context_gives_the_same_bits(tmp_path: Path, expected: dict[str, Any]) -> None:
    """`RankContext.local()` gives the same bits and restores torch's settings."""

    def settings() -> tuple[object, ...]:
        is_exact = torch.are_deterministic_algorithms_enabled()
        return torch.get_num_threads(), is_exact, os.environ.get("CUBLAS_WORKSPACE_CONFIG")

    before = settings()
    elastic: dict[str, Any] = {"determinism": "elastic", "virtual_ranks": 4}
    with RankContext.local(storage=tmp_path, options={"num_workers": 2}, **elastic) as ctx:
        assert torch.get_num_threads() == 1
        assert healthy.fit_elastic(ctx) == expected
    assert settings() == before


def test_four_then_two_then_one_then_four_ranks_by_kills(
    tmp_path: Path, expected: dict[str, Any]
) -> None:
    """Three kills between micro-batches, each with another number of ranks, change no bit."""
    plan = {n: {"step": 2 * n + 1, "how": "SIGKILL"} for n in (1, 2, 3)}
    for world_size in (4, 2, 1):
        config = elastic_config(tmp_path, ledger=True)
        assert Died(-9) in fit_on(world_size, config, str(tmp_path), plan)
    assert fit_on(4, elastic_config(tmp_path, ledger=True)) == [expected] * 4
    report = read_ledger(tmp_path, "run")
    assert report.is_clean, str(report)
    assert [epoch.num_samples for epoch in report.epochs] == [healthy.NUM_SAMPLES] * healthy.EPOCHS


def draws_of_two_loops(ctx: RankContext) -> list[list[float]]:
    """Return what this rank draws in each loop over micro-batches, two in a step."""
    model = ctx.wrap(torch.nn.Linear(1, 1))
    drawn: list[list[float]] = []
    dataset = torch.utils.data.TensorDataset(torch.ones(8, 1))
    for batch in ctx.steps(ctx.loader(dataset, global_batch_size=4), epochs=1):
        for _ in range(2):
            drawn.append([])
            for (x,), weight in ctx.micro_batches(batch):
                drawn[-1].append(torch.rand(1).item())
                (model(x).mean() * weight).backward()
            model.zero_grad()
            drawn.append([torch.rand(1).item()])  # all ranks draw the same
    return drawn


def test_each_loop_over_micro_batches_draws_its_own_numbers(tmp_path: Path) -> None:
    """As for the noise of a GAN's two parts; the same on any number of ranks."""
    (one,), (first, second) = (
        train_on(n, elastic_config(tmp_path / str(n), 2), draws_of_two_loops) for n in (1, 2)
    )
    numbers = [number for loop in one for number in loop]
    assert len(set(numbers)) == len(numbers) == 2 * 2 * (2 + 1)
    assert [loop for loop in one if len(loop) == 2] == [
        [*mine, *other] for mine, other in zip(first[::2], second[::2], strict=True)
    ]
    assert one[1::2] == first[1::2] == second[1::2]


def own_loop(ctx: RankContext) -> str:
    """Train without ctx.steps; return what that is refused with."""
    model = ctx.wrap(torch.nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().mul(0).backward()
    optimizer.step()  # as who makes an optimizer's state does it, of gradients that are zeros
    try:
        model(torch.full((2, 4), ctx.rank + 1.0)).sum().backward()
        optimizer.step()
    except InvalidParamsError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_step_outside_the_loop_is_refused_on_several_ranks(
    tmp_path: Path, world_size: int
) -> None:
    """Nobody sums its gradients: the replicas would drift apart. One rank has nothing to sum."""
    for said in train_on(world_size, elastic_config(tmp_path), own_loop):
        assert said.startswith("an optimizer is about to step outside ctx.steps") == (
            world_size == 2
        )
