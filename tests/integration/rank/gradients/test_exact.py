"""Gradients are the global batch's, however shared out and accumulated, also over kills."""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from prefect_torch_ddp import RankContext
from prefect_torch_ddp.data.sampler import GlobalBatches
from prefect_torch_ddp.rank.gradients import share_weights
from tests.support.ranks import Died, config_for, train_on
from tests.workloads import healthy

ELASTIC = {"determinism": "elastic", "virtual_ranks": 6}


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
    num_talks, sum_by_share, found = 0, share_weights._sum_by_share, {}

    def counting(context: Any, bucket: Any) -> Any:
        nonlocal num_talks
        num_talks += 1
        return sum_by_share(context, bucket)

    counting.__annotations__ = sum_by_share.__annotations__
    share_weights._sum_by_share = counting
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
            is_stand_in = ctx._state.share.num_local == 0
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
        (2, (11, 5), {"at once": 1, "in several": 3, "unsynchronised": 2}, {}),
        (3, (10, 8), {"at once": 1}, {}),
        (3, (13, 4), {"at once": 1, "micro-batches": 1}, {}),
        (2, (11, 7), {"micro-batches": 2}, {}),
        (1, (11, 5), {"micro-batches": 2}, {}),
        (1, (11, 5), {"micro-batches": 2}, ELASTIC),
        (2, (13, 6), {"micro-batches": 2}, ELASTIC),
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
    """Shares that don't divide, tails smaller than the world, several backward passes in a step,
    with and without `no_sync`, micro-batches of other numbers on each rank, with one exchange, also
    of virtual ranks: the single-process gradient, the same on each rank; a stand-in's nan stays
    out."""
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


def left_half_way(ctx: RankContext) -> None:
    """Leave the micro-batches of step 2 after the first one."""
    model = ctx.wrap(nn.Linear(4, 3).double())
    for batch in ctx.steps(
        ctx.loader(TensorDataset(*healthy.points(12)), global_batch_size=6), epochs=1
    ):
        for (inputs, targets), weight in ctx.micro_batches(batch, max_samples=1):
            (nn.functional.cross_entropy(model(inputs), targets) * weight).backward()
            if ctx.step == 2:
                break


def test_micro_batches_left_half_way_are_an_error(tmp_path: Path) -> None:
    """Each rank would step by a gradient of its own otherwise."""
    says = r"step 2 left ctx\.micro_batches before the last micro-batch"
    with pytest.raises(AssertionError, match=says):
        train_on(2, config_for(tmp_path), left_half_way)


SCALED = {"precision": "scaled", "overflow_at": 4}


@pytest.mark.parametrize(
    ("world_size", "die_at", "precision", "scale"),
    [(1, 5, {}, 1.0), (2, 3, {}, 1.0), (2, 4, SCALED, 2456.5), (2, 6, SCALED, 2456.5)],
    ids=["alone", "two", "scale grown", "scale fallen"],
)
def test_a_kill_between_two_micro_batches(
    tmp_path: Path, world_size: int, die_at: int, precision: dict[str, Any], scale: float
) -> None:
    """SIGKILL of a rank in the midst of an accumulation, then a resume, with dropout, AdamW and
    clipping, with a tracked GradScaler before and behind an overflow: every bit, and the scale, is
    that of the uninterrupted run."""
    options = {"max_samples": 2, **precision}
    expected = train_on(world_size, config_for(tmp_path, options=options), healthy.fit_elastic)
    assert expected[0]["scale"] == pytest.approx(scale)
    broken, death = tmp_path / "broken", {1: {"step": die_at, "how": "SIGKILL"}}
    killed = config_for(broken, options=options), healthy.fit_elastic, str(tmp_path), death
    assert Died(-9) in train_on(world_size, *killed)
    again = config_for(broken, options=options)
    assert train_on(world_size, again, healthy.fit_elastic) == expected
