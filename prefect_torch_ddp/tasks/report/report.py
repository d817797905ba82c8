"""The report of a finished run: a page of markdown, from values alone."""

from collections.abc import Sequence

from prefect_torch_ddp.params import TrainParams
from prefect_torch_ddp.results import EpochRow, Report, TrainReport
from prefect_torch_ddp.tasks.report.markdown import (
    code,
    code_block,
    count,
    duration,
    fact_table,
    join,
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
MAX_HEADER_CHARACTERS = 70
MAX_CONFUSIONS = 10
MAX_HEADLINE_METRICS = 3
CORNER = "true ↓ predicted →"

Matrix = Sequence[Sequence[int]]


def render_report(
    report: TrainReport,
    params: TrainParams,
    record: RunRecord,
    curve: str = "",
    time_lost_s: float = 0.0,
) -> str:
    """Render the report of a finished run.

    Args:
        report: what the run returns.
        params: its parameters.
        record: its code and environment.
        curve: a markdown image, or nothing.
        time_lost_s: what failures cost, in seconds.
    """
    evaluation = report.evaluation
    return join(
        f"# {text(params.workload)}: {_headline(evaluation)}",
        ledger_warning(report.ledger),
        curve,
        f"## Epochs\n\n{epoch_table(report.epochs)}" if report.epochs else "",
        f"## Classes\n\n{class_table(evaluation)}" if evaluation.classes else "",
        f"## Confusion matrix\n\n{confusion_table(evaluation)}"
        if evaluation.confusion_matrix
        else "",
        f"## Model and checkpoints\n\n{checkpoint_list(report)}",
        load_section(report.training.model_uris),
        ledger_section(report.ledger),
        failure_section(report.training.failures),
        f"## Run record\n\n{_run_record(report, params, record, time_lost_s)}",
    )


def epoch_table(rows: Sequence[EpochRow]) -> str:
    """Lay out the epochs, the newest ones where there are many."""
    names = list(dict.fromkeys(name for row in rows for name in row.metrics))[:MAX_METRIC_COLUMNS]
    shown = rows[-MAX_EPOCH_ROWS:]
    lines = []
    for row in shown:
        values = [number(row.metrics[name]) if name in row.metrics else "" for name in names]
        lines.append([str(row.epoch), count(row.num_steps), count(row.num_samples), *values])
    header = ["epoch", "steps", "samples", *map(text, names)]
    num_left_out = len(rows) - len(shown)
    return table(header, lines, align="r" * len(header)) + (
        f"\n\nThe first {num_left_out} epochs are left out." if num_left_out else ""
    )


def class_table(evaluation: Report) -> str:
    """Lay out the scores of each class."""
    lines = []
    for score in evaluation.classes[:MAX_CLASS_ROWS]:
        shares = [f"{share:.3f}" for share in (score.precision, score.recall, score.f1)]
        lines.append([text(score.name), *shares, count(score.support)])
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
    if len(names) <= MAX_TABLE_CLASSES and sum(map(len, names)) <= MAX_HEADER_CHARACTERS:
        return _matrix_table(matrix, names, names)
    most = _most_confused(matrix, names)
    if len(matrix) > MAX_MATRIX_CLASSES:
        return f"Of {len(matrix)} classes:\n\n{most}"
    numbers = [str(i) for i in range(1, len(names) + 1)]
    numbered = [f"{i} {name}" for i, name in zip(numbers, names, strict=True)]
    lay_out = _matrix_text if len(names) > MAX_TABLE_CLASSES else _matrix_table
    whole = lay_out(matrix, numbered, numbers)
    return f"{most}\n\nAll of them; columns bear the numbers of the rows:\n\n{whole}"


def class_names(evaluation: Report) -> list[str]:
    """Return the names of the confusion matrix's classes, else their numbers."""
    names = [score.name for score in evaluation.classes]
    num_classes = len(evaluation.confusion_matrix)
    return names if len(names) == num_classes else [str(i) for i in range(num_classes)]


def _headline(evaluation: Report) -> str:
    accuracy = [] if evaluation.accuracy is None else [f"accuracy {percent(evaluation.accuracy)}"]
    loss = [] if evaluation.loss is None else [f"loss {number(evaluation.loss)}"]
    shown = list(evaluation.metrics.items())[:MAX_HEADLINE_METRICS]
    others = [f"{text(name)} {number(value)}" for name, value in shown]
    return ", ".join([*accuracy, *loss, *others, f"{count(evaluation.num_samples)} samples"])


def _matrix_table(matrix: Matrix, rows: Sequence[str], columns: Sequence[str]) -> str:
    lines = []
    for i, row in enumerate(matrix):
        cells = [f"**{cell}**" if i == j else str(cell) for j, cell in enumerate(row)]
        lines.append([text(rows[i]), *cells])
    return table([CORNER, *map(text, columns)], lines)


def _matrix_text(matrix: Matrix, rows: Sequence[str], columns: Sequence[str]) -> str:
    labels = [" ".join(label.split())[:MAX_LABEL_CHARACTERS] for label in (CORNER, *rows)]
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


def _run_record(
    report: TrainReport, params: TrainParams, record: RunRecord, time_lost_s: float
) -> str:
    training, dataset = report.training, report.dataset
    step = training.resumed_from_step
    facts = {
        "run": code(report.run_id),
        "workload": code(params.workload),
        "code": f"prefect-torch-ddp {text(record.code_version)}",
        "git commit": code(record.git_commit or ""),
        **{name: text(version) for name, version in record.versions.items()},
        "dataset": f"{count(dataset.num_files)} files, {count(dataset.num_bytes)} bytes",
        "dataset digest": code(dataset.digest),
        "dataset location": code(dataset.uri),
        "seed": str(params.seed),
        "world size": f"{training.world_size} ranks",
        "steps": f"{count(training.num_steps)} in {count(training.num_epochs)} epochs",
        "attempts": f"{training.attempt}" + ("" if step is None else f", resumed from step {step}"),
        "training time of the last attempt": duration(training.duration_s),
        "time lost to failures": duration(time_lost_s),
    }
    return fact_table(facts)
