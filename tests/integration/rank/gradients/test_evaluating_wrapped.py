"""Evaluating through a wrapped model: no rank waits for another one, and all have one model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from prefect_torch_ddp.rank.context import RankContext
from prefect_torch_ddp.rank.evaluation.classification import ClassificationMeter
from prefect_torch_ddp.results import Report
from tests.support.ranks import config_for, train_on

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


def train_and_evaluate(ctx: RankContext, with_grad: bool) -> dict[str, Any]:
    """Evaluate before the first step and within each, by uneven batches through DDP."""
    torch.manual_seed(1)
    model = ctx.wrap(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = [evaluate(ctx, model, with_grad=with_grad)]
    loader = ctx.loader(TensorDataset(POINTS, LABELS), global_batch_size=7)
    for points, labels in ctx.steps(loader, epochs=1):
        optimizer.zero_grad()
        cross_entropy(model(points), labels).backward()
        optimizer.step()
        found.append(evaluate(ctx, model, with_grad=with_grad))
    state = {name: value.clone() for name, value in model.module.state_dict().items()}
    return {"found": found, "state": state}


def evaluate(ctx: RankContext, model: nn.Module, *, with_grad: bool) -> list[Report]:
    """Return a report of each evaluation."""
    model.eval()
    reports = []
    for batches in EVALUATIONS:
        meter = ClassificationMeter("ab")
        for batch in batches[ctx.rank]:
            with torch.set_grad_enabled(with_grad):
                meter.update(model(POINTS[batch]), LABELS[batch])
        reports.append(meter.report())
    model.train()
    return reports


@pytest.mark.parametrize("with_grad", [False, True], ids=["no_grad", "grad"])
def test_no_rank_waits_for_one_without_a_batch(tmp_path: Path, with_grad: bool) -> None:
    """1 sample on 2 ranks, BatchNorm, through the DDP itself; the running statistics are rank
    0's on every rank, so what is reported is the score of the model that is saved."""
    first, second = train_on(2, config_for(tmp_path), train_and_evaluate, with_grad)
    assert first["found"] == second["found"]
    assert [report.num_samples for report in first["found"][0]] == [1, 1, 5, 6]
    for name, value in first["state"].items():
        assert torch.equal(value, second["state"][name]), name
    assert not torch.equal(first["state"]["1.running_mean"], torch.zeros(8))
    net = Net().eval()
    net.load_state_dict(first["state"])
    for report, batches in zip(first["found"][-1], EVALUATIONS, strict=True):
        own = [i for batches_of_rank in batches for batch in batches_of_rank for i in batch]
        loss = cross_entropy(net(POINTS[own]), LABELS[own]).item()
        assert report.loss == pytest.approx(loss, rel=1e-5)
