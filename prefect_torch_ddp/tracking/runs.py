"""Reading from Python what a run left in its storage, while it trains and later."""

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from prefect_torch_ddp.checkpoint import attempts
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.lazy import exported_by
from prefect_torch_ddp.records import ledger, saved_files, timing
from prefect_torch_ddp.records.metrics import import_pandas, records_frame
from prefect_torch_ddp.records.run_record import (
    RunRecord,
    flat,
    list_run_records,
    read_run_record,
    run_ids,
)
from prefect_torch_ddp.results import Goodput, LedgerReport
from prefect_torch_ddp.storage.locate import storage_at
from prefect_torch_ddp.storage.protocol import Storage

if TYPE_CHECKING:
    import pandas as pd

GIVEN = ("parameters", "options", "data_options", "arguments", "versions", "split")
CODE = ("experiment", "workload", "seed", "commit", "is_dirty")
DATA = ("dataset_id", "digest", "num_files")
RESULTS = "results"


@exported_by("prefect_torch_ddp")
def read_metrics(
    storage: Storage | str | Path,
    run_id: str,
    *,
    by: Literal["record", "step"] = "record",
    all_attempts: bool = False,
) -> "pd.DataFrame":
    """Return a run's metrics as a pandas DataFrame: a row per record or step, a column per metric.

    The columns before the metrics are step, epoch (from 1), rank, attempt, time (a timestamp in
    UTC) and num_samples. While the run trains, a new record can be read after 1 to 30 seconds; in
    a long attempt, after a 64th of its age, at most five minutes.

    Args:
        storage: where the run is: a directory, `s3://bucket/prefix` with AWS's own chain of
            credentials, a Prefect block such as `s3-bucket/name`, or a Storage.
        run_id: the name of its folder below `runs`.
        by: `record`: a row is a record of one rank. `step`: a row has the records of all ranks at
            a step, without the column rank. A metric is then the mean over the ranks, weighted by
            their samples; in validation metrics, all have equal weights. The first or last word of
            such a name is val, valid, validation, eval, evaluation, test or holdout, or the first
            is dev: `val_loss`, but not `value_loss`. num_samples is the sum over the ranks, and
            time is the latest.
        all_attempts: include superseded records: those that earlier attempts made of the step at
            which a later attempt began, and of the steps after it. Each attempt repeats what your
            code reports before its step is known, such as before `ctx.track`. Without
            `all_attempts`, only one attempt's are included: those of the first attempt that has
            records after them; until there is one, those of the newest attempt.

    Raises:
        InvalidParamsError: there is no such run, `by` is invalid, or pandas isn't installed.
        StorageError: the storage can't be read.

    Example:
        The mean loss of each epoch:

            from prefect_torch_ddp import read_metrics

            metrics = read_metrics("runs", run_id)
            metrics.groupby("epoch").loss.mean()
    """
    if by not in ("record", "step"):
        msg = f"read_metrics has by={by!r}; give 'record' or 'step'"
        raise InvalidParamsError(msg)
    where = storage_of(storage)
    frame = records_frame(where, run_id, all_attempts=all_attempts, by_step=by == "step")
    if frame.empty:
        _refuse_unknown(where, run_id)
    return frame


@exported_by("prefect_torch_ddp")
def read_ledger(storage: Storage | str | Path, run_id: str) -> LedgerReport:
    """Check the ledger of a run: the samples of each epoch, over all its attempts.

    From the step at which a later attempt began, the steps of earlier attempts don't count. The
    check needs one byte of memory for each sample and epoch.

    Args:
        storage: where the run is, as for `read_metrics`.
        run_id: the name of its folder below `runs`.

    Raises:
        InvalidParamsError: there is no such run.
        StorageError: the storage can't be read.

    Example:
        Was each sample used once in each epoch?

            from prefect_torch_ddp import read_ledger

            print(read_ledger("runs", run_id).is_clean)
    """
    where = storage_of(storage)
    found = ledger.read_ledger(where, run_id)
    if not found.epochs:
        _refuse_unknown(where, run_id)
    return found


