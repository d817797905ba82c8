"""A classifier's scores: exact counts over all ranks, and the samples with the highest loss."""

import base64
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy, interpolate

from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.lazy import exported_by
from prefect_torch_ddp.rank.evaluation.meters import (
    non_finite,
    rank_and_world_size,
    refuse_nothing,
    summed,
)
from prefect_torch_ddp.rank.link import current_link
from prefect_torch_ddp.results import (
    MAX_IMAGE_CHARACTERS,
    MAX_WORST_SAMPLES,
    ClassScore,
    Report,
    WorstSample,
)

MAX_PIXELS = 64
"""Of a thumbnail's longer side."""
MAX_BYTES = 2048
QUALITIES = (80, 60, 40, 20, 5)
"""Of JPEG; the last one makes 64 x 64 pixels of noise small enough."""
NUM_COLOURS = 3


@exported_by("prefect_torch_ddp")
class ClassificationMeter:
    """Count predictions on this rank and sum them exactly over all ranks.

    Only `report` communicates, so each rank may call `update` any number of times, or never.

    Example:
        In `evaluate`, each rank with its share of the held-out data:

            from prefect_torch_ddp import ClassificationMeter

            meter = ClassificationMeter(["cat", "dog"])
            for images, targets in loader:
                meter.update(model(images), targets)
            report = meter.report()
    """

    def __init__(self, class_names: Sequence[str]) -> None:
        """Start from zero; the names are in the order of the logits' columns."""
        if not class_names:
            msg = "class_names is empty; name each class, in the order of the logits' columns"
            raise InvalidParamsError(msg)
        self.class_names = tuple(class_names)
        self._counts = torch.zeros(len(class_names) ** 2, dtype=torch.int64, device="cpu")
        """The confusion matrix, row after row."""
        self._num_with_loss = 0
        self._num_with_image = 0
        self._num_non_finite = torch.zeros((), dtype=torch.int64, device="cpu")
        self._worst = WorstSamples()
        self._loss_sum = torch.zeros((), dtype=torch.float64, device="cpu")

    @torch.no_grad()
    def update(
        self,
        logits: torch.Tensor,
        targets: torch.Tensor,
        loss: torch.Tensor | None = None,
        images: torch.Tensor | None = None,
    ) -> None:
        """Add one batch, which may be empty.

        Args:
            logits: scores of shape [batch, classes], floating; or predicted classes of shape
                [batch], integer.
            targets: true classes of shape [batch], integer.
            loss: the loss of each sample, shape [batch]. None: the cross entropy of the logits.
            images: the batch's images, [batch, channels, height, width]. The report shows those
                with the highest losses as thumbnails. Images with floating values outside of 0 to
                1, for example normalized ones, are rescaled to this range. None: no thumbnails.

        Raises:
            InvalidParamsError: shapes don't fit together, or a class isn't one of the names.
        """
        num_classes = len(self.class_names)
        # The other ranks may wait while one rank validates.
        current_link().heartbeat.progress(arms=False)
        self._refuse_misfits(logits, targets, loss, images)
        targets = targets.to(logits.device).long()
        predictions = logits.argmax(dim=1) if logits.dim() > 1 else logits.long()
        given = {"targets": targets} | ({"predictions": predictions} if logits.dim() == 1 else {})
        for name, classes in given.items():
            if ((classes < 0) | (classes >= num_classes)).any():
                outside = f"{name} has a class outside 0 to {num_classes - 1}"
                msg = f"{outside}; there are {num_classes} class names"
                raise InvalidParamsError(msg)
        counts = torch.bincount(targets * num_classes + predictions, minlength=num_classes**2)
        self._counts = self._counts.to(logits.device) + counts
        if loss is None and logits.dim() > 1:
            loss = cross_entropy(logits.float(), targets, reduction="none")
        if loss is not None:
            self._num_with_loss += len(targets)
            self._loss_sum = self._loss_sum.to(loss.device) + loss.double().sum()
            self._num_non_finite = self._num_non_finite.to(loss.device) + (~loss.isfinite()).sum()
        if images is not None and loss is not None:
            self._num_with_image += len(targets)
            self._worst.add(images, loss, targets, predictions)

    def report(self) -> Report:
        """Return the report over the samples of all ranks. Every rank must call it.

        The report is the same on all ranks. Its loss is None unless every sample had a finite loss;
        the metric `non_finite_losses` counts losses that are nan or infinite.

        Raises:
            InvalidParamsError: no rank counted a sample; raised on every rank.
        """
        own = [self._num_with_loss, self._num_with_image, int(self._num_non_finite)]
        counts = torch.cat([self._counts, self._counts.new_tensor(own)]).double()  # to 2**53 exact
        total = summed(torch.cat([counts, self._loss_sum.to(counts)[None]]))
        *cells, num_with_loss, num_with_image, num_non_finite = total[:-1].long().tolist()
        num_classes, num_samples = len(self.class_names), sum(cells)
        has_loss = num_samples and num_with_loss == num_samples
        # Whether there are images is known to ranks without a sample only from the sum.
        worst = self._worst.over_ranks(self.class_names) if num_with_image else ()
        return classification_report(
            [cells[row : row + num_classes] for row in range(0, num_classes**2, num_classes)],
            self.class_names,
            total[-1].item() / num_samples if has_loss else None,
            metrics=non_finite(num_non_finite, "losses", "mean loss"),
            worst_samples=worst,
        )

    def _refuse_misfits(
        self,
        logits: torch.Tensor,
        targets: torch.Tensor,
        loss: torch.Tensor | None,
        images: torch.Tensor | None,
    ) -> None:
        num_classes, scores = len(self.class_names), logits.dim() > 1
        expected = [num_classes] if scores else []
        if logits.is_floating_point() != scores or list(logits.shape[1:]) != expected:
            msg = (
                f"logits has shape {list(logits.shape)} and dtype {logits.dtype}; expected "
                f"floating scores [batch, {num_classes}], or integer predictions [batch]"
            )
            raise InvalidParamsError(msg)
        for name, values in (("targets", targets), ("loss", loss)):
            if values is not None and values.shape != logits.shape[:1]:
                one = f"expected one value for each of the {len(logits)} rows of logits"
                msg = f"{name} has shape {list(values.shape)}; {one}"
                raise InvalidParamsError(msg)
        if targets.is_floating_point():
            msg = f"targets has dtype {targets.dtype}; expected integer classes"
            raise InvalidParamsError(msg)
        if images is None:
            return
        is_batch = images.dim() == 4  # noqa: PLR2004
        if not is_batch or len(images) != len(logits) or 0 in images.shape[1:]:
            shape = f"[{len(logits)}, channels, height, width]"
            msg = f"images has shape {list(images.shape)}; expected {shape}"
            raise InvalidParamsError(msg)
        if not scores and loss is None:
            msg = "the worst of the images are found by each sample's loss; give that as well"
            raise InvalidParamsError(msg)


