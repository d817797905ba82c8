"""Owns what a confusion matrix says: accuracy, and precision, recall, F1 and support of each class."""

import math
from collections.abc import Sequence

from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.results import ClassScore, Report


def classification_report(
    confusion_matrix: Sequence[Sequence[int]], class_names: Sequence[str], loss: float | None = None
) -> Report:
    """Read all scores off a confusion matrix.

    A class that was never predicted has precision 0, one that is absent from the split recall 0. No value is nan or infinite: a
    loss that is becomes None.

    Args:
        confusion_matrix: counts, one row per true class, one column per predicted class.
        class_names: in the order of rows and columns.
        loss: mean over all samples.

    Raises:
        InvalidParamsError: the matrix isn't square over the class names, has a negative count, or no sample at all.
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

    cells = [(true, predicted, count) for true, row in enumerate(rows) for predicted, count in enumerate(row) if count]
    targets, predictions, counts = zip(*cells, strict=True)
    precision, recall, f1, _ = precision_recall_fscore_support(
        targets, predictions, labels=range(len(rows)), sample_weight=counts, zero_division=0
    )
    scores = zip(class_names, precision.tolist(), recall.tolist(), f1.tolist(), map(sum, rows), strict=True)
    return tuple(ClassScore(name=name, precision=p, recall=r, f1=f, support=support) for name, p, r, f, support in scores)
