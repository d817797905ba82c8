"""Owns the reports' text: pure functions from values to markdown, live while training runs and
whole at the end.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from prefect_torch_ddp.params import TrainParams
from prefect_torch_ddp.protocol.events import Progress
from prefect_torch_ddp.results import EpochRow, Report, TrainReport
from prefect_torch_ddp.tasks.report.markdown import (
    code,
    code_block,
    count,
    duration,
    number,
    percent,
    table,
    text,
)
from prefect_torch_ddp.tasks.report.run_record import RunRecord
from prefect_torch_ddp.tasks.report.sections import (
    checkpoint_list,
    failure_section,
    ledger_section,
    ledger_warning,
    load_section,
)

MAX_EPOCH_ROWS = 50
MAX_METRIC_COLUMNS = 6
MAX_CLASS_ROWS = 100
MAX_TABLE_CLASSES = 15
MAX_MATRIX_CLASSES = 30
MAX_LABEL_CHARACTERS = 24
CORNER = "true ↓ predicted →"
MAX_CONFUSIONS = 10
MAX_HEADER_CHARACTERS = 70
MAX_LINE_METRICS = 3


@dataclass(frozen=True)
class LiveView:
    """What is known of a training at one moment."""

    run_id: str
    workload: str
    world_size: int
    attempt: int
    elapsed_s: float
    status: Literal["training", "finished", "stopped"] = "training"
    progress: Progress | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The latest value of each."""
    steps_per_s: float | None = None
    eta_s: float | None = None
    updated_at: str = ""
    """When, so that a page that stands still shows since when it does."""


def progress_line(view: LiveView) -> str:
    """Say in one plain line how far the training is: `epoch 3, step 120/400, loss 0.123, ETA 40
    s`.
    """
    progress = view.progress
    if progress is None:
        return (
            "no step yet" if view.status == "training" else f"{view.status} before the first step"
        )
    step = f"step {progress.step}" + (f"/{progress.total_steps}" if progress.total_steps else "")
    metrics = [f"{' '.join(name.split())} {number(value)}" for name, value in view.metrics.items()][
        :MAX_LINE_METRICS
    ]
    ending = (
        [view.status]
        if view.status != "training"
        else []
        if view.eta_s is None
        else [f"ETA {duration(view.eta_s)}"]
    )
    return ", ".join([f"epoch {progress.epoch}", step, *metrics, *ending])


def render_live(view: LiveView, curve: str = "") -> str:
    """Render the report of a training that runs.

    Args:
        view: what is known now.
        curve: a markdown image, or nothing.
    """
    facts = {
        "Run": code(view.run_id),
        "Workload": code(view.workload),
        "World size": f"{view.world_size} ranks",
        "Attempt": str(view.attempt),
        "Elapsed": duration(view.elapsed_s),
        "Updated": text(view.updated_at),
        "Throughput": "" if view.steps_per_s is None else f"{number(view.steps_per_s)} steps/s",
        "ETA": "" if view.eta_s is None or view.status != "training" else duration(view.eta_s),
    }
    warning = (
        f"**{text(view.progress.trouble)}**"
        if view.progress is not None and view.progress.trouble
        else ""
    )
    parts = [f"# Training: {text(progress_line(view))}", warning, curve, _facts(facts)]
    if view.metrics:
        parts += [
            "## Latest metrics",
            _facts({text(name): number(value) for name, value in view.metrics.items()}),
        ]
    return _join(parts)


def render_report(
    report: TrainReport,
    params: TrainParams,
    record: RunRecord,
    curve: str = "",
    time_lost_s: float = 0.0,
) -> str:
    """Render the report of a finished run.

    Args:
        report: what the run gives back.
        params: what it was told.
        record: its code and environment.
        curve: a markdown image, or nothing.
        time_lost_s: what failures cost, in seconds.
    """
    evaluation = report.evaluation
    parts = [
        f"# {text(params.workload)}: {_headline(evaluation)}",
        *ledger_warning(report.ledger),
        curve,
    ]
    parts += ["## Epochs", epoch_table(report.epochs)] if report.epochs else []
    parts += ["## Classes", class_table(evaluation)] if evaluation.classes else []
    parts += (
        ["## Confusion matrix", confusion_table(evaluation)] if evaluation.confusion_matrix else []
    )
    parts += ["## Model and checkpoints", checkpoint_list(report), load_section(report.model_uri)]
    parts += [*ledger_section(report.ledger), *failure_section(report.training.failures)]
    parts += ["## Run record", _run_record(report, params, record, time_lost_s)]
    return _join(parts)


def epoch_table(rows: Sequence[EpochRow]) -> str:
    """Lay out the epochs, the newest ones where there are many."""
    names = list(dict.fromkeys(name for row in rows for name in row.metrics))[:MAX_METRIC_COLUMNS]
    shown = rows[-MAX_EPOCH_ROWS:]
    values = [
        [number(row.metrics[name]) if name in row.metrics else "" for name in names]
        for row in shown
    ]
    lines = [
        [str(row.epoch), count(row.num_steps), count(row.num_samples), *cells]
        for row, cells in zip(shown, values, strict=True)
    ]
    left_out = (
        f"\n\nThe first {len(rows) - len(shown)} epochs are left out."
        if len(shown) < len(rows)
        else ""
    )
    return (
        table(["epoch", "steps", "samples", *map(text, names)], lines, align="r" * (3 + len(names)))
        + left_out
    )


