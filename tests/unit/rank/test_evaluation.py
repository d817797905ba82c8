"""Exact evaluation over real gloo ranks: no padding, no rank waits, the same number
everywhere."""

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from prefect_torch_ddp.data.loader import RankLoader
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.rank.evaluation import ClassificationMeter
from prefect_torch_ddp.results import Report

NAMES = ("a", "b", "c")
LOGITS = torch.tensor([[3.0, 1, 0], [0, 3, 1], [0, 1, 3], [3, 0, 1], [0, 4, 0]])
TARGETS = torch.tensor([0, 1, 2, 0, 2])  # the last one is told wrongly: 0.8


def _evaluate(rank: int, world_size: int, num_samples: int, folder: str) -> None:
    folder_path = Path(folder)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=30),
    )
    meter = ClassificationMeter(NAMES)
    if num_samples:
        dataset = TensorDataset(LOGITS[:num_samples], TARGETS[:num_samples])
        for logits, targets in RankLoader(
            dataset, global_batch_size=2, rank=rank, world_size=world_size, shuffle=False
        ):
            meter.update(logits, targets)
    try:
        reports = [meter.report().model_dump_json() for _ in range(2)]
        assert reports[0] == reports[1], "a report doesn't change what it counts"
        (folder_path / f"rank-{rank}").write_text(reports[0])
    except InvalidParamsError as error:
        (folder_path / f"rank-{rank}").write_text(str(error))
    dist.destroy_process_group()


def _reports(world_size: int, num_samples: int, folder: Path) -> list[str]:
    context = mp.spawn(
        _evaluate, args=(world_size, num_samples, str(folder)), nprocs=world_size, join=False
    )
    while not context.join(timeout=60):
        pass
    return [(folder / f"rank-{rank}").read_text() for rank in range(world_size)]


@pytest.mark.parametrize(
    ("world_size", "num_samples", "accuracy"), [(2, 5, 0.8), (3, 5, 0.8), (4, 5, 0.8), (2, 1, 1.0)]
)
def test_exact_counts_on_any_number_of_ranks(
    world_size: int, num_samples: int, accuracy: float, tmp_path: Path
) -> None:
    """D1: 5 samples on 2, 3 and 4 ranks are 0.8 exactly; 1 sample on 2 ranks leaves a rank
    without any."""
    reports = [
        Report.model_validate_json(text) for text in _reports(world_size, num_samples, tmp_path)
    ]
    assert reports.count(reports[0]) == world_size
    assert reports[0].num_samples == num_samples
    assert reports[0].accuracy == accuracy
    assert reports[0].loss == pytest.approx(
        cross_entropy(LOGITS[:num_samples], TARGETS[:num_samples]).item(), abs=1e-7
    )
    assert sum(map(sum, reports[0].confusion_matrix)) == num_samples


def test_no_sample_on_any_rank_is_an_error_on_every_rank(tmp_path: Path) -> None:
    """Never 0/0, and never a rank that waits for one that raised."""
    assert all(
        "nothing was evaluated: there were 0 samples" in text for text in _reports(2, 0, tmp_path)
    )


def test_single_process_counts_without_a_process_group() -> None:
    """A unit test or a debugger needs no torch.distributed."""
    meter = ClassificationMeter(NAMES)
    meter.update(LOGITS[:3], TARGETS[:3])
    meter.update(LOGITS[3:], TARGETS[3:])
    meter.update(LOGITS[:0], TARGETS[:0])
    report = meter.report()
    assert report.confusion_matrix == ((2, 0, 0), (0, 1, 0), (0, 1, 1))
    assert report.loss == pytest.approx(cross_entropy(LOGITS, TARGETS).item(), abs=1e-7)


def test_a_given_loss_and_plain_predictions() -> None:
    """A loss per sample is averaged as given; predictions without one leave the loss out."""
    meter = ClassificationMeter(NAMES)
    meter.update(LOGITS.bfloat16(), TARGETS, loss=torch.tensor([1.0, 2, 3, 4, 5]))
    assert meter.report().loss == 3.0
    meter.update(torch.tensor([1]), torch.tensor([1]))
    report = meter.report()
    assert (report.loss, report.accuracy, report.num_samples) == (None, 5 / 6, 6)


@pytest.mark.parametrize(
    ("logits", "targets", "loss", "words"),
    [
        (torch.zeros(2, 4), torch.zeros(2).long(), None, r"logits has shape \[2, 4\]"),
        (
            torch.zeros(2),
            torch.zeros(2).long(),
            None,
            r"logits has shape \[2\] and dtype torch.float32",
        ),
        (torch.zeros(2, 3), torch.zeros(3).long(), None, r"targets has shape \[3\]"),
        (torch.zeros(2, 3), torch.zeros(2).long(), torch.zeros(()), r"loss has shape \[\]"),
        (torch.zeros(2, 3), torch.zeros(2), None, "targets has dtype torch.float32"),
        (torch.zeros(2, 3), torch.tensor([0, 3]), None, "targets has a class outside 0 to 2"),
        (
            torch.tensor([0, -1]),
            torch.tensor([0, 1]),
            None,
            "predictions has a class outside 0 to 2",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    logits: torch.Tensor, targets: torch.Tensor, loss: torch.Tensor | None, words: str
) -> None:
    """A wrong shape or class is named; it never becomes a wrong number."""
    with pytest.raises(InvalidParamsError, match=words):
        ClassificationMeter(NAMES).update(logits, targets, loss)


def test_a_meter_without_classes_is_refused() -> None:
    """There would be nothing to count."""
    with pytest.raises(InvalidParamsError, match="class_names is empty"):
        ClassificationMeter([])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_counts_on_the_device_of_the_logits() -> None:
    """Nothing but the final sums leaves the GPU."""
    meter = ClassificationMeter(NAMES)
    meter.update(LOGITS.cuda(), TARGETS)
    assert meter.report().accuracy == 0.8
