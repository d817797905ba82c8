"""On real gloo ranks an agreement is the same point for all, and no rank passes it."""

import random
import time

import pytest
import torch.distributed as dist

from prefect_torch_ddp.rank.training import agreement as module
from prefect_torch_ddp.rank.training.agreement import (
    Agreement,
    Outcome,
    Want,
    end_of,
    outside_after,
)
from tests.support.ranks import run_ranks


def wander(ahead_s: float) -> list[list[Outcome]]:
    """Return what was agreed by each of several seeds, whose agreements begin together."""
    module.POLL_S = 0.002
    found = []
    for seed in range(6):  # a loaded machine agrees less often in each
        dist.barrier()
        found.append(wander_by(seed, ahead_s))
    return found


def wander_by(seed: int, ahead_s: float) -> list[Outcome]:
    """Take loops of steps at a pace of this rank's own, without any collective, and ask now and
    then; return what was agreed."""
    rank = dist.get_rank()
    alike, own = random.Random(seed), random.Random(f"{seed}-{rank}")
    agreement = Agreement(rank, dist.get_world_size(), outside_after(0), ahead_s=ahead_s)
    agreed: list[Outcome] = []
    step = 0
    for _ in range(alike.randint(2, 5)):
        last = step + alike.randint(1, 40)
        leave_at = alike.choice([None, None, alike.randint(step + 1, last)])
        pause_s = own.choice([0.0, 0.0005, 0.004])
        began = agreement.begin(outside_after(step), end_of(step + 1), end_of(last), want_now(own))
        agreed += [] if began is None else [began]
        while step < last:
            step += 1
            time.sleep(pause_s)
            if step == leave_at:
                break
            then = end_of(step + 1) if step < last else outside_after(step)
            found = agreement.reach(end_of(step), then, want_now(own))
            # A round that the rank abandoned with its loop may be found late; all others are
            # found at their point.
            assert found is None or found.point == end_of(step), found
            agreed += [] if found is None else [found]
        agreement.leave(outside_after(step))
        time.sleep(own.choice([0.0, 0.02]))
    agreement.close()
    return agreed


def want_now(own: random.Random) -> Want:
    """Want something in one step of ten."""
    wants = [Want.STOP, Want.STOP_EARLY, Want.SAVE]
    return own.choice(wants) if own.random() < 0.1 else Want.NOTHING


@pytest.mark.parametrize(("world_size", "ahead_s"), [(2, 0.0), (3, 0.01), (4, 0.0)])
def test_ranks_out_of_step_agree_on_the_same_points(world_size: int, ahead_s: float) -> None:
    """Ranks with very different paces, broken-off loops and random requests agree."""
    first, *others = run_ranks(wander, world_size, ahead_s)
    for agreed, *of_others in zip(first, *others, strict=True):
        for other in of_others:
            # A rank that has closed takes no part in what the others still agree on.
            assert other[: len(agreed)] == agreed[: len(other)]
        points = [outcome.point for outcome in agreed]
        assert points == sorted(points)
        assert all(outcome.want for outcome in agreed)
    assert sum(map(len, first)) > 10


def end_first() -> Outcome | None:
    """Return rank 0's answer if it wants a save at the end of a step that rank 1 has passed."""
    module.POLL_S = 60.0  # so that rank 1 can't answer before it closes
    agreement = Agreement(dist.get_rank(), 2, outside_after(0), ahead_s=0.4)
    agreement.begin(outside_after(0), end_of(1), end_of(1), Want.NOTHING)
    found = None
    if dist.get_rank() == 1:
        agreement.reach(end_of(1), outside_after(1), Want.NOTHING)
        agreement.leave(outside_after(1))
        agreement.close()
    dist.barrier()
    if dist.get_rank() == 0:
        found = agreement.reach(end_of(1), outside_after(1), Want.SAVE)
        agreement.leave(outside_after(1))
        agreement.close()
    dist.barrier()  # rank 0 serves the store
    return found


def test_nothing_is_agreed_on_where_a_rank_that_is_gone_has_passed() -> None:
    """A training that ended on rank 1 can't save at its last step any more."""
    assert run_ranks(end_first, 2) == [None, None]
