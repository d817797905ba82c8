"""Evaluation on real gloo ranks gives the scores of the whole, and no rank waits for another."""

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from prefect_torch_ddp import RankContext
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.rank.evaluation.classification import ClassificationMeter
from prefect_torch_ddp.rank.evaluation.meters import LanguageMeter, RegressionMeter
from prefect_torch_ddp.results import Report
from tests.support.ranks import config_for, run_ranks, train_on

SHARES = [(1, 2, 0, 2), (0, 7, 1, 0), (0, 0, 0, 1), (1, 0, 0, 0), (40, 3, 17, 0), (0, 0, 0, 0)]
"""Samples of each of four ranks; with fewer, the last one has the rest."""


def samples(num: int) -> dict[str, torch.Tensor]:
    """Draw all samples of a case; every rank draws the same."""
    random = torch.Generator().manual_seed(num)
    return {
        # Far from zero, by float32's standards, and each rank's share around another mean.
        "true": 1e5 + torch.randn(num, generator=random).double() + torch.arange(num) / 10,
        "noise": torch.randn(num, generator=random).double(),
        "losses": torch.rand(num, generator=random).double(),
        "classes": (classes := torch.randint(0, 4, (num,), generator=random)),
        "predicted": (classes + (torch.arange(num) % 5 == 4)) % 4,  # each fifth one wrongly
        "images": torch.randint(0, 256, (num, 1, 4, 4), generator=random).byte(),
    }


def measure() -> list[Report | str]:
    """Measure this rank's share of each case with every meter; outside of a gang all of it."""
    rank, world_size = (
        int(os.environ.get(name, i)) for i, name in enumerate(("RANK", "WORLD_SIZE"))
    )
    found: list[Report | str] = []
    for of_four in SHARES:
        share = (*of_four[: world_size - 1], sum(of_four[world_size - 1 :]))
        own = slice(sum(share[:rank]), sum(share[: rank + 1]))
        part = {name: values[own] for name, values in samples(sum(share)).items()}
        regression, language = RegressionMeter(), LanguageMeter()
        classification = ClassificationMeter("abcd")
        # A rank without samples doesn't even update, in half of the cases.
        if share[rank] or rank == 0:
            regression.update(part["true"] + part["noise"], part["true"])
            language.update(part["losses"], part["classes"])
            predicted = part["predicted"], part["classes"], part["losses"], part["images"]
            classification.update(*predicted)
        for meter in (regression, language, classification):
            try:
                found.append(meter.report())
                assert meter.report() == found[-1], "a report doesn't change what it counts"
            except InvalidParamsError as error:
                found.append(str(error))
    return found


@pytest.mark.extended
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_meter_is_exact_however_the_samples_are_shared(world_size: int) -> None:
    """Each rank returns the scores of the whole, or the same error, even if it has no samples."""
    first, *others = run_ranks(measure, world_size)
    assert others == [first] * (world_size - 1)
    for found, right in zip(first, measure(), strict=True):
        if isinstance(right, str):
            assert found == right
            continue
        metrics, loss = right.metrics, right.loss
        assert found.metrics == pytest.approx(metrics, rel=1e-9)
        assert found.loss == (None if loss is None else pytest.approx(loss, rel=1e-12))
        assert found.model_copy(update={"metrics": metrics, "loss": loss}) == right
    assert first[2].accuracy == 0.8  # of 5 samples
    worst = [sample.loss for sample in first[14].worst_samples]
    assert worst == sorted(samples(60)["losses"].tolist(), reverse=True)[:8]


# ---- Through a wrapped model.

POINTS = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(12) % 2
EVALUATIONS = [
    ([[0]], []),
    ([], [[1]]),
    ([[2], [3], [4]], [[5, 6]]),
    ([[0, 1]], [[2], [3], [4], [5]]),
]
"""The batches of each rank, as lists of samples: one sample on two ranks, on either of them; more
batches here than there."""


class Net(nn.Sequential):
    """A small net with running statistics."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def train_and_evaluate(ctx: RankContext) -> dict[str, Any]:
    """Evaluate before the first step and within each, by uneven batches through DDP."""
    torch.manual_seed(1)
    model = ctx.wrap(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = [evaluate(ctx, model)]
    loader = ctx.loader(TensorDataset(POINTS, LABELS), global_batch_size=7)
    for points, labels in ctx.steps(loader, epochs=1):
        optimizer.zero_grad()
        cross_entropy(model(points), labels).backward()
        optimizer.step()
        found.append(evaluate(ctx, model))
    state = {name: value.clone() for name, value in model.module.state_dict().items()}
    return {"found": found, "state": state}


def evaluate(ctx: RankContext, model: nn.Module) -> list[Report]:
    """Return a report of each evaluation, all without gradients and then all with."""
    model.eval()
    reports = []
    for with_grad, batches in itertools.product((False, True), EVALUATIONS):
        meter = ClassificationMeter("ab")
        for batch in batches[ctx.rank]:
            with torch.set_grad_enabled(with_grad):
                meter.update(model(POINTS[batch]), LABELS[batch])
        reports.append(meter.report())
    model.train()
    return reports


def test_no_rank_waits_for_one_without_a_batch(tmp_path: Path) -> None:
    """A rank without a batch holds up nobody, and BatchNorm's statistics are rank 0's
    everywhere."""
    first, second = train_on(2, config_for(tmp_path), train_and_evaluate)
    assert first["found"] == second["found"]
    assert [report.num_samples for report in first["found"][0]] == [1, 1, 5, 6] * 2
    for name, value in first["state"].items():
        assert torch.equal(value, second["state"][name]), name
    assert not torch.equal(first["state"]["1.running_mean"], torch.zeros(8))
    net = Net().eval()
    net.load_state_dict(first["state"])
    for report, batches in zip(first["found"][-1], EVALUATIONS * 2, strict=True):
        own = [i for batches_of_rank in batches for batch in batches_of_rank for i in batch]
        loss = cross_entropy(net(POINTS[own]), LABELS[own]).item()
        assert report.loss == pytest.approx(loss, rel=1e-5)
