"""Gradients are the global batch's, however it is shared and accumulated, also after kills."""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from prefect_torch_ddp import RankContext, read_ledger
from prefect_torch_ddp.data.sampler import GlobalBatches
from prefect_torch_ddp.rank.strategies import ddp
from tests.support.ranks import Died, config_for, train_on
from tests.workloads import healthy

ELASTIC = {"determinism": "elastic", "virtual_ranks": 6}
OPTIONS = {"max_samples": 2, "precision": "scaled", "overflow_at": 4, "sharded": True}
SCALED: dict[str, Any] = {"options": OPTIONS, "ledger": True}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Train on two ranks in mixed precision, with a step that overflows, on shards."""
    return train_on(2, config_for(tmp_path_factory.mktemp("whole"), **SCALED), healthy.fit_elastic)


def make_net() -> nn.Sequential:
    """Return a small network, the same one always."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def passes(ctx: RankContext, model: Any, batch: Any, way: str, number: int) -> Iterator[Any]:
    """Yield what each backward pass of a step is over, and its weight."""
    if way == "micro-batches":
        yield from ctx.micro_batches(batch, max_samples=number)
        return
    for i in range(number):
        is_quiet = way == "unsynchronised" and i < number - 1
        with model.no_sync() if is_quiet else nullcontext():
            yield batch, 1 / number


def gradients_of_epoch(
    ctx: RankContext, num_samples: int, batch_size: int, ways: dict[str, int]
) -> dict[str, tuple[list[torch.Tensor], int]]:
    """Return for each way the flat gradient of every step of an epoch, and how often the ranks
    talked; a stand-in's loss is nan. The ways have so many passes, or samples in a micro-batch."""
    num_talks, sum_by_share, found = 0, ddp._sum_by_share, {}

    def counting(context: Any, bucket: Any) -> Any:
        nonlocal num_talks
        num_talks += 1
        return sum_by_share(context, bucket)

    counting.__annotations__ = sum_by_share.__annotations__
    ddp._sum_by_share = counting
    dataset = TensorDataset(*healthy.points(num_samples))
    for way, number in ways.items():
        net = make_net()
        used = list(net.parameters())
        if ctx.config.is_elastic:
            net.register_parameter("unused", nn.Parameter(torch.zeros(2)))
        model = ctx.wrap(net)
        num_talks, gradients = 0, []
        for batch in ctx.steps(ctx.loader(dataset, global_batch_size=batch_size), epochs=1):
            model.zero_grad(set_to_none=ctx.step % 2 == 0)
            is_stand_in = ctx._progress.share.num_local == 0
            for (inputs, targets), weight in passes(ctx, model, batch, way, number):
                loss = nn.functional.cross_entropy(model(inputs), targets) * weight
                (loss * float("nan") if is_stand_in else loss).backward()
            assert not ctx.config.is_elastic or net.unused.grad is None
            gradients.append(torch.cat([parameter.grad.flatten() for parameter in used]))
        found[way] = gradients, num_talks
    return found


def expected_gradients(num_samples: int, batch_size: int, epoch: int) -> list[torch.Tensor]:
    """Compute them on one process, without any of our classes but the order of the samples."""
    net = make_net()
    inputs, targets = healthy.points(num_samples)
    order = GlobalBatches(num_samples, batch_size)
    expected = []
    for batch in range(order.num_batches):
        chosen = order.share(epoch, batch, 0, 1)
        net.zero_grad()
        nn.functional.cross_entropy(net(inputs[chosen]), targets[chosen]).backward()
        expected.append(torch.cat([parameter.grad.flatten() for parameter in net.parameters()]))
    return expected


