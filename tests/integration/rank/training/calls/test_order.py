"""The user's own order on real ranks gives the same bits on any number, and is compared."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from prefect_torch_ddp import InvalidParamsError, RankContext, read_ledger
from tests.support.ranks import Died, config_for, train_on
from tests.workloads.counted import train_in_own_order

pytestmark = pytest.mark.timeout(120)


def train(world_size: int, folder: Path, *, elastic: bool = False, **options: Any) -> list[Any]:
    """Run an attempt of the training there; return what its ranks do."""
    config = config_for(folder, options=options, ledger=True)
    if elastic:
        config = replace(config, determinism="elastic", virtual_ranks=4)
    return train_on(world_size, config, train_in_own_order)


def test_a_killed_training_in_its_own_order_ends_with_the_same_weights(tmp_path: Path) -> None:
    """After a kill in the second epoch the ledger has each position of each epoch once."""
    (whole,) = train(1, tmp_path / "whole", elastic=True)
    death = {"die_at": 13, "die_on": 1, "die_after": 12}
    assert Died(-9) in train(2, tmp_path, elastic=True, **death)
    (found,) = train(1, tmp_path, elastic=True)
    assert found == whole
    says = "48 draws, each once; of 40 different samples"
    report = read_ledger(tmp_path, "run")
    assert str(report).splitlines() == [f"epoch {n}: {says}" for n in (1, 2, 3)]
    assert report.attempts == {1: 2, 2: 1}


def begin_differently(ctx: RankContext) -> tuple[str, int]:
    """Have another order in the second epoch on one rank; return the error and the steps."""
    dataset = TensorDataset(torch.arange(8))

    def order(epoch: int) -> list[int]:
        return list(range(8))[:: -1 if epoch and ctx.rank else 1]

    try:
        for _ in ctx.steps(ctx.loader(dataset, global_batch_size=4, order=order), epochs=2):
            pass
    except InvalidParamsError as error:
        return str(error), ctx.step
    return "", ctx.step


def test_ranks_with_different_orders_are_refused_at_the_epochs_begin(tmp_path: Path) -> None:
    """At least one rank raises before it has loaded a sample of that epoch."""
    answers = train_on(2, config_for(tmp_path, None), begin_differently)
    said = [(text, step) for text, step in answers if text]
    assert said
    for text, step in said:
        assert step == 2
        assert "ranks have different orders in epoch 2: rank" in text
        assert "with the digest" in text
