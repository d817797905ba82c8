"""A classifier's scores: hand-computed, scikit-learn's, never nan; thumbnails of the worst."""

import base64
import io
import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from pydantic import ValidationError
from sklearn.metrics import precision_recall_fscore_support
from torch.nn.functional import cross_entropy

from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.rank.evaluation.classification import (
    MAX_BYTES,
    MAX_PIXELS,
    ClassificationMeter,
    classification_report,
)
from prefect_torch_ddp.results import MAX_WORST_SAMPLES, WorstSample

NAMES = ("a", "b", "c")
LOGITS = torch.tensor([[3.0, 1, 0], [0, 3, 1], [0, 1, 3], [3, 0, 1], [0, 4, 0]])
TARGETS = torch.tensor([0, 1, 2, 0, 2])  # the last one is told wrongly: 0.8


def test_several_ranks_without_a_process_group_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their report would be of this rank's share only."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    meter = ClassificationMeter(NAMES)
    meter.update(LOGITS, TARGETS)
    with pytest.raises(
        InvalidParamsError, match="over all ranks, and these 4 have no process group"
    ):
        meter.report()


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


ROWS, PAIR = torch.zeros(2, 3), torch.tensor([0, 1])


@pytest.mark.parametrize(
    ("logits", "targets", "loss", "words"),
    [
        (torch.zeros(2, 4), PAIR, None, r"logits has shape \[2, 4\]"),
        (torch.zeros(2), PAIR, None, r"logits has shape \[2\] and dtype torch.float32"),
        (ROWS, torch.zeros(3).long(), None, r"targets has shape \[3\]"),
        (ROWS, PAIR, torch.zeros(()), r"loss has shape \[\]"),
        (ROWS, torch.zeros(2), None, "targets has dtype torch.float32"),
        (ROWS, torch.tensor([0, 3]), None, "targets has a class outside 0 to 2"),
        (torch.tensor([0, -1]), PAIR, None, "predictions has a class outside 0 to 2"),
    ],
)
def test_what_does_not_fit_is_refused(
    logits: torch.Tensor, targets: torch.Tensor, loss: torch.Tensor | None, words: str
) -> None:
    """A wrong shape or class is named; it never becomes a wrong number."""
    with pytest.raises(InvalidParamsError, match=words):
        ClassificationMeter(NAMES).update(logits, targets, loss)
    with pytest.raises(InvalidParamsError, match="class_names is empty"):
        ClassificationMeter([])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_counts_on_the_device_of_the_logits() -> None:
    """Nothing but the final sums leaves the GPU."""
    meter = ClassificationMeter(NAMES)
    meter.update(LOGITS.cuda(), TARGETS)
    assert meter.report().accuracy == 0.8


# ---- The report of a confusion matrix.


@example([(2, 0, 1), (3, 0, 0), (0, 0, 0)])  # b is never predicted, c is absent
@settings(deadline=None)
@given(
    st.integers(1, 6).flatmap(
        lambda n: st.lists(st.tuples(*[st.integers(0, 9)] * n), min_size=n, max_size=n)
    )
)
def test_scores_are_those_of_scikit_learn(matrix: list[tuple[int, ...]]) -> None:
    """Rows are true classes. No score is nan or inf, on which Prefect's page crashes."""
    total = sum(map(sum, matrix))
    names = [f"class {i}" for i in range(len(matrix))]
    if total == 0:
        with pytest.raises(InvalidParamsError, match="nothing was evaluated"):
            classification_report(matrix, names)
        return
    report = classification_report(matrix, names, loss=0.25)
    assert (report.confusion_matrix, report.loss) == (tuple(matrix), 0.25)
    assert [score.name for score in report.classes] == names
    assert report.num_samples == total == sum(score.support for score in report.classes)
    right = sum(score.recall * score.support for score in report.classes)
    assert report.accuracy == pytest.approx(right / total)
    cells = [(i, j, count) for i, row in enumerate(matrix) for j, count in enumerate(row)]
    targets, predictions, counts = zip(*cells, strict=True)
    expected = precision_recall_fscore_support(
        targets, predictions, sample_weight=counts, labels=range(len(matrix)), zero_division=0
    )
    found = [(each.precision, each.recall, each.f1, each.support) for each in report.classes]
    for scores, right in zip(zip(*found, strict=True), expected, strict=True):
        assert scores == pytest.approx(right.tolist(), rel=1e-12)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_none(loss: float) -> None:
    """A diverged model still gets its report."""
    assert classification_report([[1]], ["a"], loss).loss is None