def classification_report(
    confusion_matrix: Sequence[Sequence[int]],
    class_names: Sequence[str],
    loss: float | None = None,
    *,
    metrics: Mapping[str, float] | None = None,
    worst_samples: Sequence[WorstSample] = (),
) -> Report:
    """Read all scores off a confusion matrix: a row per true class, a column per predicted one.

    A class that was never predicted has precision 0, one that is absent from the split recall
    0. No value is nan or infinite: a loss that is becomes None.

    Raises:
        InvalidParamsError: there is no sample at all.
    """
    rows = tuple(map(tuple, confusion_matrix))
    num_samples = sum(map(sum, rows))
    refuse_nothing(num_samples)
    return Report(
        num_samples=num_samples,
        accuracy=sum(row[i] for i, row in enumerate(rows)) / num_samples,
        loss=loss if loss is not None and math.isfinite(loss) else None,
        classes=_class_scores(rows, class_names),
        confusion_matrix=rows,
        metrics=dict(metrics or {}),
        worst_samples=tuple(worst_samples),
    )


def _class_scores(
    rows: Sequence[Sequence[int]], class_names: Sequence[str]
) -> tuple[ClassScore, ...]:
    scores = []
    for i, name in enumerate(class_names):
        hits, support, num_predicted = rows[i][i], sum(rows[i]), sum(row[i] for row in rows)
        precision, recall = hits / max(num_predicted, 1), hits / max(support, 1)
        f1 = 2 * hits / max(support + num_predicted, 1)
        scores.append(
            ClassScore(name=name, precision=precision, recall=recall, f1=f1, support=support)
        )
    return tuple(scores)


@dataclass(frozen=True)
class _Sample:
    loss: float
    target: int
    predicted: int
    pixels: torch.Tensor
    """uint8 [height, width], or [height, width, 3]."""


class WorstSamples:
    """Keeps this rank's worst samples, as thumbnails of 2 kB; `over_ranks` chooses those of all."""

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
        rank, world_size = rank_and_world_size()
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
    for quality in (None, *QUALITIES):  # exact if that is small enough
        kind, content = "png" if quality is None else "jpeg", io.BytesIO()
        image.save(content, kind, optimize=True, quality=quality or 0)  # PNG has none
        if content.tell() <= MAX_BYTES:
            break
    return f"data:image/{kind};base64,{base64.b64encode(content.getvalue()).decode()}"
