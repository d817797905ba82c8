"""Thumbnails of the worst-scored samples: the right ones, seen as they are, bounded in size."""

import base64
import io
import math

import numpy as np
import pytest
import torch
from PIL import Image
from pydantic import ValidationError

from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.rank.evaluation.classification import (
    MAX_BYTES,
    MAX_PIXELS,
    ClassificationMeter,
)
from prefect_torch_ddp.results import MAX_WORST_SAMPLES, WorstSample

NAMES = ("even", "odd")


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
    meter = ClassificationMeter(NAMES)
    for part in torch.arange(40).split(11):
        meter.update(1 - targets[part], targets[part], losses[part], images[part])
    worst = meter.report().worst_samples
    order = losses.nan_to_num(nan=math.inf).argsort(descending=True)[:MAX_WORST_SAMPLES].tolist()
    assert order[:2] == [7, 33]
    assert [pixels(sample)[0, 0] for sample in worst] == [6 * i for i in order]
    assert [sample.loss for sample in worst] == [None, 9.0, *losses[order[2:]].tolist()]
    expected = [(NAMES[i % 2], NAMES[1 - i % 2]) for i in order]
    assert [(sample.true, sample.predicted) for sample in worst] == expected


def thumbnail_of(image: torch.Tensor) -> WorstSample:
    """Make the thumbnail of one image."""
    meter = ClassificationMeter(NAMES)
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
    meter = ClassificationMeter(NAMES)
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