PARITY = ("even", "odd")


def content(sample: WorstSample) -> bytes:
    """Return the image file's bytes."""
    return base64.b64decode(sample.image.partition("base64,")[2], validate=True)


def pixels(sample: WorstSample) -> np.ndarray:
    """Return what a browser would show."""
    return np.asarray(Image.open(io.BytesIO(content(sample))))


def test_the_worst_of_all_batches_are_kept_in_order() -> None:
    """Each with its own picture and classes; a nan loss ranks first and is no number."""
    losses = torch.rand(40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    losses[[7, 33]] = torch.tensor([math.nan, 9.0], dtype=torch.float64)
    images = (torch.arange(40) * 6).byte()[:, None, None, None].expand(40, 1, 8, 8)
    targets = torch.arange(40) % 2
    meter = ClassificationMeter(PARITY)
    for part in torch.arange(40).split(11):
        meter.update(1 - targets[part], targets[part], losses[part], images[part])
    worst = meter.report().worst_samples
    order = losses.nan_to_num(nan=math.inf).argsort(descending=True)[:MAX_WORST_SAMPLES].tolist()
    assert order[:2] == [7, 33]
    assert [pixels(sample)[0, 0] for sample in worst] == [6 * i for i in order]
    assert [sample.loss for sample in worst] == [None, 9.0, *losses[order[2:]].tolist()]
    expected = [(PARITY[i % 2], PARITY[1 - i % 2]) for i in order]
    assert [(sample.true, sample.predicted) for sample in worst] == expected


def thumbnail_of(image: torch.Tensor) -> WorstSample:
    """Make the thumbnail of one image."""
    meter = ClassificationMeter(PARITY)
    meter.update(torch.zeros(1, 2), torch.tensor([0]), images=image[None])
    return meter.report().worst_samples[0]


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32, 32), (3, 1080, 1920), (5, 700, 2), (2, 1, 1)])
@pytest.mark.parametrize("kind", ["noise", "bytes", "normalized", "nan"])
def test_any_image_becomes_a_small_file(shape: tuple[int, ...], kind: str) -> None:
    """Noise, which no format compresses, nans and channels of a satellite."""
    random = torch.Generator().manual_seed(1)
    image = torch.rand(shape, generator=random)
    match kind:
        case "bytes":
            image = (image * 255).byte()
        case "normalized":
            image = image * 4 - 2
        case "nan":
            image[:] = math.nan
    sample = thumbnail_of(image)
    shown = pixels(sample)
    assert len(content(sample)) <= MAX_BYTES
    assert max(shown.shape[:2]) <= MAX_PIXELS
    assert (shown.ndim == 3) == (shape[0] >= 3)
    if kind == "normalized" and shape[1:] == (8, 8):
        assert (shown.min(), shown.max()) == (0, 255)


def test_a_small_image_is_shown_pixel_by_pixel() -> None:
    """Neither blurred nor stretched: 0 to 1 is black to white."""
    image = torch.tensor([[[0.0, 0.5], [0.25, 0.75]]])
    assert pixels(thumbnail_of(image)).tolist() == [[0, 128], [64, 191]]


@pytest.mark.parametrize("shape", [(3, 8, 8), (1, 3, 8, 8), (2, 3, 0, 8)])
def test_what_is_no_batch_of_images_is_refused(shape: tuple[int, ...]) -> None:
    """Before anything is counted."""
    meter = ClassificationMeter(PARITY)
    with pytest.raises(InvalidParamsError, match=r"expected \[2, channels, height"):
        meter.update(torch.zeros(2, 2), torch.tensor([0, 1]), images=torch.zeros(shape))
    with pytest.raises(InvalidParamsError, match="by each sample's loss"):
        meter.update(torch.tensor([0]), torch.tensor([0]), images=torch.zeros(1, 1, 2, 2))
    with pytest.raises(InvalidParamsError, match="nothing was evaluated"):
        meter.report()


@pytest.mark.parametrize(
    "image",
    [
        "https://evil.example/pixel.png",
        "data:image/svg+xml;base64,AAAA",
        'data:image/png;base64,AAAA"/><script>',
        "data:image/png;base64,AAAA\n",
        "data:image/png;base64," + "A" * 3000,
    ],
)
def test_a_workloads_own_sample_is_a_small_picture_and_nothing_else(image: str) -> None:
    """Neither an address, nor a script, nor more than a page can bear."""
    with pytest.raises(ValidationError):
        WorstSample(loss=1.0, true="a", predicted="b", image=image)
