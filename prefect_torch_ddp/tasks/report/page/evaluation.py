"""What an evaluation found, as markdown: its classes, the worst samples, texts."""

from collections.abc import Mapping, Sequence

from prefect_torch_ddp.results import Report
from prefect_torch_ddp.tasks.report.markdown import count, number, percent, short, table, text
from prefect_torch_ddp.tasks.report.page.headline import MAX_HEADLINE_METRICS
from prefect_torch_ddp.tasks.report.page.pictures import (
    MAX_CLASSES,
    MAX_NAMED_CLASSES,
    Matrix,
    matrix_picture,
    worst_picture,
)

MAX_SCORE_ROWS = 100
MAX_CLASS_ROWS = 200
MAX_CONFUSIONS = 10
MAX_GONE = 10
MAX_TEXTS, MAX_CHARACTERS = 8, 4000


def score_table(evaluation: Report, previous: Report | None = None) -> str:
    """Lay out all scores; nothing if the page's top has them all.

    Args:
        evaluation: of this run.
        previous: of the experiment's previous run, whose scores stand next to these.
    """
    if len(evaluation.metrics) <= MAX_HEADLINE_METRICS:
        return ""
    before = {} if previous is None else previous.scores
    scores = list(evaluation.scores.items())
    rows = []
    for name, value in scores[:MAX_SCORE_ROWS]:
        then = [number(before[name]) if name in before else ""] if before else []
        rows.append([short(name), number(value), *then])
    num_left_out = len(scores) - len(rows)
    ending = f"\n\n{num_left_out} more scores are left out." if num_left_out else ""
    return table(["score", "value", *(["last run"] if before else [])], rows) + ending


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

    As a picture, with counts if there is room for them, and the pairs that are confused most.
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
    return f"{picture}\n\n{_most_confused(matrix, names)}"


def worst_samples(evaluation: Report) -> str:
    """Show the samples with the highest losses, each with its true class and the predicted one."""
    picture = worst_picture(evaluation.worst_samples)
    above = "The samples with the highest losses, the worst first; under each its true class, and"
    return f"{above} what it was taken for.\n\n{picture}" if picture else ""


def texts(evaluation: Report) -> str:
    """Show the texts that the evaluation returned, each below its title."""
    shown = [
        f"**{text(title)}**\n\n{_quoted(words)}"
        for title, words in list(evaluation.texts.items())[:MAX_TEXTS]
    ]
    if num_left_out := len(evaluation.texts) - len(shown):
        shown.append(f"{num_left_out} more texts are left out.")
    return "\n\n".join(shown)


def _quoted(words: str) -> str:
    # Two spaces at the end of a line keep its break.
    lines = [f"> {text(line)}  " for line in words[:MAX_CHARACTERS].splitlines()]
    if (num_left_out := len(words) - MAX_CHARACTERS) > 0:
        lines += ["", f"{count(num_left_out)} more characters are left out."]
    return "\n".join(lines)


def _gone(evaluation: Report, before: Mapping[str, object]) -> str:
    now = {score.name for score in evaluation.classes}
    gone = [text(name) for name in before if name not in now]
    if len(gone) > MAX_GONE:
        gone[MAX_GONE:] = [f"{len(gone) - MAX_GONE} more"]
    return f"No longer there: {', '.join(gone)}.\n\n" if gone else ""


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
