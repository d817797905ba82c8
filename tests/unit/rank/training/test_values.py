"""Plain values of user code, saved and restored with the checkpoints."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from prefect_torch_ddp import CheckpointError, CheckpointParams, InvalidParamsError, RankContext
from prefect_torch_ddp.rank.training.values import Values
from tests.support.tracked import steps_over

EVERY_STEP = CheckpointParams(every_steps=1, every_s=None)


def search(folder: Path, dies_at: int | None = None) -> dict[str, Any]:
    """Keep the least of nine draws, when it came, and those that were it before; return that."""
    with RankContext.local(storage=folder, checkpoint=EVERY_STEP) as ctx:
        ctx.track(model=nn.Linear(1, 1))
        state = ctx.state(best=1.0, at=None, trail=[], how={"kind": "draw"})
        for step in ctx.steps(total=9):
            if step == dies_at:
                raise InterruptedError
            drawn = torch.rand(()).item()
            if drawn < state.best:
                state.best, state.at = drawn, step
                state.trail.append(drawn)
                state.how["of"] = np.int64(step)
        return {**vars(state), "made": ctx.step}


@pytest.mark.parametrize("dies_at", [1, 4, 9])
def test_values_are_what_they_were_at_the_checkpoint(tmp_path: Path, dies_at: int) -> None:
    """Numbers, None, lists that are changed in place, dicts, and numbers of NumPy's."""
    whole = search(tmp_path / "whole")
    assert len(whole["trail"]) > 1
    with pytest.raises(InterruptedError):
        search(tmp_path, dies_at)
    assert search(tmp_path) == whole
    assert search(tmp_path) == whole


def early_stopping(folder: Path, dies_at: int | None = None) -> tuple[float, int, int]:
    """Stop after three epochs without a better loss, in a loop of calls; return what is known."""
    losses = [5.0, 3.0, 4.0, 2.0, 2.5, 2.6, 2.7, 1.0]
    with RankContext.local(storage=folder, checkpoint=EVERY_STEP) as ctx:
        ctx.track(model=nn.Linear(1, 1))
        state = ctx.state(best=9.0, waited=0)
        for number, loss in enumerate(losses, start=1):
            for _ in steps_over(ctx, 2):
                if ctx.step == dies_at:
                    raise InterruptedError
            if number < ctx.epoch:
                continue  # what it was is in the state
            state.waited = 0 if loss < state.best else state.waited + 1
            state.best = min(loss, state.best)
            ctx.checkpoint(force=True)
            if state.waited == 3:
                break
        return state.best, state.waited, ctx.step


@pytest.mark.parametrize("dies_at", [3, 8, 13])
def test_values_changed_between_calls_count_once(tmp_path: Path, dies_at: int) -> None:
    """Code that runs again on resume changes nothing twice."""
    with pytest.raises(InterruptedError):
        early_stopping(tmp_path, dies_at)
    assert early_stopping(tmp_path) == (2.0, 3, 14)
    assert early_stopping(tmp_path) == (2.0, 3, 14)


def test_a_second_state_has_a_name_of_its_own(tmp_path: Path) -> None:
    """A library may keep a second state next to the user's."""
    for expected in (0, 1):
        with RankContext.local(storage=tmp_path) as ctx:
            ours, theirs = ctx.state(it=0), ctx.state("sampler", it=10)
            assert (ours.it, theirs.it) == (expected, 10 + expected)
            ours.it, theirs.it = 1, 11
    with RankContext.local() as ctx, pytest.raises(InvalidParamsError, match="'state' is tracked"):
        ctx.state(it=0), ctx.state(it=0)


def test_a_tensor_returns_on_its_device() -> None:
    """A checkpoint has it on the CPU, where a program that adds GPU tensors to it would fail."""
    values = Values({"total": torch.zeros((), device="meta"), "kind": None, "it": 0})
    values.load_state_dict({"total": torch.ones(()), "kind": torch.ones(()), "it": 3})
    assert (values.total.device.type, values.kind.device.type, values.it) == ("meta", "cpu", 3)


def test_a_value_of_another_name_is_refused(tmp_path: Path) -> None:
    """A typing error must not be a value that no checkpoint has; nor may one be lost."""
    with RankContext.local(storage=tmp_path) as ctx:
        state = ctx.state(best=0.0, it=0)
        with pytest.raises(AttributeError, match="has no value 'bset', but best, it"):
            state.bset = 1.0
        with pytest.raises(AttributeError, match="'best' can't be deleted"):
            del state.best
        assert repr(state) == "Values(best=0.0, it=0)"
    with RankContext.local(storage=tmp_path) as ctx:
        says = "'state': it has the values best, it, but now there are best"
        with pytest.raises(CheckpointError, match=says):
            ctx.state(best=0.0)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({}, r"given no value: give its values by names of your own, ctx\.state\(best=0"),
        ({"state_dict": 1}, "'state_dict' can't name a value"),
        ({"_it": 1}, "'_it' can't name a value"),
        ({"where": Path()}, r"state_dict\(\)\['where'\] is a pathlib"),
    ],
)
def test_what_cannot_be_a_value_is_refused_by_name(values: dict[str, Any], says: str) -> None:
    """At the call."""
    with RankContext.local() as ctx, pytest.raises(InvalidParamsError, match=says):
        ctx.state(**values)


def test_a_value_that_is_trained_is_refused(tmp_path: Path) -> None:
    """Its optimizer would go on with another tensor after a resume."""
    with (
        RankContext.local(storage=tmp_path) as ctx,
        pytest.raises(InvalidParamsError, match="'scale' is a tensor that requires grad"),
    ):
        ctx.state(scale=torch.zeros(1, requires_grad=True), it=0)
