"""Gradient accumulation on real ranks: left half-way, in mixed precision, killed in its midst."""

from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.utils.data import TensorDataset

from prefect_torch_ddp import RankContext
from tests.support.ranks import Died, config_for, train_on
from tests.workloads import healthy


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