@exported_by("prefect_torch_ddp")
def read_goodput(storage: Storage | str | Path, run_id: str) -> Goodput:
    """Return where the wall time of a run's training went, over all its attempts.

    While the run trains, the numbers lag: ranks write them at each checkpoint, and after 1, 2, 4
    ... 30 seconds; in a long attempt, after a 64th of its age, at most five minutes. The clocks of
    the machines have to agree.

    Args:
        storage: where the run is, as for `read_metrics`.
        run_id: the name of its folder below `runs`.

    Raises:
        InvalidParamsError: there is no such run.
        StorageError: the storage can't be read.

    Example:
        How much of a night was lost to failures:

            from prefect_torch_ddp import read_goodput

            goodput = read_goodput("runs", run_id)
            print(goodput.redone_s + goodput.queueing_s, "of", goodput.wall_s, "s")
    """
    where = storage_of(storage)
    found = goodput_so_far(where, run_id)
    if not found.num_attempts:
        _refuse_unknown(where, run_id)
    return found


def goodput_so_far(where: Storage, run_id: str) -> Goodput:
    """Return the same for a run that may have written nothing yet."""
    failed = {record.attempt: record.time for record in attempts.read_failures(where, run_id)}
    return timing.read_goodput(where, run_id, attempts.claim_times(where, run_id), failed)


@exported_by("prefect_torch_ddp")
def list_runs(storage: Storage | str | Path, experiment: str | None = None) -> "pd.DataFrame":
    """Return all runs of a storage as a pandas DataFrame: a row each, newest first.

    Columns: run_id, experiment, workload, state (training, completed, failed or cancelled), began,
    duration_s, attempts, world_size, steps, epochs, goodput (a share), core_hours, gpu_hours,
    best_metric and best_value, accuracy, loss and other metrics of the evaluation,
    `train.<metric>` with the last value of each metric that the training reported, commit,
    is_dirty, model_uri, cause. A metric of the evaluation that is named like one of these, such as
    steps, is in `metric.steps`. A run whose process was killed stays at `training`, without a
    duration, until a retry continues it. Use `began` and Prefect's flow run to tell it from a run
    that trains. A damaged record is left out, with a warning.

    Args:
        storage: where the runs are, as for `read_metrics`.
        experiment: return only the runs of this experiment, e.g.
            `train-ddp/nightly/flows.land_use`.

    Raises:
        InvalidParamsError: pandas isn't installed.
        StorageError: the storage can't be read.

    Example:
        The best accuracy of each experiment:

            from prefect_torch_ddp import list_runs

            runs = list_runs("runs")
            runs[runs.state == "completed"].groupby("experiment").accuracy.max()
    """
    pd = import_pandas("list_runs")
    opened = storage_of(storage)
    rows = [_row(record.found_in(opened)) for record in list_run_records(opened, experiment)]
    # What every run has is there, also where there is none.
    now = datetime.now(UTC)
    blank = RunRecord(run_id="", experiment="", workload="", began=now, storage="")
    columns = dict.fromkeys(name for row in rows or [_row(blank)] for name in row)
    return pd.DataFrame(rows, columns=list(columns))


@exported_by("prefect_torch_ddp")
def compare_runs(storage: Storage | str | Path, a: str, b: str) -> "pd.DataFrame":
    """Return the differences between two runs, and their results, as a pandas DataFrame.

    There is a column for each run, named by its id. There is a row for each parameter, option,
    argument, version, commit and property of the data that differs, and then one for each result.
    The index has the levels `what`, such as "options", and `name`.

    Args:
        storage: where both runs are, as for `read_metrics`.
        a: id of the first run.
        b: id of the second run.

    Raises:
        InvalidParamsError: there is no such run, the two are the same, or pandas isn't installed.
        StorageError: the storage can't be read.

    Example:
        What differs between the last two runs:

            from prefect_torch_ddp import compare_runs, list_runs

            newest, before = list_runs("runs").run_id[:2]
            print(compare_runs("runs", before, newest))
    """
    pd, where = import_pandas("compare_runs"), storage_of(storage)
    if a == b:
        msg = f"compare_runs was given {a!r} twice; give two runs"
        raise InvalidParamsError(msg)
    first, second = (dict(_facts(read_run_record(where, run))) for run in (a, b))
    names = dict.fromkeys([*first, *second])
    rows = {
        name: (first.get(name), second.get(name))
        for name in sorted(names, key=lambda name: name[0] == RESULTS)
        if name[0] == RESULTS or first.get(name) != second.get(name)
    }
    index = pd.MultiIndex.from_tuples(rows, names=["what", "name"])
    return pd.DataFrame(list(rows.values()), index, [a, b], dtype=object)


