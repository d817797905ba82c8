"""Run records as pandas DataFrames: all runs, a row each, and what two of them differ in."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.records.metrics import import_pandas
from prefect_torch_ddp.records.run_record import RunRecord, flat, list_records, read_record
from prefect_torch_ddp.storage.protocol import Storage

if TYPE_CHECKING:
    import pandas as pd

GIVEN = ("parameters", "options", "data_options", "arguments", "versions", "split")
CODE = ("experiment", "workload", "seed", "commit", "is_dirty")
DATA = ("dataset_id", "digest", "num_files")
RESULTS = "results"


def runs_frame(storage: Storage, experiment: str | None = None) -> "pd.DataFrame":
    """Return a row for each run, newest first; see `tasks.reading.list_runs`."""
    pd = import_pandas("list_runs")
    rows = [_row(record) for record in list_records(storage, experiment)]
    columns = dict.fromkeys(name for row in rows for name in row) or ["run_id", "experiment"]
    return pd.DataFrame(rows, columns=list(columns))


def differences_frame(storage: Storage, a: str, b: str) -> "pd.DataFrame":
    """Return what two runs differ in, and their results; see `tasks.reading.compare_runs`."""
    pd = import_pandas("compare_runs")
    if a == b:
        msg = f"compare_runs was given {a!r} twice; give two runs"
        raise InvalidParamsError(msg)
    first, second = (dict(_facts(read_record(storage, run))) for run in (a, b))
    names = dict.fromkeys([*first, *second])
    rows = {
        name: (first.get(name), second.get(name))
        for name in sorted(names, key=lambda name: name[0] == RESULTS)
        if name[0] == RESULTS or first.get(name) != second.get(name)
    }
    index = pd.MultiIndex.from_tuples(rows, names=["what", "name"])
    return pd.DataFrame(list(rows.values()), index, [a, b], dtype=object)


def _row(record: RunRecord) -> dict[str, Any]:
    model_uris = list(record.model_uris.values())
    return {
        "run_id": record.run_id,
        "experiment": record.experiment,
        "workload": record.workload,
        "state": record.state,
        "began": record.began,
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
        "best_metric": record.best_metric,
        "best_value": record.best_value,
        "accuracy": found.accuracy if found else None,
        "loss": found.loss if found else None,
    }
    # What was trained with has names like what was evaluated: a prefix tells them apart.
    trained = {f"train.{name}": value for name, value in record.metrics.items()}
    return {**values, **(found.metrics if found else {}), **trained}


def _facts(record: RunRecord) -> Iterator[tuple[tuple[str, str], Any]]:
    """Yield all that two runs are compared by, under what it is of and its name."""
    plain = record.model_dump(mode="json")
    for name in CODE:
        yield ("code" if name in ("commit", "is_dirty") else "run", name), plain[name]
    for name in DATA:
        yield ("data", name), (plain["dataset"] or {}).get(name)
    for what in GIVEN:
        for name, value in flat(plain[what]):
            yield (what, name), value
    for name, value in {"state": record.state, **_results(record)}.items():
        yield (RESULTS, name), value
