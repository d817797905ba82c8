"""The page of a sweep: its trials in a table, best first, and their curves together."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prefect_torch_ddp.records.run_record import RunRecord, flat
from prefect_torch_ddp.tasks.report.curves import Curve
from prefect_torch_ddp.tasks.report.markdown import (
    count,
    duration,
    join,
    middle_cut,
    number,
    short,
    table,
)
from prefect_torch_ddp.tasks.report.page.links import Links
from prefect_torch_ddp.tasks.report.page.plot import COLOURS, render_together

MAX_ROWS = 200
MAX_COLUMNS = 6
"""Of the arguments that differ, and the seed."""
MAX_NAMES = 10
"""Of those that have no column."""
MAX_LABEL = 26


@dataclass(frozen=True)
class Trial:
    """One call of a sweep."""

    record: RunRecord
    score: float
    """Infinite if it has none."""
    curves: Mapping[str, Curve]
    """By metric."""


def render_sweep(name: str, trials: Sequence[Trial], metric: str, links: Links) -> str:
    """Lay out a sweep.

    Args:
        name: of the task.
        trials: at least one; best first, those without a score last.
        metric: by which they are compared.
        links: where the rows lead.
    """
    names = _varied(trials)
    varied, more = names[:MAX_COLUMNS], names[MAX_COLUMNS:]
    ended = sum(trial.record.state == "completed" for trial in trials)
    kept = f'`resume_from="{trials[0].record.run_id}"` continues it.'
    best = best_of(trials, metric)
    return join(
        f"# Sweep of {short(name)}",
        f"{best}. {kept} {count(ended)} of {count(len(trials))} calls were completed.",
        _curves(trials, varied, metric),
        _table(trials, varied, metric, links),
        f"{count(len(trials) - MAX_ROWS)} more aren't shown." if len(trials) > MAX_ROWS else "",
        _left_out(more),
    )


def best_of(trials: Sequence[Trial], metric: str) -> str:
    """Say in a line which of the trials is the best; see `render_sweep`."""
    given = _given(trials[0])
    chosen = ", ".join(
        f"{short(each)} {_cell(given, each)}" for each in _varied(trials)[:MAX_COLUMNS]
    )
    score = f"Best: {short(metric)} {number(trials[0].score)}"
    return f"{score} with {chosen}" if chosen else score


def _table(trials: Sequence[Trial], varied: Sequence[str], metric: str, links: Links) -> str:
    rows = []
    for trial in trials[:MAX_ROWS]:
        record, given = trial.record, _given(trial)
        took = "" if record.duration_s is None else duration(record.duration_s)
        cause = f": {short(record.cause)}" if record.cause else ""
        rows.append(
            [
                *(_cell(given, each) for each in varied),
                number(trial.score) if math.isfinite(trial.score) else "",
                f"{record.state}{cause}",
                "" if record.num_steps is None else count(record.num_steps),
                took,
                links.run(record),
            ]
        )
    header = [*map(short, varied), short(metric), "state", "steps", "took", "run"]
    return table(header, rows, align="r" * (len(varied) + 1) + "lrrl")


def _curves(trials: Sequence[Trial], varied: Sequence[str], metric: str) -> str:
    """Draw the metric, and the first loss besides; the best trials in colours with names."""
    losses = [each for each in trials[0].curves if "loss" in each.lower() and each != metric]
    images = []
    for name in (metric, *losses[:1]):
        having = [trial for trial in trials if trial.curves.get(name)]
        top: dict[str, Curve] = {}
        for trial in having[: len(COLOURS)]:
            label = _label(trial, varied)
            # Two calls may have been given the same.
            top[label if label not in top else _label(trial, ())] = trial.curves[name]
        others = [trial.curves[name] for trial in having[len(COLOURS) : MAX_ROWS]]
        images.append(render_together(name, top, others))
    return "\n".join(filter(None, images))


def _label(trial: Trial, varied: Sequence[str]) -> str:
    given = _given(trial)
    words = ", ".join(f"{each} {given.get(each, '')}" for each in varied)
    # Of trials that differ in nothing, the id does.
    return middle_cut(words, MAX_LABEL) if words else trial.record.run_id[-MAX_LABEL:]


def _given(trial: Trial) -> Mapping[str, object]:
    record = trial.record
    return dict(flat({"seed": record.seed, **record.options, **record.arguments}))


def _varied(trials: Sequence[Trial]) -> list[str]:
    """Return the names of what was given to some trials and not, or not so, to others."""
    values: dict[str, set[str]] = {}
    for trial in trials:
        for name in _given(trial):
            values.setdefault(name, set())
    for trial in trials:
        given = _given(trial)
        for name, seen in values.items():
            seen.add(repr(given.get(name)))
    return [name for name, seen in values.items() if len(seen) > 1]


def _left_out(names: Sequence[str]) -> str:
    if not names:
        return ""
    shown = ", ".join(map(short, names[:MAX_NAMES])) + (" ..." if len(names) > MAX_NAMES else "")
    return f"{count(len(names))} more arguments differ: {shown}."


def _cell(given: Mapping[str, object], name: str) -> str:
    value = given.get(name, "")
    return number(value) if isinstance(value, float) else short(value)