def class_table(evaluation: Report) -> str:
    """Lay out the scores of each class."""
    lines = [
        [
            text(score.name),
            f"{score.precision:.3f}",
            f"{score.recall:.3f}",
            f"{score.f1:.3f}",
            count(score.support),
        ]
        for score in evaluation.classes[:MAX_CLASS_ROWS]
    ]
    num_left_out = len(evaluation.classes) - len(lines)
    return table(["class", "precision", "recall", "F1", "support"], lines) + (
        f"\n\n{num_left_out} more classes are left out." if num_left_out else ""
    )


def confusion_table(evaluation: Report) -> str:
    """Lay out the confusion matrix, true classes down and predicted ones across.

    Where the names would make it wider than a page, columns are numbered as the rows are; a
    larger one becomes plain text, which pages scroll; one too large to read gives way to its
    most frequent confusions.
    """
    matrix, names = evaluation.confusion_matrix, class_names(evaluation)
    is_wide = len(names) > MAX_TABLE_CLASSES or sum(map(len, names)) > MAX_HEADER_CHARACTERS
    if not is_wide:
        return _matrix_table(matrix, names, names)
    most = _most_confused(matrix, names)
    if len(matrix) > MAX_MATRIX_CLASSES:
        return f"Of {len(matrix)} classes:\n\n{most}"
    numbers = [str(i) for i in range(1, len(names) + 1)]
    numbered = [f"{i} {name}" for i, name in zip(numbers, names, strict=True)]
    lay_out = _matrix_text if len(names) > MAX_TABLE_CLASSES else _matrix_table
    return f"{most}\n\nAll of them; columns bear the numbers of the rows:\n\n{lay_out(matrix, numbered, numbers)}"


def class_names(evaluation: Report) -> list[str]:
    """Return the names of the confusion matrix's classes, or their numbers where they have
    none.
    """
    names = [score.name for score in evaluation.classes]
    return (
        names
        if len(names) == len(evaluation.confusion_matrix)
        else [str(i) for i in range(len(evaluation.confusion_matrix))]
    )


def _headline(evaluation: Report) -> str:
    accuracy = [] if evaluation.accuracy is None else [f"accuracy {percent(evaluation.accuracy)}"]
    loss = [] if evaluation.loss is None else [f"loss {number(evaluation.loss)}"]
    others = [
        f"{text(name)} {number(value)}"
        for name, value in list(evaluation.metrics.items())[:MAX_LINE_METRICS]
    ]
    return ", ".join([*accuracy, *loss, *others, f"{count(evaluation.num_samples)} samples"])


def _matrix_table(
    matrix: Sequence[Sequence[int]], rows: Sequence[str], columns: Sequence[str]
) -> str:
    lines = [
        [text(rows[i]), *(f"**{cell}**" if i == j else str(cell) for j, cell in enumerate(row))]
        for i, row in enumerate(matrix)
    ]
    return table([CORNER, *map(text, columns)], lines)


def _matrix_text(
    matrix: Sequence[Sequence[int]], rows: Sequence[str], columns: Sequence[str]
) -> str:
    labels = [" ".join(label.split())[:MAX_LABEL_CHARACTERS] for label in (CORNER, *rows)]
    cells = [columns, *([str(cell) if cell else "." for cell in row] for row in matrix)]
    width = max(len(cell) for row in cells for cell in row) + 1
    label_width = max(map(len, labels))
    lines = [
        label.ljust(label_width) + "".join(cell.rjust(width) for cell in row)
        for label, row in zip(labels, cells, strict=True)
    ]
    return code_block("\n".join(lines), "text")


def _most_confused(matrix: Sequence[Sequence[int]], names: Sequence[str]) -> str:
    pairs = [
        (cell, i, j)
        for i, row in enumerate(matrix)
        for j, cell in enumerate(row)
        if i != j and cell
    ]
    if not pairs:
        return "No class is taken for another."
    pairs = sorted(pairs, key=lambda pair: (-pair[0], pair[1], pair[2]))[:MAX_CONFUSIONS]
    lines = [
        [text(names[i]), text(names[j]), count(cell), percent(cell / sum(matrix[i]))]
        for cell, i, j in pairs
    ]
    return "The most frequent confusions:\n\n" + table(
        ["true", "predicted", "samples", "of the true class"], lines, align="llrr"
    )


def _run_record(
    report: TrainReport, params: TrainParams, record: RunRecord, time_lost_s: float
) -> str:
    training = report.training
    resumed = (
        ""
        if training.resumed_from_step is None
        else f", resumed from step {training.resumed_from_step}"
    )
    return _facts(
        {
            "run": code(report.run_id),
            "workload": code(params.workload),
            "code": f"prefect-torch-ddp {text(record.code_version)}",
            "git commit": code(record.git_commit or ""),
            **{name: text(version) for name, version in record.versions.items()},
            "dataset": f"{count(report.dataset.num_files)} files, {count(report.dataset.num_bytes)} bytes",
            "dataset digest": code(report.dataset.digest),
            "dataset place": code(report.dataset.uri),
            "seed": str(params.seed),
            "world size": f"{training.world_size} ranks",
            "steps": f"{count(training.num_steps)} in {count(training.num_epochs)} epochs",
            "attempts": f"{training.attempt}{resumed}",
            "training time of the last attempt": duration(training.duration_s),
            "time lost to failures": duration(time_lost_s),
        }
    )


def _facts(facts: Mapping[str, str]) -> str:
    """Lay out names and values that are markdown already; empty values are left out."""
    return table(
        ["what", "value"], [[name, value] for name, value in facts.items() if value], align="ll"
    )


def _join(parts: Sequence[str]) -> str:
    return "\n\n".join(part for part in parts if part) + "\n"
