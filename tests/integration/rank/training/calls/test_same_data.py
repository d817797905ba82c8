"""Ranks with different datasets or arguments are refused when a loop begins, equal ones aren't."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Subset, TensorDataset

from prefect_torch_ddp import InvalidParamsError, RankContext
from tests.support.ranks import config_for, train_on

WHOLE = TensorDataset(torch.arange(64.0))
CASES: dict[str, tuple[Callable[[RankContext], tuple[Any, int]], str | None]] = {
    "cut by rank": (
        lambda ctx: (
            ctx.loader(Subset(WHOLE, range(ctx.rank, 64, 3)), global_batch_size=9, drop_last=True),
            1,
        ),
        "ranks were given different datasets: ",
    ),
    "cut by rank evenly": (
        lambda ctx: (ctx.loader(Subset(WHOLE, range(ctx.rank, 63, 3)), global_batch_size=9), 1),
        "ranks were given different datasets: dataset.",
    ),
    "another size of batches": (
        lambda ctx: (ctx.loader(WHOLE, global_batch_size=9 + ctx.rank), 1),
        "ranks began ctx.steps differently: rank R has global_batch_size=",
    ),
    "another number of epochs": (
        lambda ctx: (ctx.loader(WHOLE, global_batch_size=9), 1 + ctx.rank),
        "ranks began ctx.steps differently: rank R has epochs=",
    ),
    "another order": (
        lambda ctx: (ctx.loader(WHOLE, global_batch_size=9, shuffle=ctx.rank > 0), 1),
        "ranks began ctx.steps differently: rank R has order=64 samples in ",
    ),
    "the whole": (lambda ctx: (ctx.loader(WHOLE, global_batch_size=9), 2), None),
    "the whole again": (lambda ctx: (ctx.loader(WHOLE, global_batch_size=9), 1), None),
}


def begin_each(ctx: RankContext) -> dict[str, tuple[str, int]]:
    """Go through a loop of each case; return its error and the steps made."""
    found = {}
    for case, (make, _) in CASES.items():
        loader, epochs = make(ctx)
        error, before = "", ctx.step
        try:
            for _ in ctx.steps(loader, epochs=epochs):
                pass
        except InvalidParamsError as raised:
            error = str(raised)
        found[case] = error, ctx.step - before
    return found


def test_different_datasets_are_refused_before_a_sample_is_loaded(tmp_path: Path) -> None:
    """One of two ranks that differ raises when the loop begins, and equal ranks train."""
    answers = train_on(3, config_for(tmp_path, None), begin_each)
    for case, (_, text) in CASES.items():
        errors = [found[case][0] for found in answers]
        raised = [error for error in errors if error]
        assert bool(raised) == (text is not None), (case, errors)
        for error, num_steps in (found[case] for found in answers):
            assert not error or num_steps == 0
        for error in raised:
            assert re.sub(r"rank \d", "rank R", error).startswith(text), error
