"""A run that resumed once, as pages show it, and what tests read off a page."""

import inspect
import math
import re
import textwrap
from datetime import UTC, datetime, timedelta
from typing import Any

from prefect_torch_ddp.protocol.events import Progress
from prefect_torch_ddp.records.run_record import RunRecord
from prefect_torch_ddp.results import ClassScore, Report, TrainReport
from prefect_torch_ddp.tasks.report.curves import Curves
from prefect_torch_ddp.tasks.report.page.headline import RunView
from prefect_torch_ddp.tasks.report.page.sections import render_page
from prefect_torch_ddp.tasks.report.progress import TrainingProgress

RUN = "calm-otter-12345678"
BEGAN = datetime(2026, 11, 22, 2, tzinfo=UTC)
DATASET = {"dataset_id": "d", "uri": "s3://bucket/data/d", "num_files": 3, "num_bytes": 1_234_567}
DATASET |= {"digest": "9f2c"}
FIRST = {"attempt": 1, "world_size": 4, "hosts": ("a", "a", "b", "b"), "step": 12, "began": BEGAN}
FIRST |= {"ended": BEGAN + timedelta(seconds=90), "cause": "ValueError: [boom]"}
RECORD = RunRecord(
    run_id=RUN,
    experiment="train-ddp/nightly/flows.digits",
    workload="digits",
    began=BEGAN,
    storage="s3://bucket",
    seed=17,
    commit="abc123",
    is_dirty=True,
    versions={"python": "3.11.7", "prefect-torch-ddp": "0.1.0", "torch": "2.15.0"},
    dataset=DATASET,
    split={"train": 1437, "val": 360},
    attempts=(FIRST, {"attempt": 2, "world_size": 2, "began": BEGAN}),
)
HOSTILE = "a|b `c` <script>alert(1)</script> **d** [e](http://f)\n# g __h__ ~~i~~ \\"
LAST = {
    "step": 400,
    "attempt": 2,
    "uri": "s3://bucket/runs/r/checkpoints/step-00000400/000002/manifest.json",
    "metrics": {"acc": 0.5},
}
TRAINING = {"run_id": RUN, "attempt": 2, "world_size": 4, "num_steps": 400, "num_epochs": 10}
TRAINING |= {"duration_s": 200.4, "value": {}, "resumed_from_step": 200, "last_checkpoint": LAST}
EPOCH = {"num_steps": 40, "num_samples": 1280}
EPOCHS = (
    {"epoch": 1, "metrics": {"loss": 0.123456, "validation_accuracy": 0.5}, **EPOCH},
    {"epoch": 2, "metrics": {"loss": math.nan}, **EPOCH},
)
MODEL = {"model": "s3://bucket/runs/r/model.pt"}


def evaluation(names=("cat", "dog"), matrix=((3, 1), (0, 4)), **more) -> Report:
    """Make an evaluation, by default of two classes."""
    score = {"precision": 1.0, "recall": 0.75, "f1": 0.857142, "support": 4}
    scores = tuple(ClassScore(name=name, **score) for name in names)
    values = {"num_samples": 8, "accuracy": 0.875, "loss": 0.25, **more}
    return Report(classes=scores, confusion_matrix=matrix, **values)


def report(model_uris=MODEL, **changes) -> TrainReport:
    """Make the report of the run."""
    values = {"run_id": RUN, "flow_run_url": None, "dataset": DATASET, "epochs": EPOCHS}
    values |= {"training": TRAINING | {"model_uris": model_uris}, "checkpoint": LAST}
    return TrainReport.model_validate({**values, "evaluation": evaluation(), **changes})


def page_of(training=None, record=RECORD, **more) -> str:
    """Render a page: of the training, or of the finished run whose report is given."""
    status = "finished" if "train_report" in more else "training"
    return render_page(RunView(record, training or TrainingProgress(4, status=status), **more))


def hostile_view(evil: str, **changes) -> RunView:
    """Make the page of a failed run in which everything that users and ranks write is hostile."""
    record = RECORD.model_copy(
        update={
            **dict.fromkeys(["run_id", "experiment", "workload", "cause", "commit"], evil),
            "flow_run_id": evil,
            "options": {evil: evil},
            "versions": {evil: evil},
            "model_uris": {evil: f"s3://bucket/{evil}"},
            "attempts": (RECORD.attempts[0].model_copy(update={"cause": evil, "hosts": (evil,)}),),
        }
    )
    shown = TrainingProgress(
        status="failed",
        cause=f"```\n{evil}\n</code></pre><script>alert(1)</script>\n~~~\n" * 3,
        newest=Progress(9, 1, 10, trouble=evil),
        metrics={evil: 1.0},
    )
    curves = Curves({evil: [(1, 1.0), (5, 3.0), (9, 2.0)]}, holes={evil: 1}, last={evil: 2.0})
    old = record.model_copy(update={"metrics": {evil: 1.0}, "state": "completed"})
    view = {"record": record, "training": shown, "curves": curves}
    view |= {"logs": f"s3://bucket/{evil}", "previous": old, "earlier": [old]}
    return RunView(**(view | changes))


def metric_curves(**values) -> Curves:
    """Make curves of some values at the steps from 1."""
    last = {name: each[-1] for name, each in values.items()}
    curves = {name: list(enumerate(each, start=1)) for name, each in values.items()}
    return Curves(curves, last=last)


def tables(markdown: str) -> list[list[list[str]]]:
    """Find all tables, as rows of cells; the second row is the rule."""
    found: list[list[list[str]]] = [[]]
    for row in markdown.splitlines():
        if row.startswith("|"):
            # At the bars that aren't escaped.
            found[-1].append([cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]])
        elif found[-1]:
            found.append([])
    return [rows for rows in found if rows]


def without_code(markdown: str) -> str:
    """Leave out what is shown as it is: code, and our own picture."""
    outside = re.sub(r"^(```+).*?^\1$", "", markdown, flags=re.DOTALL | re.MULTILINE)
    outside = re.sub(r"(?<![`\\])(`+)(?!`).*?(?<!`)\1(?!`)", "", outside)
    return re.sub(r"!\[[\w ]+\]\(data:image/svg\+xml;base64,[\w+/=]+\)", "", outside)


def example_of(value: Any) -> str:
    """Return the program in a docstring; empty if there is none."""
    _, _, example = str(inspect.getdoc(value)).partition("\nExample:\n")
    own = re.split(r"^(?=\S)", example, maxsplit=1, flags=re.MULTILINE)[0]
    lines = [line for line in own.splitlines() if not line.strip() or line.startswith(" " * 8)]
    return textwrap.dedent("\n".join(lines))
