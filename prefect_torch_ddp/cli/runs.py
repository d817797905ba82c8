"""`runs`, `show` and `metrics`: print what a storage holds about its runs."""

import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from prefect_torch_ddp.cli.options import (
    STORAGE,
    RunArgument,
    StorageOption,
    find_run,
    with_its_checkpoint,
)
from prefect_torch_ddp.errors import InvalidParamsError, NewerFormatError

if TYPE_CHECKING:
    from prefect_torch_ddp.records.run_record import RunRecord
    from prefect_torch_ddp.results import LabelledRows

LAST_ROWS = 20


def _checked_by(given: str) -> str:
    # typer's own check speaks of a "Value error".
    if given not in ("step", "record"):
        msg = f"{given} is neither step nor record"
        raise typer.BadParameter(msg)
    return given


def runs(
    storage: StorageOption = STORAGE,
    experiment: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Only its runs, such as train-ddp/nightly/my_workload."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="How many runs to list.")] = 20,
) -> None:
    """List runs, the newest first."""
    from prefect_torch_ddp.records.run_record import list_run_records
    from prefect_torch_ddp.tracking.runs import storage_of

    opened = storage_of(storage)
    records = list_run_records(opened, experiment)
    if not records and experiment is not None and (others := list_run_records(opened)):
        raise InvalidParamsError(no_runs_of(experiment, {each.experiment for each in others}))
    if not records:
        print(f"there is no run in {opened.uri}; choose another storage with --storage")
        return
    head = ("RUN", "STATE", "BEGAN", "TOOK", "RANKS", "STEPS", "SCORE", "WORKLOAD")
    print("\n".join(aligned([head, *map(row, records[:limit])])))
    if len(records) > limit:
        print(f"and {len(records) - limit} more: --limit {len(records)}")


def show(run: RunArgument, storage: StorageOption = STORAGE) -> None:
    """Show a run in ten lines, and where its report is."""
    from prefect_torch_ddp.records.run_record import read_run_record
    from prefect_torch_ddp.results import in_lines
    from prefect_torch_ddp.tracking.runs import storage_of

    opened = storage_of(storage)
    record = read_run_record(opened, find_run(opened, run)).found_in(opened)
    with suppress(NewerFormatError):  # `resume` names the version to install
        record = with_its_checkpoint(opened, record)
    key = f"runs/{record.run_id}/report.html"
    is_there = any(each.key == key for each in opened.list(key))
    print(in_lines(facts(record, f"{opened.uri.rstrip('/')}/{key}" if is_there else "", storage)))


def metrics(
    run: RunArgument,
    storage: StorageOption = STORAGE,
    csv: Annotated[bool, typer.Option("--csv", help="All rows, as CSV.")] = False,
    by: Annotated[
        Literal["step", "record"],
        typer.Option(
            metavar="BY",
            help="step: the mean over the ranks; record: each rank's.",
            parser=_checked_by,
            autocompletion=lambda: ["step", "record"],
        ),
    ] = "step",
    all_attempts: Annotated[
        bool, typer.Option("--all-attempts", help="Also the rows of steps that were repeated.")
    ] = False,
) -> None:
    """Print the metrics of a run.

    A row for each step: the last 20, or all of them as CSV.
    """
    from prefect_torch_ddp.tracking.runs import read_metrics, storage_of

    opened = storage_of(storage)
    frame = read_metrics(opened, find_run(opened, run), all_attempts=all_attempts, by=by)
    if csv:
        frame.to_csv(sys.stdout, index=False)
    elif frame.empty:
        print("no metrics of this run are on record")
    else:
        print(frame.tail(LAST_ROWS).to_string(index=False))


def no_runs_of(experiment: str, others: Iterable[str]) -> str:
    """Return that an experiment has no run, and which experiments have some."""
    from prefect_torch_ddp.refusals import unknown

    names = sorted(others)
    return f"{unknown(experiment, names, 'experiment')} (there are {', '.join(names)})"


