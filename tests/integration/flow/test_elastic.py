"""Elastic determinism through the flow and through a task: the parameters reach the ranks."""

from pathlib import Path

import pytest

from prefect_torch_ddp import InvalidParamsError, RankContext, TrainParams, ddp_task, train_flow

pytestmark = pytest.mark.timeout(240)


@pytest.mark.usefixtures("prefect_api")
def test_two_ranks_of_the_flow_end_with_the_bits_of_one(tmp_path: Path) -> None:
    """SHA-256 of the weights, by two flow runs with four virtual ranks."""
    common = {
        "workload": "tests.workloads.elastic",
        "determinism": "elastic",
        "virtual_ranks": 4,
        "storage": str(tmp_path),
    }
    one, two = (train_flow(TrainParams(**common, world_size=world_size)) for world_size in (1, 2))
    assert (one.training.world_size, two.training.world_size) == (1, 2)
    assert two.training.value == one.training.value
    assert one.training.num_steps == 8


def test_a_task_refuses_ranks_that_do_not_divide() -> None:
    """Where it is decorated, before any flow begins."""

    def fit(ctx: RankContext) -> int:
        return ctx.rank

    with pytest.raises(InvalidParamsError, match="virtual_ranks is 4 and world_size 3"):
        ddp_task(world_size=3, determinism="elastic", virtual_ranks=4)(fit)
    with pytest.raises(
        InvalidParamsError, match="virtual_ranks is 4, which needs determinism='elastic'"
    ):
        ddp_task(world_size=2, virtual_ranks=4)(fit)