@pytest.mark.parametrize(
    ("world_size", "sizes", "ways", "options"),
    [
        (2, (11, 5), {"at once": 1, "in several": 3, "unsynchronised": 2, "micro-batches": 2}, {}),
        (3, (13, 4), {"at once": 1, "micro-batches": 1}, {}),
        (1, (11, 5), {"micro-batches": 2}, {}),
        (1, (11, 5), {"micro-batches": 2}, ELASTIC),
        (3, (10, 8), {"micro-batches": 2}, ELASTIC),
    ],
)
def test_gradients_are_those_of_the_global_batch(
    tmp_path: Path,
    world_size: int,
    sizes: tuple[int, int],
    ways: dict[str, int],
    options: dict[str, Any],
) -> None:
    """Each rank has the single-process gradient, for any shares, tails and accumulation."""
    config = config_for(tmp_path, **options)
    values = train_on(world_size, config, gradients_of_epoch, *sizes, ways)
    for epoch, way in enumerate(ways):
        expected = expected_gradients(*sizes, epoch)
        for gradients, num_talks in (of_rank[way] for of_rank in values):
            for gradient, right in zip(gradients, expected, strict=True):
                assert torch.allclose(gradient, right, rtol=0, atol=1e-12), way
            assert all(map(torch.equal, gradients, values[0][way][0]))
            if way == "micro-batches":  # the net fits into one bucket
                assert num_talks == (0 if world_size == 1 or options else len(expected))


@pytest.mark.parametrize("die_at", [4, 6], ids=["scale grown", "scale fallen"])
def test_a_kill_between_two_micro_batches(
    tmp_path: Path, undisturbed: list[Any], die_at: int
) -> None:
    """A resumed training has the bits and the scale of the uninterrupted one, before and
    after overflows."""
    assert undisturbed[0]["scale"] == pytest.approx(2456.5)
    death = {1: {"step": die_at, "how": "SIGKILL"}}
    killed = config_for(tmp_path, **SCALED), healthy.fit_elastic, str(tmp_path), death
    assert Died(-9) in train_on(2, *killed)
    assert train_on(2, config_for(tmp_path, **SCALED), healthy.fit_elastic) == undisturbed
    report = read_ledger(tmp_path, "run")
    each_once = [f"epoch {n}: {healthy.NUM_SAMPLES} samples, each once" for n in (1, 2)]
    assert str(report).splitlines() == each_once
    assert report.attempts == {1: 2, 2: 2}


def scaled_and_clipped(ctx: RankContext, *, scales: bool) -> tuple[list[torch.Tensor], str]:
    """Train with autocast, with or without a GradScaler, one of whose steps overflows; clip
    what was unscaled."""
    net = make_net().float()
    model = ctx.wrap(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    # Powers of two, so that scaling changes no bit.
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2, enabled=scales)
    norms = []
    inputs, targets = healthy.points(11)
    data = TensorDataset(inputs.float(), targets)
    for batch in ctx.steps(ctx.loader(data, global_batch_size=5, shuffle=False), epochs=2):
        optimizer.zero_grad()
        overflows = len(norms) == 2
        for (x, y), weight in ctx.micro_batches(batch, max_samples=1):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(model(x), y)
            scaler.scale(loss * weight * (float("inf") if overflows else 1.0)).backward()
        scaler.unscale_(optimizer)
        norms.append(torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5))
        if scales or not overflows:
            scaler.step(optimizer)
        scaler.update()
    return norms, healthy.sha256_of_weights(net)


def with_and_without(ctx: RankContext) -> list[tuple[list[torch.Tensor], str]]:
    """Train both ways."""
    return [scaled_and_clipped(ctx, scales=scales) for scales in (True, False)]


def test_mixed_precision_and_clipping(tmp_path: Path) -> None:
    """Norms and weights are those without a scaler, and all ranks skip the step that overflows."""
    (one, without), (other, _) = train_on(2, config_for(tmp_path), with_and_without)
    assert one[1] == other[1] == without[1]
    for step, (norm, right) in enumerate(zip(one[0], without[0], strict=True), start=1):
        assert not torch.isfinite(norm) if step == 3 else torch.equal(norm, right)
