"""A second loader that several steps share: its position is in no checkpoint."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from prefect_torch_ddp import RankContext

CONTINUES = "continues an iteration over a loader from ctx.loader that began before this step"


def loader(ctx: RankContext) -> Any:
    """Give three batches of two."""
    return ctx.loader(TensorDataset(torch.arange(6)), global_batch_size=2)


def one_in_each_step(ctx: RankContext) -> None:
    """Take a batch of another loader in each step."""
    others = iter(loader(ctx))
    for _ in ctx.steps(loader(ctx), epochs=1):
        next(others)


def zipped(ctx: RankContext) -> None:
    """Go over two loaders at once."""
    for _ in zip(loader(ctx), ctx.steps(loader(ctx), epochs=1), strict=False):
        pass


def whole_within_a_step(ctx: RankContext) -> None:
    """Validate at the end of an epoch, within its last step."""
    for _ in ctx.steps(loader(ctx), epochs=2):
        if ctx.epoch_ended:
            assert len(list(loader(ctx))) == 3


def whole_between_calls(ctx: RankContext) -> None:
    """Validate between calls, and look at a first batch in each step."""
    validation = loader(ctx)
    for _ in range(2):
        for _ in ctx.steps(loader(ctx), epochs=1):
            next(iter(validation))  # the first batch in each step
        assert len(list(validation)) == 3


def passed_on(ctx: RankContext) -> None:
    """Train on a loader of ours as on any iterable."""
    numbers: Iterator[Any] = (batch for batch in loader(ctx))
    for _ in ctx.steps(numbers, total=3):
        pass


@pytest.mark.parametrize(
    ("train", "num_warnings"),
    [
        (one_in_each_step, 1),
        (zipped, 1),
        (whole_within_a_step, 0),
        (whole_between_calls, 0),
        (passed_on, 0),
    ],
)
def test_only_an_iteration_over_several_steps_is_warned_of(
    train: Callable[[RankContext], None], num_warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Once for each loader; a validation, at an epoch's end or between calls, isn't one."""
    with caplog.at_level(logging.WARNING), RankContext.local() as ctx:
        train(ctx)
    assert sum(CONTINUES in line for line in caplog.messages) == num_warnings
