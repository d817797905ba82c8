"""What an evaluation found, as markdown: the scores of each class, and the confusion matrix."""

from collections.abc import Sequence

from prefect_torch_ddp.results import Report
from prefect_torch_ddp.tasks.report.markdown import code_block, count, percent, table, text

MAX_CLASS_ROWS = 100
MAX_TABLE_CLASSES = 15
MAX_MATRIX_CLASSES = 30
MAX_LABEL_CHARACTERS = 24
MAX_HEADER_CHARACTERS = 70
MAX_CONFUSIONS = 10
CORNER = "true ↓ predicted →"

Matrix = Sequence[Sequence[int]]


def class_table(evaluation: Report) -> str:
    """Lay out the scores of each class; nothing without any."""
    lines = []
    for score in evaluation.classes[:MAX_CLASS_ROWS]:
        shares = [f"{share:.3f}" for share in (score.precision, score.recall, score.f1)]
        lines.append([text(score.name), *shares, count(score.support)])
    num_left_out = len(evaluation.classes) - len(lines)
    ending = f"\n\n{num_left_out} more classes are left out." if num_left_out else ""
    header = ["class", "precision", "recall", "F1", "support"]
    return table(header, lines) + ending if lines else ""


def confusion_table(evaluation: Report) -> str:
    """Lay out the confusion matrix, true classes down and predicted ones across.

    Where the names would make it wider than a page it becomes plain text, which pages scroll,
    with numbered columns; one too large to read gives way to its most frequent confusions.
    """
    matrix = evaluation.confusion_matrix
    names = [score.name for score in evaluation.classes]
    if len(names) != len(matrix):
        names = [str(i) for i in range(len(matrix))]
    if not matrix:
        return ""
    if len(names) <= MAX_TABLE_CLASSES and sum(map(len, names)) <= MAX_HEADER_CHARACTERS:
        return _matrix_table(matrix, names)
    most = _most_confused(matrix, names)
    if len(matrix) > MAX_MATRIX_CLASSES:
        return f"Of {len(matrix)} classes:\n\n{most}"
    whole = _matrix_text(matrix, names)
    return f"{most}\n\nAll of them; columns bear the numbers of the rows:\n\n{whole}"


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
