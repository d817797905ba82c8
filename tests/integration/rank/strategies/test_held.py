"""With DDP too, a training is warned of gradients that its checkpoints lack, and of no others."""

import logging
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from prefect_torch_ddp import RankContext
from prefect_torch_ddp.rank.strategies import held
from tests.support.ranks import config_for, train_on

pytestmark = pytest.mark.timeout(120)


class Counter(logging.Handler):
    """Counts warnings."""

    num = 0

    def emit(self, _record: logging.LogRecord) -> None:
        """Count one."""
        self.num += 1


def trained(ctx: RankContext, *, every: int, syncs: bool, sets_to_none: bool, **ddp: Any) -> int:
    """Step after so many backward passes, each in a step of its own; return the warnings' number.

    The last of them is summed in any case.
    """
    counter = Counter(logging.WARNING)
    held.logger.addHandler(counter)
    model: Any = ctx.wrap(nn.Linear(4, 1), **ddp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ctx.track(model=model, optimizer=optimizer)
    for step in ctx.steps(total=6):
        if step % every == 1 % every:
            optimizer.zero_grad(set_to_none=sets_to_none)
        with nullcontext() if syncs or step % every == 0 else model.no_sync():
            model(torch.ones(2, 4)).mean().backward()
        if step % every == 0:
            optimizer.step()
    return counter.num


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"syncs": True, "sets_to_none": True, "gradient_as_bucket_view": True},
        {"syncs": True, "sets_to_none": False, "gradient_as_bucket_view": True},
        {"syncs": False, "sets_to_none": True},
    ],
)
def test_only_accumulation_over_steps_is_warned_of(
    tmp_path: Path, every: int, options: dict[str, Any]
) -> None:
    """Once on each rank, whether each pass is summed or only the last one."""
    fn = partial(trained, every=every, **options)
    assert train_on(2, config_for(tmp_path, 1), fn) == [int(every > 1)] * 2
