"""Real ranks in their own loops are killed and resumed with the same records, values and bits."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from prefect_torch_ddp import RankContext
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.storage.directory import DirectoryStorage
from tests.support.ranks import Died, config_for, train_on
from tests.support.records import read_records
from tests.workloads.healthy import die_after_checkpoint, sha256_of_weights

pytestmark = pytest.mark.timeout(120)

NUM_STEPS = 7


def train(ctx: RankContext) -> dict[str, Any]:
    """Train on draws in an own loop, with a checkpoint each other step. Options: die_at
    (step), die_after (number of the checkpoint that is to be on record first)."""
    bare = torch.nn.Linear(4, 1).double()
    model = ctx.wrap(bare)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ctx.track(model=model, optimizer=optimizer)
    state = ctx.state(done=0)
    for step in range(state.done + 1, NUM_STEPS + 1):
        ctx.progress(step, NUM_STEPS)
        loss = model(torch.randn(3, 4, dtype=torch.float64)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ctx.report(loss=loss)
        state.done = step
        if step == ctx.options.get("die_at") and ctx.rank == 1:
            die_after_checkpoint(ctx, ctx.options.get("die_after"))
        if step == ctx.options.get("ended_at") and ctx.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        due = ctx.due(step)
        ctx.checkpoint(force=due.save or step % 2 == 0)
        if due.stop:
            break
    return {"sha256": sha256_of_weights(bare), "done": state.done}


def records(folder: Path) -> list[Any]:
    """Return what is on record."""
    return list(read_records(DirectoryStorage(folder), "run"))


def losses(folder: Path) -> list[tuple[int, int, float]]:
    """Return the losses that are on record."""
    return [(each.step, each.rank, each.metrics["loss"]) for each in records(folder)]


def test_a_killed_loop_of_its_own_ends_with_the_same_weights_and_records(tmp_path: Path) -> None:
    """After a kill every bit is the undisturbed run's, and each step is recorded once."""
    whole = train_on(2, config_for(tmp_path / "whole", None), train)
    death = {"die_at": 5, "die_after": 1}
    assert Died(-9) in train_on(2, config_for(tmp_path / "killed", None, options=death), train)
    found = train_on(2, config_for(tmp_path / "killed", None), train)
    assert found == whole
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    assert [each[:2] for each in losses(tmp_path / "killed")] == [
        (step, rank) for step in range(1, NUM_STEPS + 1) for rank in range(2)
    ]


def test_a_loop_that_gets_sigterm_saves_the_step_that_all_ranks_stop_after(tmp_path: Path) -> None:
    """No step is made again, and every bit is the undisturbed run's."""
    whole = train_on(2, config_for(tmp_path / "whole", None), train)
    ended = train_on(2, config_for(tmp_path / "ended", None, options={"ended_at": 3}), train)
    done = ended[0]["done"]
    assert [each["done"] for each in ended] == [done, done]
    assert done in {3, 4, 5}
    assert train_on(2, config_for(tmp_path / "ended", None), train) == whole
    attempts = {each.step: each.attempt for each in records(tmp_path / "ended")}
    assert attempts == {step: 1 if step <= done else 2 for step in range(1, NUM_STEPS + 1)}


def differ(ctx: RankContext) -> str:
    """Keep a value that differs by rank; return the error."""
    ctx.track(model=torch.nn.Linear(1, 1))
    state = ctx.state(seen=[])
    try:
        for step in ctx.steps(total=1):
            state.seen = [step, ctx.rank]
        ctx.close()
    except InvalidParamsError as error:
        return str(error)
    return ""


def test_a_value_that_differs_by_rank_is_refused_at_the_first_checkpoint(tmp_path: Path) -> None:
    """A resume would give every rank the value of rank 0."""
    said = train_on(2, config_for(tmp_path, None), differ)[0]
    assert "'state'" in said
    assert "seen" in said
