"""All that a report shows of a run, and what it says first: state, best metric, comparison."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from prefect_torch_ddp.records.metric_names import Direction, direction, is_validation
from prefect_torch_ddp.records.run_record import RunRecord
from prefect_torch_ddp.records.timing import TimingLine
from prefect_torch_ddp.results import EpochRow, Goodput, Report, TrainReport
from prefect_torch_ddp.tasks.report.curves import Curves
from prefect_torch_ddp.tasks.report.markdown import code, count, number, percent, short, text
from prefect_torch_ddp.tasks.report.page.checkpoints import KeptCheckpoint
from prefect_torch_ddp.tasks.report.page.ranks import awaited_rank
from prefect_torch_ddp.tasks.report.progress import TrainingProgress

MAX_HEADLINE_METRICS = 3


@dataclass(frozen=True)
class RunView:
    """All that a page shows of a run; what isn't known, or not yet, is empty."""

    record: RunRecord
    training: TrainingProgress
    elapsed_s: float | None = None
    """Since this attempt's task run began."""
    updated_at: str = ""
    """So that a page that stands still shows since when it does."""
    curves: Curves = field(default_factory=Curves)
    picture: str | None = None
    """The curves, a markdown image, if it is there already."""
    checkpoints: Sequence[KeptCheckpoint] = ()
    previous: RunRecord | None = None
    """The run of the same experiment to compare with."""
    epochs: Sequence[EpochRow] = ()
    report: TrainReport | None = None
    """Of train_flow, at its end."""
    ranks: Sequence[TimingLine] = ()
    """The ranks' times, by rank."""
    goodput: Goodput | None = None
    logs: str = ""
    """The folder with all lines of the ranks."""


def headline(view: RunView) -> str:
    """Say its name, its state, and where it is or what was found."""
    training = view.training
    evaluation = "" if view.report is None else _evaluated(view.report.evaluation)
    ending = evaluation or text(training.line.removesuffix(f" · {training.status}"))
    last = view.record.attempts[-1] if view.record.attempts else None
    status: str = training.status
    # Without a step of its own the last attempt on record is an earlier one.
    if last and last.step is not None and training.newest is not None and status == "failed":
        status += f" in step {count(last.step)}"
    name = short(_short_name(view.record.experiment))
    parts = [f"# {name}: {status}", ending, awaited_rank(view.ranks)]
    return " · ".join(filter(None, parts))


def _short_name(experiment: str) -> str:
    """Leave out flow, deployment and package: a long name has no place to break its line.

    A task's name may have its `run_key` after a colon, with any characters in it.
    """
    names, *key = re.split(r":(?!\s)", experiment, maxsplit=1)
    return ":".join([re.split(r"[./]", names)[-1], *key])


def best(view: RunView) -> str:
    """Say the best metric, and how it was in the previous run."""
    name, better = best_metric(view.curves, view.record)
    if not (curve := view.curves.values.get(name)):
        return ""
    if better is None:
        return f"Last {short(name)}: {number(view.curves.last[name])}"
    if is_validation(name) or name == view.record.best_metric:
        step, value = (max if better == "max" else min)(curve, key=lambda point: point[1])
        return f"Best {short(name)}: {number(value)} at step {count(round(step))}"
    last = [value for _, value in curve[-max(1, len(curve) // 20) :]]
    return f"{short(name)}: {number(sum(last) / len(last))}, the mean of its last records"


def comparison(view: RunView) -> str:
    """Say how the run differs from the previous one, in what both have."""
    if (old := view.previous) is None:
        return ""
    name, better = best_metric(view.curves, view.record)
    if view.report is not None and old.evaluation is not None:
        now: Mapping[str, float] = _values(view.report.evaluation)
        then: Mapping[str, float] = _values(old.evaluation)
        names = list(now)[:MAX_HEADLINE_METRICS]
    else:
        now, then, names = view.curves.last, old.metrics, [name]
    parts = []
    for each in names:
        if not (math.isfinite(now.get(each, math.nan)) and math.isfinite(then.get(each, math.nan))):
            continue
        by = now[each] - then[each]
        change = _change(by, better if each == name else direction(each))
        said = "the same" if by == 0 else f"{number(abs(by))} {change}"
        parts.append(f"{short(each)} {number(now[each])} is {said} ({number(then[each])})")
    of_it = f"run {code(old.run_id)} of {old.began:%Y-%m-%d %H:%M}"
    is_origin = view.record.weights_from == old.run_id
    which = f"{of_it}, whose weights it began with" if is_origin else f"the previous {of_it}"
    return f"Compared with {which}: {'; '.join(parts)}" if parts else ""


def best_metric(curves: Curves, record: RunRecord) -> tuple[str, Direction | None]:
    """Return the metric that a training is judged by, and which of its values are better.

    It is the one that checkpoints are kept by. Without one it is the first metric on validation
    data, a score before a loss before one whose name doesn't say; else the first training loss.
    """
    if record.best_metric:
        return record.best_metric, record.best_mode
    found = [name for name in curves.last if is_validation(name)]
    found = sorted(found, key=lambda name: ("max", "min", None).index(direction(name)))
    found += [name for name in curves.last if "loss" in name.lower()]
    return (found[0], direction(found[0])) if found else ("", None)


def _change(by: float, better: Direction | None) -> str:
    if better is None:
        return "higher" if by > 0 else "lower"
    return "better" if (by > 0) == (better == "max") else "worse"


def _values(evaluation: Report) -> dict[str, float]:
    found = {"accuracy": evaluation.accuracy, "loss": evaluation.loss, **evaluation.metrics}
    return {
        name: value
        for name, value in found.items()
        if value is not None
        and not name.startswith(("num_", "non_finite_"))  # neither good nor bad
    }


def _evaluated(evaluation: Report) -> str:
    accuracy = [] if evaluation.accuracy is None else [f"accuracy {percent(evaluation.accuracy)}"]
    loss = [] if evaluation.loss is None else [f"loss {number(evaluation.loss)}"]
    shown = list(evaluation.metrics.items())[:MAX_HEADLINE_METRICS]
    others = [f"{short(name)} {number(value)}" for name, value in shown]
    return ", ".join([*accuracy, *loss, *others, f"{count(evaluation.num_samples)} samples"])