def row(record: "RunRecord") -> tuple[str, ...]:
    """Return a run as a row of the list."""
    began = record.began.astimezone()
    return (
        record.run_id,
        record.state,
        f"{began:%Y-%m-%d %H:%M}",
        "" if record.duration_s is None else _duration(record.duration_s),
        str(record.attempts[-1].world_size) if record.attempts else "",
        "" if record.num_steps is None else f"{record.num_steps:,}",
        _score(record),
        record.workload,
    )


def facts(record: "RunRecord", report_uri: str, storage: str) -> "LabelledRows":
    """Return what `show` prints about a run: a name and a text for each fact, "" if unknown."""
    from prefect_torch_ddp.results import count, values_in_words

    tried = count(len(record.attempts), "attempt")
    ranks = count(record.attempts[-1].world_size, "rank") if record.attempts else "no rank yet"
    steps = "" if record.num_steps is None else f"{count(record.num_steps, 'step')} in "
    steps += "" if record.num_epochs is None else f"{count(record.num_epochs, 'epoch')} on "
    code = f", commit {record.commit[:10]}" if record.commit else ""
    code += " with changes" if record.commit and record.is_dirty else ""
    options = ", ".join(f"{name}={value}" for name, value in record.options.items())
    where = "" if storage == STORAGE else f" --storage {quote(storage)}"
    began = f"{record.began.astimezone():%Y-%m-%d %H:%M}"
    model = record.model_uris.get("model") or next(iter(record.model_uris.values()), "")
    return [
        ("run", f"{record.run_id}, {record.state}"),
        ("cause", record.cause),
        ("score", _score(record) if record.evaluation is None else record.evaluation.score),
        ("trained", f"{steps}{ranks}, {tried}" if record.attempts or not record.ended else ""),
        ("began", f"{began}, {_took(record)}"),
        ("workload", f"{record.workload}{code}"),
        ("options", options),
        ("last", values_in_words(record.metrics)),
        ("model", model),
        ("report", report_uri),
        ("in Prefect", f"flow run {record.flow_run_id}" if record.flow_run_id else ""),
        *_next_commands(record, where),
    ]


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines, each column as wide as its longest value."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = (
        "  ".join(value.ljust(width) for value, width in zip(each, widths, strict=True))
        for each in rows
    )
    return [line.rstrip() for line in padded]


def _score(record: "RunRecord") -> str:
    from prefect_torch_ddp.records.score import score_of

    score = score_of(record)
    return "" if score is None else f"{score[0]} {score[1]:.4g}"


def _next_commands(record: "RunRecord", where: str) -> "LabelledRows":
    """Return the commands that suit the state of a run: to watch it, or to continue it."""
    resume = f"prefect-torch-ddp resume {record.run_id}"
    if record.dataset is None:
        resume = ""  # a ddp_task: only a run of train_flow can be repeated from its record
    elif record.is_finished:
        resume += f" -o NAME=VALUE{where}"
    else:
        resume += where
    if record.state == "completed" and not record.is_finished:
        # Its flow still evaluates it, or was killed meanwhile: `resume` asks Prefect.
        return [("if killed", resume)]
    if record.is_over:
        return [("continue", resume if record.continues_from is not None else "")]
    # `resume` refuses a run that still trains. The record of one whose process was killed is the
    # same, and may lack the newest checkpoint.
    watch = f"prefect-torch-ddp metrics {record.run_id}{where}"
    return [("watch", watch), ("if killed", resume)]


def _took(record: "RunRecord") -> str:
    """Return how long a run took, or how long ago it began if it still trains."""
    if record.is_over and record.duration_s is not None:
        return f"took {_duration(record.duration_s)}"
    return f"{_duration((datetime.now(UTC) - record.began).total_seconds())} ago"


def _duration(took_s: float) -> str:
    minutes, seconds = divmod(round(took_s), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds} s" if minutes else f"{took_s:.1f} s"
