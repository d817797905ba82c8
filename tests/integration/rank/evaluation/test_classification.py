"""Exact evaluation over real gloo ranks: no padding, no rank waits, the same number on each."""

import os

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from prefect_torch_ddp.data.loader import RankLoader
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.rank.evaluation.classification import ClassificationMeter
from prefect_torch_ddp.results import Report
from tests.support.ranks import run_ranks

NAMES = ("a", "b", "c")
LOGITS = torch.tensor([[3.0, 1, 0], [0, 3, 1], [0, 1, 3], [3, 0, 1], [0, 4, 0]])
TARGETS = torch.tensor([0, 1, 2, 0, 2])  # the last one is predicted wrongly: 0.8


def evaluate(nums_samples: tuple[int, ...]) -> list[Report | str]:
    """Evaluate so many samples, one number after the other; return reports, or errors."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    found: list[Report | str] = []
    for num_samples in nums_samples:
        meter = ClassificationMeter(NAMES)
        if num_samples:
            dataset = TensorDataset(LOGITS[:num_samples], TARGETS[:num_samples])
            for logits, targets in RankLoader(
                dataset, global_batch_size=2, rank=rank, world_size=world_size, shuffle=False
            ):
                meter.update(logits, targets)
        try:
            found.append(meter.report())
            assert meter.report() == found[-1], "a report doesn't change what it counts"
        except InvalidParamsError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_exact_counts_on_any_number_of_ranks(world_size: int) -> None:
    """5 samples are 0.8 exactly; 1 sample leaves ranks without any; none at all is an error on
    every rank, never 0/0."""
    first, *others = run_ranks(evaluate, world_size, (5, 1, 0))
    assert others == [first] * (world_size - 1)
    *reports, error = first
    for report, num_samples, accuracy in zip(reports, (5, 1), (0.8, 1.0), strict=True):
        loss = cross_entropy(LOGITS[:num_samples], TARGETS[:num_samples]).item()
        assert (report.num_samples, report.accuracy) == (num_samples, accuracy)
        assert report.loss == pytest.approx(loss, abs=1e-7)
        assert sum(map(sum, report.confusion_matrix)) == num_samples
    assert "nothing was evaluated: there were 0 samples" in error
