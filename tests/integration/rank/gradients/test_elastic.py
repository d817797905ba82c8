"""Elastic determinism: the same bits for every number of ranks that divides the virtual ranks;
what can't be so is refused."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from prefect_torch_ddp import RankContext, read_ledger
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.rank.config import RankConfig
from tests.integration.rank.loop.test_steps import expected_gradients, make_net
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
    """SHA-256 of the weights, with convolution, dropout, augmentation, clipping and AdamW, over
    uneven tails; without elastic determinism the bits differ."""
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
    """Six virtual ranks on 1 and 3, where branches don't fall together with ranks."""
    (one,), three = (fit_on(n, elastic_config(tmp_path / str(n), 6)) for n in (1, 3))
    assert three == [one] * 3
    assert one["sha256"] != expected["sha256"]


@pytest.mark.parametrize(
    "options",
    [
        {"max_samples": 2},
        {"precision": "bfloat16"},
        {"precision": "scaled", "max_samples": 2},
        {"global_batch_size": 22},
        {"sharded": True},
    ],
    ids=["micro-batches", "autocast", "scaler", "a tail of one", "shards"],
)
def test_it_holds_for_other_trainings(tmp_path: Path, options: dict[str, Any]) -> None:
    """Smaller micro-batches, mixed precision, a tail in which most ranks have nothing, data in
    shards."""
    sizes = (1, 4) if "global_batch_size" in options else (1, 2)
    (one,), several = (fit_on(n, elastic_config(tmp_path / str(n), options=options)) for n in sizes)
    assert several == [one] * sizes[1]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_local_context_gives_the_same_bits(
    tmp_path: Path, expected: dict[str, Any], num_workers: int
) -> None:
    """In a debugger too; augmentation draws the same in worker processes, and torch has its
    settings back afterwards."""

    def settings() -> tuple[object, ...]:
        is_exact = torch.are_deterministic_algorithms_enabled()
        return torch.get_num_threads(), is_exact, os.environ.get("CUBLAS_WORKSPACE_CONFIG")

    before = settings()
    options = {"num_workers": num_workers}
    elastic: dict[str, Any] = {"determinism": "elastic", "virtual_ranks": 4}
    with RankContext.local(storage=tmp_path, run_id="run", options=options, **elastic) as ctx:
        assert torch.get_num_threads() == 1
        assert healthy.fit_elastic(ctx) == expected
    assert settings() == before


def test_four_then_two_then_one_then_four_ranks_by_kills(
    tmp_path: Path, expected: dict[str, Any]
) -> None:
    """SIGKILL between two micro-batches three times, another number of ranks each time: the
    same bits, each sample once."""
    plan = {n: {"step": 2 * n + 1, "how": "SIGKILL"} for n in (1, 2, 3)}
    for world_size in (4, 2, 1):
        config = elastic_config(tmp_path, ledger=True)
        assert Died(-9) in fit_on(world_size, config, str(tmp_path), plan)
    assert fit_on(4, elastic_config(tmp_path, ledger=True)) == [expected] * 4
    report = read_ledger(tmp_path, "run")
    assert report.is_clean, str(report)
    assert [epoch.num_samples for epoch in report.epochs] == [healthy.NUM_SAMPLES] * healthy.EPOCHS


# ---- The gradient.


def gradients_of_epoch(ctx: RankContext, num_samples: int, batch_size: int) -> list[torch.Tensor]:
    """Return the flat gradient of every step of an epoch; a stand-in's loss is nan; one
    parameter is used by one sample alone."""
    net = make_net()
    net.register_parameter("unused", nn.Parameter(torch.zeros(2)))
    model = ctx.wrap(net)
    found = []
    loader = ctx.loader(TensorDataset(*healthy.points(num_samples)), global_batch_size=batch_size)
    for batch in ctx.steps(loader, epochs=1):
        model.zero_grad(set_to_none=ctx.step % 2 == 0)
        is_stand_in = ctx._state.share.num_local == 0
        for (inputs, targets), weight in ctx.micro_batches(batch, max_samples=2):
            loss = nn.functional.cross_entropy(model(inputs), targets) * weight
            (loss * float("nan") if is_stand_in else loss).backward()
        assert net.unused.grad is None
        used = [*net[0].parameters(), *net[2].parameters()]
        found.append(torch.cat([parameter.grad.flatten() for parameter in used]))
    return found


@pytest.mark.parametrize(
    ("world_size", "num_samples", "batch_size"), [(1, 11, 5), (2, 13, 6), (3, 10, 8)]
)
def test_gradients_are_those_of_the_global_batch(
    tmp_path: Path, world_size: int, num_samples: int, batch_size: int
) -> None:
    """On each rank, also with a tail smaller than the world; a parameter that nobody uses has
    none."""
    config = elastic_config(tmp_path, 6)
    values = train_on(world_size, config, gradients_of_epoch, num_samples, batch_size)
    expected = expected_gradients(num_samples, batch_size)
    for found in values:
        for gradient, right in zip(found, expected, strict=True):
            assert torch.allclose(gradient, right, rtol=0, atol=1e-12)
        assert all(torch.equal(one, other) for one, other in zip(found, values[0], strict=True))


# ---- Refusals.


def test_ranks_that_do_not_divide_the_virtual_ones_are_refused(tmp_path: Path) -> None:
    """Before anything else; and so is no number of them."""
    with pytest.raises(AssertionError, match="virtual_ranks is 4 and there are 3 ranks"):
        fit_on(3, elastic_config(tmp_path))
    empty = "determinism is 'elastic', but virtual_ranks is empty: give the most ranks"
    for determinism, virtual_ranks, says in [
        ("elastic", None, empty),
        ("elastic", 0, "virtual_ranks is 0"),
        ("default", 4, "virtual_ranks is 4, which needs determinism='elastic'"),
        ("perfect", 4, "determinism is 'perfect'; choose one of default, elastic"),
    ]:
        with pytest.raises(InvalidParamsError, match=says):
            RankContext.local(determinism=determinism, virtual_ranks=virtual_ranks)
