"""What an evaluation found, as markdown: its classes, the confusion matrix, the worst samples."""

from collections.abc import Mapping, Sequence

from prefect_torch_ddp.results import Report
from prefect_torch_ddp.tasks.report.markdown import code_block, count, percent, table, text
from prefect_torch_ddp.tasks.report.page.pictures import (
    MAX_CLASSES,
    MAX_NAMED_CLASSES,
    Matrix,
    matrix_picture,
    worst_picture,
)

MAX_CLASS_ROWS = 200
MAX_TABLE_CLASSES = 15
MAX_HEADER_CHARACTERS = 70
MAX_TEXT_CLASSES = 30
MAX_LABEL_CHARACTERS = 24
MAX_CONFUSIONS = 10
MAX_GONE = 10
CORNER = "true ↓ predicted →"


def class_table(evaluation: Report, previous: Report | None = None) -> str:
    """Lay out the scores of each class; nothing without any.

    Args:
        evaluation: of this run.
        previous: of the experiment's previous run: how each class' F1 differs from there.
    """
    before = {score.name: score for score in previous.classes} if previous is not None else {}
    lines = []
    for score in evaluation.classes[:MAX_CLASS_ROWS]:
        shares = [f"{share:.3f}" for share in (score.precision, score.recall, score.f1)]
        old = before.get(score.name)
        change = [] if not before else [f"{score.f1 - old.f1:+.3f}" if old else "new"]
        lines.append([text(score.name), *shares, *change, count(score.support)])
    num_left_out = len(evaluation.classes) - len(lines)
    ending = f"\n\n{num_left_out} more classes are left out." if num_left_out else ""
    changes = ["F1 since the last run"] if before else []
    header = ["class", "precision", "recall", "F1", *changes, "support"]
    return f"{_gone(evaluation, before)}{table(header, lines)}{ending}" if lines else ""


def confusion_table(evaluation: Report) -> str:
    """Show the confusion matrix, true classes down and predicted ones across.

    As a picture, as the pairs that are confused most, and where it fits as a table. Where the
    names would make that wider than a page it is plain text, which pages scroll, with numbered
    columns.
    """
    matrix = evaluation.confusion_matrix
    if not matrix:
        return ""
    names = [score.name for score in evaluation.classes]
    if len(names) != len(matrix):
        names = [str(i) for i in range(len(matrix))]
    picture = matrix_picture(matrix, names)
    if not picture:
        picture = f"A picture of {len(matrix)} classes is left out: {MAX_CLASSES} can be seen."
    else:
        picture += "\n\nA cell's colour is its share of the true class: blue is right, red wrong."
    if len(matrix) > MAX_NAMED_CLASSES:
        picture += f" The {len(matrix)} classes are numbered from 1."
    fits = len(names) <= MAX_TABLE_CLASSES and sum(map(len, names)) <= MAX_HEADER_CHARACTERS
    parts = [picture, *([_matrix_table(matrix, names)] if fits else [])]
    parts.append(_most_confused(matrix, names))
    if not fits and len(names) <= MAX_TEXT_CLASSES:
        whole = _matrix_text(matrix, names)
        parts.append(f"All of them; columns bear the numbers of the rows:\n\n{whole}")
    return "\n\n".join(parts)


def worst_samples(evaluation: Report) -> str:
    """Show the samples with the highest losses, each with its true class and the predicted one."""
    picture = worst_picture(evaluation.worst_samples)
    above = "The samples with the highest losses, the worst first; under each its true class, and"
    return f"{above} what it was taken for.\n\n{picture}" if picture else ""


def _gone(evaluation: Report, before: Mapping[str, object]) -> str:
    now = {score.name for score in evaluation.classes}
    gone = [text(name) for name in before if name not in now]
    if len(gone) > MAX_GONE:
        gone[MAX_GONE:] = [f"{len(gone) - MAX_GONE} more"]
    return f"No longer there: {', '.join(gone)}.\n\n" if gone else ""


def _matrix_table(matrix: Matrix, names: Sequence[str]) -> str:
    lines = []
    for i, row in enumerate(matrix):
        cells = [f"**{cell}**" if i == j else str(cell) for j, cell in enumerate(row)]
        lines.append([text(names[i]), *cells])
    return table([CORNER, *map(text, names)], lines)


def _matrix_text(matrix: Matrix, names: Sequence[str]) -> str:
    numbered = [CORNER, *(f"{i} {' '.join(name.split())}" for i, name in enumerate(names, 1))]
    labels = [label[:MAX_LABEL_CHARACTERS] for label in numbered]
    columns = [str(i) for i in range(1, len(names) + 1)]
    cells = [columns, *([str(cell) if cell else "." for cell in row] for row in matrix)]
    width = max(len(cell) for row in cells for cell in row) + 1
    label_width = max(map(len, labels))
    lines = [
        label.ljust(label_width) + "".join(cell.rjust(width) for cell in row)
        for label, row in zip(labels, cells, strict=True)
    ]
    return code_block("\n".join(lines), "text")


def _most_confused(matrix: Matrix, names: Sequence[str]) -> str:
    pairs = [(-cell, i, j) for i, row in enumerate(matrix) for j, cell in enumerate(row) if i != j]
    lines = [
        [text(names[i]), text(names[j]), count(-cell), percent(-cell / sum(matrix[i]))]
        for cell, i, j in sorted(pairs)[:MAX_CONFUSIONS]
        if cell
    ]
    if not lines:
        return "No class is taken for another."
    header = ["true", "predicted", "samples", "of the true class"]
    return f"The most frequent confusions:\n\n{table(header, lines, align='llrr')}"