@exported_by("prefect_torch_ddp")
def read_result(
    storage: Storage | str | Path, run_id: str, path: str, *, evaluated_step: int | None = None
) -> bytes:
    """Return a file that `ctx.save(path, data)` wrote, as the newest attempt left it.

    It can be read while the run trains. What `evaluate_flow` saves is kept apart: it replaces no
    file of the run.

    Args:
        storage: where the run is, as for `read_metrics`.
        run_id: the name of its folder below `runs`.
        path: the path that was passed to `ctx.save`.
        evaluated_step: the step of a checkpoint that `evaluate_flow` evaluated: then the file that
            this evaluation saved, or the newest one of that step. None: a file of the run.

    Raises:
        BadKeyError: the path leads outside of the results.
        ObjectNotFoundError: nobody saved it. The message names the files that exist.
        StorageError: the storage can't be read.

    Example:
        A file that rank 0 wrote by `ctx.save("predictions.csv", data)`:

            from prefect_torch_ddp import read_result

            print(read_result("runs", run_id, "predictions.csv").decode())
    """
    return saved_files.read_result(storage_of(storage), run_id, path, evaluated_step)


def _refuse_unknown(where: Storage, run_id: str) -> None:
    # One that failed before it wrote a file there has only a record.
    if next(iter(where.list(f"runs/{run_id}/")), None) is None and run_id not in run_ids(where):
        folder = f"{where.uri.rstrip('/')}/runs"
        msg = f"{where.uri} holds no run {run_id!r}; a run's id is its folder's name below {folder}"
        raise InvalidParamsError(msg)


def storage_of(storage: Storage | str | Path) -> Storage:
    """Return what a path, a URI or a Prefect block names; see `read_metrics`."""
    if isinstance(storage, str) and re.fullmatch(r"[a-z0-9-]+/[^/]+", storage):
        # Loads Prefect, which no other form needs.
        from prefect_torch_ddp.blocks import resolve_storage  # noqa: PLC0415

        return resolve_storage(storage)
    return storage_at(storage)


_FIRST_COLUMNS = ("run_id", "experiment", "workload", "state", "began")
_LAST_COLUMNS = ("commit", "is_dirty", "model_uri", "cause")


def _row(record: RunRecord) -> dict[str, Any]:
    model_uris = list(record.model_uris.values())
    return {
        **{name: getattr(record, name) for name in _FIRST_COLUMNS},
        **_results(record),
        "commit": record.commit,
        "is_dirty": record.is_dirty,
        "model_uri": record.model_uris.get("model", next(iter(model_uris), None)),
        "cause": record.cause,
    }


def _results(record: RunRecord) -> dict[str, Any]:
    found, goodput = record.evaluation, record.goodput
    values: dict[str, Any] = {
        "duration_s": record.duration_s,
        "attempts": len(record.attempts),
        "world_size": record.attempts[-1].world_size if record.attempts else None,
        "steps": record.num_steps,
        "epochs": record.num_epochs,
        "goodput": goodput.share if goodput else None,
        "core_hours": goodput.core_hours if goodput else None,
        "gpu_hours": goodput.gpu_hours if goodput else None,
        "best_metric": record.best_metric,
        "best_value": record.best_value,
        "accuracy": found.accuracy if found else None,
        "loss": found.loss if found else None,
    }
    # What was trained with has names like what was evaluated: a prefix tells them apart.
    trained = {f"train.{name}": value for name, value in record.metrics.items()}
    taken = {*values, *_FIRST_COLUMNS, *_LAST_COLUMNS}
    scores = found.metrics if found else {}
    scores = {f"metric.{each}" if each in taken else each: scores[each] for each in scores}
    return {**values, **scores, **trained}


def _facts(record: RunRecord) -> Iterator[tuple[tuple[str, str], Any]]:
    """Yield the values by which two runs are compared, each under its group and name."""
    fields = record.json_fields()
    for name in CODE:
        yield ("code" if name in ("commit", "is_dirty") else "run", name), fields[name]
    for name in DATA:
        yield ("data", name), (fields["dataset"] or {}).get(name)
    for what in GIVEN:
        for name, value in flat(fields[what]):
            yield (what, name), value
    for name, value in {"state": record.state, **_results(record)}.items():
        yield (RESULTS, name), value
