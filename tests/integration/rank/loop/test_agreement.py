"""Shows on real gloo ranks that an agreement is one point for all, never passed, and comes
where all asked for it."""

import os
import random
import subprocess
import sys
import time

import pytest
import torch.distributed as dist

from prefect_torch_ddp.rank.failure import is_collateral
from prefect_torch_ddp.rank.loop import agreement as module
from prefect_torch_ddp.rank.loop.agreement import Agreement, Outcome, Want, end_of, outside_after
from tests.support.ranks import run_ranks

NOTHING, STOP, STOP_EARLY, SAVE = Want.NOTHING, Want.STOP, Want.STOP_EARLY, Want.SAVE


def who() -> tuple[int, int]:
    """Return this process's rank and the world size."""
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def wander(seed: int, ahead_s: float, poll_s: float) -> list[Outcome]:
    """Take loops of steps at a pace of this rank's own, without any collective, and ask now and
    then; return what was agreed."""
    module.POLL_S = poll_s
    rank, world_size = who()
    alike, own = random.Random(seed), random.Random(f"{seed}-{rank}")
    agreement = Agreement(rank, world_size, outside_after(0), ahead_s=ahead_s)
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
            # A round that the rank left behind with its loop may be found late; all others are
            # found at their point.
            assert found is None or found.point == end_of(step), found
            agreed += [] if found is None else [found]
        agreement.leave(outside_after(step))
        time.sleep(own.choice([0.0, 0.02]))
    agreement.close()
    return agreed


def want_now(own: random.Random) -> Want:
    """Want something in one step of ten."""
    return own.choice([STOP, STOP_EARLY, SAVE]) if own.random() < 0.1 else NOTHING


@pytest.mark.parametrize(("world_size", "ahead_s"), [(2, 0.0), (3, 0.01), (4, 0.0)])
def test_ranks_out_of_step_agree_on_the_same_points(world_size: int, ahead_s: float) -> None:
    """Ranks whose paces differ eightfold, loops that are left half-way, random wishes: one
    sequence of agreements for all."""
    num_agreed = 0
    for seed in range(6):  # a loaded machine agrees less often in each
        first, *others = run_ranks(wander, world_size, seed, ahead_s, 0.002)
        for other in others:
            # A rank that has closed takes no part in what the others still agree on.
            assert other[: len(first)] == first[: len(other)]
        num_agreed += len(first)
        assert [outcome.point for outcome in first] == sorted(outcome.point for outcome in first)
        assert all(outcome.want for outcome in first)
    assert num_agreed > 10


def leave_alone(asked: int) -> list[Outcome]:
    """Leave on rank 1 after step 3, for good; ask on rank 0 in a later step."""
    rank, world_size = who()
    agreement = Agreement(rank, world_size, outside_after(0))
    agreement.begin(outside_after(0), end_of(1), end_of(20), NOTHING)
    found = []
    for step in range(1, 21):
        if rank == 1 and step == 3:
            break
        found.append(
            agreement.reach(
                end_of(step), end_of(step + 1), STOP if (rank, step) == (0, asked) else NOTHING
            )
        )
        if found[-1]:
            break
    agreement.leave(outside_after(step))
    agreement.close()
    return [outcome for outcome in found if outcome]


def test_a_rank_that_has_left_keeps_nobody_waiting() -> None:
    """Uneven step counts: those who go on agree among themselves."""
    stopped, left = run_ranks(leave_alone, 2, 9)
    assert left == []
    assert stopped == [Outcome(end_of(9), STOP)]


SERVE = """
import time, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""


def ask_when_the_store_is_gone() -> bool:
    """Kill the process that serves the store, then ask; tell whether the error counts as
    another rank's failure."""
    server = subprocess.Popen([sys.executable, "-c", SERVE], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    store = dist.TCPStore(
        "127.0.0.1", int(server.stdout.readline()), is_master=False, wait_for_workers=False
    )
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    agreement = Agreement(0, 2, outside_after(0))
    server.kill()
    server.wait()
    try:
        agreement.begin(outside_after(0), end_of(1), end_of(9), STOP)
    except RuntimeError as error:
        return is_collateral(error)
    return False


def test_the_loss_of_the_store_is_no_hang_and_no_cause() -> None:
    """Rank 0 died: the ranks that wait for an agreement fail, and aren't blamed."""
    assert run_ranks(ask_when_the_store_is_gone, 1) == [True]
