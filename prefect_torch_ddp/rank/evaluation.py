"""Owns exact counting of a classifier's hits over all ranks.

Owns what a confusion matrix says: accuracy, and precision, recall, F1 and support of each
class.
"""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.results import ClassScore, Report


class ClassificationMeter:
    """Count predictions on this rank; sum them up exactly over all ranks.

    Only `report` talks to other ranks, so ranks may update any number of times, also never.
    """

    def __init__(self, class_names: Sequence[str]) -> None:
        """Start from zero.

        Args:
            class_names: in the order of the logits' columns.
        """
        if not class_names:
            msg = "class_names is empty; give the name of each class, in the order of the logits' columns"
            raise InvalidParamsError(msg)
        self.class_names = tuple(class_names)
        self._counts = torch.zeros(len(class_names) ** 2, dtype=torch.int64, device="cpu")
        """The confusion matrix, row after row."""
        self._num_with_loss = 0
        self._loss_sum = torch.zeros((), dtype=torch.float64, device="cpu")

    @torch.no_grad()
    def update(
        self, logits: torch.Tensor, targets: torch.Tensor, loss: torch.Tensor | None = None
    ) -> None:
        """Count one batch; it may be empty.

        Args:
            logits: scores of shape [batch, classes], floating; or predicted classes of shape
                [batch], integer.
            targets: true classes of shape [batch], integer.
            loss: each sample's own loss, shape [batch]; left out, it is the cross entropy of
                the logits.

        Raises:
            InvalidParamsError: shapes don't fit together, or a class isn't one of the names.
        """
        num_classes = len(self.class_names)
        self._refuse_misfits(logits, targets, loss)
        targets = targets.to(logits.device).long()
        predictions = logits.argmax(dim=1) if logits.dim() > 1 else logits.long()
        for name, classes in (("targets", targets), ("predictions", predictions)):
            if ((classes < 0) | (classes >= num_classes)).any():
                msg = f"{name} has a class outside 0 to {num_classes - 1}; there are {num_classes} class names"
                raise InvalidParamsError(msg)
        counts = torch.bincount(targets * num_classes + predictions, minlength=num_classes**2)
        self._counts = self._counts.to(logits.device) + counts
        if loss is None and logits.dim() > 1:
            loss = cross_entropy(logits.float(), targets, reduction="none")
        if loss is not None:
            self._num_with_loss += len(targets)
            self._loss_sum = self._loss_sum.to(loss.device) + loss.double().sum()

    def report(self) -> Report:
        """Return the report over the samples of all ranks, the same on each; every rank of the
        group must call it.

        The loss is None unless every sample had one.

        Raises:
            InvalidParamsError: no rank counted a sample; raised on every rank.
        """
        num_with_loss = torch.tensor(
            [self._num_with_loss], dtype=torch.int64, device=self._counts.device
        )
        counts = torch.cat([self._counts, num_with_loss])
        loss_sum = self._loss_sum.clone()
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            counts, loss_sum = (_summed(value) for value in (counts, loss_sum))
        *cells, total_with_loss = counts.tolist()
        num_classes, num_samples = len(self.class_names), sum(cells)
        loss = (
            loss_sum.item() / num_samples
            if num_samples and total_with_loss == num_samples
            else None
        )
        matrix = [cells[row : row + num_classes] for row in range(0, num_classes**2, num_classes)]
        return classification_report(matrix, self.class_names, loss)

    def _refuse_misfits(
        self, logits: torch.Tensor, targets: torch.Tensor, loss: torch.Tensor | None
    ) -> None:
        scores = logits.dim() > 1
        if logits.is_floating_point() != scores or tuple(logits.shape[1:]) != (
            (len(self.class_names),) if scores else ()
        ):
            msg = (
                f"logits has shape {list(logits.shape)} and dtype {logits.dtype}; expected floating scores [batch, "
                f"{len(self.class_names)}], or integer predictions [batch]"
            )
            raise InvalidParamsError(msg)
        for name, values in (("targets", targets), ("loss", loss)):
            if values is not None and values.shape != logits.shape[:1]:
                msg = f"{name} has shape {list(values.shape)}; expected one value for each of the {len(logits)} rows of logits"
                raise InvalidParamsError(msg)
        if targets.is_floating_point():
            msg = f"targets has dtype {targets.dtype}; expected integer classes"
            raise InvalidParamsError(msg)


def _summed(value: torch.Tensor) -> torch.Tensor:
    """Return the sum over all ranks, on the device that the process group's backend can
    reach.
    """
    # A rank that never updated still holds CPU zeros, which NCCL would refuse while its peers
    # wait.
    device = (
        torch.device("cuda", torch.cuda.current_device())
        if dist.get_backend() == "nccl"
        else torch.device("cpu")
    )
    total = value.to(device, copy=True)
    dist.all_reduce(total)
    return total


def classification_report(
    confusion_matrix: Sequence[Sequence[int]], class_names: Sequence[str], loss: float | None = None
) -> Report:
    """Read all scores off a confusion matrix.

    A class that was never predicted has precision 0, one that is absent from the split recall
    0. No value is nan or infinite: a loss that is becomes None.

    Args:
        confusion_matrix: counts, one row per true class, one column per predicted class.
        class_names: in the order of rows and columns.
        loss: mean over all samples.

    Raises:
        InvalidParamsError: the matrix isn't square over the class names, has a negative count,
            or no sample at all.
    """
    rows = [[int(count) for count in row] for row in confusion_matrix]
    _refuse_misshapen(rows, len(class_names))
    num_samples = sum(map(sum, rows))
    if num_samples == 0:
        msg = "nothing was evaluated: there were 0 samples on all ranks together; check the evaluated split"
        raise InvalidParamsError(msg)
    return Report(
        num_samples=num_samples,
        accuracy=sum(row[i] for i, row in enumerate(rows)) / num_samples,
        loss=loss if loss is not None and math.isfinite(loss) else None,
        classes=_class_scores(rows, class_names),
        confusion_matrix=tuple(map(tuple, rows)),
    )


def _refuse_misshapen(rows: list[list[int]], num_classes: int) -> None:
    if len(rows) != num_classes or any(len(row) != num_classes for row in rows):
        shape = f"{num_classes} rows of {num_classes} counts"
        msg = f"a confusion matrix of {num_classes} classes has {shape}; got rows of {[len(row) for row in rows]}"
        raise InvalidParamsError(msg)
    if any(count < 0 for row in rows for count in row):
        msg = "a confusion matrix holds counts, and one of these is negative"
        raise InvalidParamsError(msg)


def _class_scores(rows: list[list[int]], class_names: Sequence[str]) -> tuple[ClassScore, ...]:
    """Score each class with scikit-learn, the matrix's cells as weighted samples."""
    from sklearn.metrics import precision_recall_fscore_support  # noqa: PLC0415 - a second, which only evaluating pays

    cells = [
        (true, predicted, count)
        for true, row in enumerate(rows)
        for predicted, count in enumerate(row)
        if count
    ]
    targets, predictions, counts = zip(*cells, strict=True)
    precision, recall, f1, _ = precision_recall_fscore_support(
        targets, predictions, labels=range(len(rows)), sample_weight=counts, zero_division=0
    )
    scores = zip(
        class_names, precision.tolist(), recall.tolist(), f1.tolist(), map(sum, rows), strict=True
    )
    return tuple(
        ClassScore(name=name, precision=p, recall=r, f1=f, support=support)
        for name, p, r, f, support in scores
    )
