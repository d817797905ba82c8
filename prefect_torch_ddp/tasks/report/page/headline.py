"""All that a report shows of a run, and what it says first: state, cause, what to do."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from prefect_torch_ddp.records.run_record import RunRecord
from prefect_torch_ddp.records.timing import TimingLine
from prefect_torch_ddp.results import EpochRow, Goodput, Report, TrainReport
from prefect_torch_ddp.tasks.report.curves import Curves
from prefect_torch_ddp.tasks.report.markdown import (
    code_block,
    count,
    number,
    percent,
    short,
    text,
)
from prefect_torch_ddp.tasks.report.page.checkpoints import KeptCheckpoint
from prefect_torch_ddp.tasks.report.page.links import Links
from prefect_torch_ddp.tasks.report.page.ranks import awaited_rank
from prefect_torch_ddp.tasks.report.progress import TrainingProgress

MAX_HEADLINE_METRICS = 3
MAX_CAUSE = 2_000


@dataclass(frozen=True)
class RunView:
    """All that a page shows of a run; what isn't known, or not yet, is empty."""

    record: RunRecord
    training: TrainingProgress
    elapsed_s: float | None = None
    """Since this attempt's task run began."""
    dashboard: str = ""
    """The URL of the Dask cluster's; empty if it has none."""
    dashboard_tunnel: str = ""
    """The command that forwards its port to another machine; empty if none is needed."""
    updated_at: str = ""
    """So that a page that stands still shows since when it does."""
    is_tried_again: bool = False
    """Whether Prefect retries what has failed."""
    curves: Curves = field(default_factory=Curves)
    picture: str | None = None
    """The curves, markdown images, if they are there already."""
    checkpoints: Sequence[KeptCheckpoint] = ()
    previous: RunRecord | None = None
    """The run of the same experiment to compare with."""
    earlier: Sequence[RunRecord] = ()
    """The experiment's newest other runs, newest first."""
    epochs: Sequence[EpochRow] = ()
    without_epochs: str = ""
    """Why these are left out."""
    train_report: TrainReport | None = None
    """Of train_flow, at its end."""
    ranks: Sequence[TimingLine] = ()
    """The ranks' times, by rank."""
    goodput: Goodput | None = None
    logs: str = ""
    """The folder with all lines of the ranks."""
    links: Links = field(default_factory=Links)


def headline(view: RunView) -> str:
    """Say its name and its state, in a line."""
    training = view.training
    last = view.record.attempts[-1] if view.record.attempts else None
    status: str = training.status
    if _has_trained(view):
        status += " after the training"
    elif view.record.is_of_flow and last is None and status != "training":
        status += " before the training"
    # Without a step of its own the last attempt on record is an earlier one.
    elif last and last.step is not None and training.newest is not None and status == "failed":
        status += f" in step {count(last.step)}"
    return f"# {short(_short_name(view.record.experiment))}: {status}"


def standing(view: RunView) -> str:
    """Say where the training is, or what was found; below the headline."""
    training = view.training
    found = "" if view.train_report is None else _evaluated(view.train_report.evaluation)
    found = found or text(training.line.removesuffix(f" · {training.status}"))
    slow = awaited_rank(view.ranks, has_ended=training.status != "training")
    return " · ".join(filter(None, [found, slow]))


def about(view: RunView) -> str:
    """Say in a line its score or where it is, its state, and which run a page is of."""
    parts = standing(view), view.training.status, f"run {view.record.run_id}"
    return " · ".join(filter(None, parts))


def cause(view: RunView) -> str:
    """Show why it failed or was cancelled, as it is."""
    said = view.training.cause
    said = said if len(said) <= MAX_CAUSE else f"{said[:MAX_CAUSE]} ..."
    return f"**Cause**\n\n{code_block(said, 'text')}" if said else ""


def advice(view: RunView) -> str:
    """Say what to do about a run that has failed or was cancelled."""
    if view.training.status not in ("failed", "cancelled"):
        return ""
    saved, title = view.record.checkpoint, "**What to do**"
    origin = view.record.continues_from
    step = "" if saved is None else f"step {count(saved.step)}"
    if view.is_tried_again:
        where = step or ("the beginning" if origin is None else "where it began")
        return f"{title}: nothing yet, Prefect tries it again, from {where}."
    if origin is None:
        says = "run it again. It begins from the start, since there is no checkpoint."
        return f"{title}: {says if not view.training.cause else f'remove the cause and {says}'}"
    first = "remove the cause, then run it" if view.training.status == "failed" else "run it"
    line = code_block(resume_line(view.record))
    then = f"continue after {step}" if step else "begin where it began"
    if _has_trained(view):
        then = "evaluate the model without training it again"
    says = f"{first} with this parameter, to {then}:"
    return f"{title}: {says}\n\n{line}"


def _has_trained(view: RunView) -> bool:
    """Tell whether what ended it came after the training."""
    return view.record.has_trained and view.training.status in ("failed", "cancelled")


def resume_line(record: RunRecord) -> str:
    """Return the parameter that continues a run, to be copied."""
    return f'resume_from="{record.continues_from}"'


def _short_name(experiment: str) -> str:
    """Leave out flow, deployment and package: a long name has no place to break its line.

    A task's name may have its `run_key` after a colon, with any characters in it.
    """
    names, *key = re.split(r":(?!\s)", experiment, maxsplit=1)
    return ":".join([re.split(r"[./]", names)[-1], *key])


def _evaluated(evaluation: Report) -> str:
    accuracy = [] if evaluation.accuracy is None else [f"accuracy {percent(evaluation.accuracy)}"]
    loss = [] if evaluation.loss is None else [f"loss {number(evaluation.loss)}"]
    scores = list(evaluation.scores.items())[len(accuracy) + len(loss) :]
    others = [f"{short(name)} {number(value)}" for name, value in scores[:MAX_HEADLINE_METRICS]]
    return ", ".join([*accuracy, *loss, *others, f"{count(evaluation.num_samples)} samples"])
