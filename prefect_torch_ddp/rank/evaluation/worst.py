"""The samples with the highest loss over all ranks, each as a thumbnail of some 2 kB at most."""

import base64
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import interpolate

from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.rank.evaluation.meters import place, summed
from prefect_torch_ddp.results import MAX_IMAGE_CHARACTERS, MAX_WORST_SAMPLES, WorstSample

MAX_PIXELS = 64
"""Of a thumbnail's longer side."""
MAX_BYTES = 2048
QUALITIES = (80, 60, 40, 20, 5)
"""Of JPEG; the last one makes 64 x 64 pixels of noise small enough."""
NUM_COLOURS = 3


@dataclass(frozen=True)
class _Sample:
    loss: float
    target: int
    predicted: int
    pixels: torch.Tensor
    """uint8 [height, width], or [height, width, 3]."""


class WorstSamples:
    """Keeps this rank's worst samples; `over_ranks` chooses those of all."""

    def __init__(self) -> None:
        """Begin without any."""
        self._kept: list[_Sample] = []

    def add(
        self,
        images: torch.Tensor,
        losses: torch.Tensor,
        targets: torch.Tensor,
        predictions: torch.Tensor,
    ) -> None:
        """Take in a batch: images [batch, channels, height, width], the others [batch]."""
        # A nan is the worst; of equal ones the earlier stay.
        losses = losses.double().nan_to_num(nan=math.inf, posinf=math.inf)
        worst = losses.sort(descending=True, stable=True).indices[:MAX_WORST_SAMPLES]
        for i, loss in zip(worst.tolist(), losses[worst].tolist(), strict=True):
            if len(self._kept) == MAX_WORST_SAMPLES and loss <= self._kept[-1].loss:
                break
            pixels = _thumbnail(images[i])
            self._kept.append(_Sample(loss, int(targets[i]), int(predictions[i]), pixels))
            self._kept.sort(key=lambda sample: -sample.loss)
            del self._kept[MAX_WORST_SAMPLES:]

    def over_ranks(self, class_names: Sequence[str]) -> tuple[WorstSample, ...]:
        """Return the worst samples of all ranks, each of which must call it."""
        rank, world_size = place()
        losses = torch.zeros(world_size, MAX_WORST_SAMPLES, dtype=torch.float64, device="cpu")
        losses[rank] = -math.inf
        for i, sample in enumerate(self._kept):
            losses[rank, i] = sample.loss
        every = summed(losses).flatten().tolist()
        order = sorted(range(len(every)), key=lambda i: (-every[i], i))
        chosen = [i for i in order[:MAX_WORST_SAMPLES] if every[i] > -math.inf]
        # Each row is filled in by the rank that has the sample: the sum is a gather.
        rows = torch.zeros(len(chosen), 3 + MAX_IMAGE_CHARACTERS, dtype=torch.int32, device="cpu")
        for row, i in zip(rows, chosen, strict=True):
            if i // MAX_WORST_SAMPLES == rank:
                sample = self._kept[i % MAX_WORST_SAMPLES]
                image = _data_uri(sample.pixels).encode()
                values = [sample.target, sample.predicted, len(image), *image]
                row[: len(values)] = torch.tensor(values, dtype=torch.int32)
        return tuple(
            WorstSample(
                loss=every[i] if math.isfinite(every[i]) else None,
                true=class_names[target],
                predicted=class_names[predicted],
                image=bytes(image[:length]).decode(),
            )
            for i, (target, predicted, length, *image) in zip(
                chosen, summed(rows).tolist(), strict=True
            )
        )


def refuse_images(images: torch.Tensor, num_samples: int, *, has_loss: bool) -> None:
    """Refuse what is no batch of images, or can't be ranked.

    Raises:
        InvalidParamsError: the shape is another, or there is no loss.
    """
    if images.dim() != 4 or len(images) != num_samples or 0 in images.shape[1:]:  # noqa: PLR2004
        shape = f"[{num_samples}, channels, height, width]"
        msg = f"images has shape {list(images.shape)}; expected {shape}"
        raise InvalidParamsError(msg)
    if not has_loss:
        msg = "the worst of the images are found by each sample's loss; give that as well"
        raise InvalidParamsError(msg)


def _thumbnail(image: torch.Tensor) -> torch.Tensor:
    image = image[:NUM_COLOURS] if len(image) >= NUM_COLOURS else image[:1]
    height, width = image.shape[1:]
    shrink = max(height, width) / MAX_PIXELS
    is_share = image.is_floating_point() or image.dtype == torch.bool
    pixels = image.float() if is_share else image.float() / 255
    if shrink > 1:
        size = [max(1, round(height / shrink)), max(1, round(width / shrink))]
        pixels = interpolate(pixels[None], size=size, mode="area")[0]
    pixels = pixels.nan_to_num(nan=0.0)
    low, high = pixels.min(), pixels.max()
    if low < 0 or high > 1:  # normalized: no longer what a screen shows
        pixels = (pixels - low) / (high - low).clamp(min=torch.finfo(pixels.dtype).tiny)
    pixels = (pixels.nan_to_num(nan=0.0).clamp(0, 1) * 255).round().byte().cpu()
    return pixels[0] if len(pixels) == 1 else pixels.permute(1, 2, 0)


def _data_uri(pixels: torch.Tensor) -> str:
    from PIL import Image  # noqa: PLC0415 - most evaluations have no images

    image = Image.fromarray(pixels.contiguous().numpy())
    for quality in (None, *QUALITIES):  # exact where that is small enough
        kind, content = "png" if quality is None else "jpeg", io.BytesIO()
        image.save(content, kind, optimize=True, quality=quality or 0)  # PNG has none
        if content.tell() <= MAX_BYTES:
            break
    return f"data:image/{kind};base64,{base64.b64encode(content.getvalue()).decode()}"
