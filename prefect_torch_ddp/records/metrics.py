"""Metrics of a run: how a rank writes them, and what is read back: records, epochs, curves."""

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.records.log import RecordLog
from prefect_torch_ddp.records.parts import first_steps, read_parts, record_parts, surviving
from prefect_torch_ddp.results import EpochRow
from prefect_torch_ddp.storage.protocol import Storage

if TYPE_CHECKING:
    import pandas as pd

VALIDATION_PREFIXES = ("validation", "valid_", "val_", "eval_", "test_")

_encode = json.JSONEncoder(allow_nan=False).encode  # json.dumps would make one for each record


class MetricLog(RecordLog):
    """Appends records to `runs/<run_id>/metrics/rank-00000/<attempt>-<part>.jsonl`.

    A record's metrics may be anything that `float()` takes. One that says by `is_ready()` that
    it isn't yet is waited for in the background.
    """

    def __init__(
        self, storage: Storage, run_id: str, rank: int, attempt: int, **options: Any
    ) -> None:
        """Take RecordLog's options first_interval_s and copies."""
        super().__init__(
            storage,
            _folder(run_id),
            rank=rank,
            attempt=attempt,
            what="metric",
            to_line=_line,
            is_ready=_is_ready,
            **options,
        )


def _folder(run_id: str) -> str:
    return f"runs/{run_id}/metrics"


def _is_ready(record: Mapping[str, Any]) -> bool:
    return all(
        isinstance(value, float) or getattr(value, "is_ready", lambda: True)()
        for value in record["metrics"].values()
    )


def _line(record: Mapping[str, Any]) -> str:
    metrics = {name: _json_number(float(value)) for name, value in record["metrics"].items()}
    return _encode({**record, "metrics": metrics}) + "\n"


def _json_number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)  # float() reads the text back


@dataclass(frozen=True)
class Record:
    """What one rank reported at one step."""

    step: int
    epoch: int
    """Counts from 1."""
    rank: int
    attempt: int
    time: float
    """Unix seconds."""
    num_samples: int
    metrics: Mapping[str, float]


def _record(line: dict[str, Any]) -> Record:
    return Record(
        step=int(line["step"]),
        epoch=int(line["epoch"]),
        rank=int(line["rank"]),
        attempt=int(line["attempt"]),
        time=float(line["time"]),
        num_samples=int(line["num_samples"]),
        metrics={str(name): float(value) for name, value in line["metrics"].items()},
    )


def read_records(storage: Storage, run_id: str) -> list[Record]:
    """Read the records that no newer attempt superseded, in order of step and rank."""
    return surviving_records(read_all_records(storage, run_id))


def read_all_records(storage: Storage, run_id: str, known: set[str] | None = None) -> list[Record]:
    """Read every record of every attempt; damaged lines are left out, with a warning.

    Parts whose keys are in `known` were read before and are left out; new ones are added to it.
    """
    known = set() if known is None else known
    new = [part for part in record_parts(storage, _folder(run_id)) if part.key not in known]
    records = list(read_parts(storage, new, _record))
    known.update(part.key for part in new)
    return records


def surviving_records(records: Iterable[Record]) -> list[Record]:
    """Keep what no newer attempt superseded, in order of step and rank."""
    records = list(records)
    return sorted(
        surviving(records, _first_steps(records)),
        key=lambda record: (record.step, record.rank, record.attempt),
    )


def _first_steps(records: Sequence[Record]) -> dict[int, int]:
    # What an attempt reports before its first step bears the step it resumed from, and must not
    # supersede that.
    trained = [record for record in records if record.num_samples > 0]
    return first_steps(records) | first_steps(trained)


def lost_time_s(records: Iterable[Record]) -> float:
    """Return the seconds that failures cost, from the records of all attempts.

    Each costs from the last record that counts to the first one of the next attempt.
    """
    records = list(records)
    lost_s = 0.0
    for attempt, first_step in sorted(_first_steps(records).items())[1:]:
        older = [record for record in records if record.attempt < attempt]
        resumed_at = min(record.time for record in records if record.attempt == attempt)
        began_at = min(record.time for record in older)
        kept = [record.time for record in surviving_records(older) if record.step < first_step]
        lost_s += max(0.0, resumed_at - max(kept, default=began_at))
    return lost_s


def epoch_rows(records: Iterable[Record]) -> tuple[EpochRow, ...]:
    """Average every metric of every epoch over the samples of all ranks."""
    by_epoch: dict[int, list[Record]] = defaultdict(list)
    for record in records:
        by_epoch[record.epoch].append(record)
    return tuple(_epoch_row(epoch, by_epoch[epoch]) for epoch in sorted(by_epoch))


def _epoch_row(epoch: int, records: Sequence[Record]) -> EpochRow:
    having = {
        name: [record for record in records if name in record.metrics]
        for name in metric_names(records)
    }
    # One sample may be in several records (its loss, later its accuracy), so those of one metric
    # are counted. Held-out samples are no training samples, unless there are no others.
    counted = [name for name in having if not is_validation(name)] or list(having)
    sizes = [sum(record.num_samples for record in having[name]) for name in counted]
    return EpochRow(
        epoch=epoch,
        num_steps=len({record.step for record in records}),
        num_samples=max(sizes, default=0),
        metrics={name: _mean(some, name) for name, some in having.items()},
    )


def _mean(records: Sequence[Record], metric: str) -> float:
    # Records without samples count, equally, only where there are no others.
    weighed = [
        (record.metrics[metric], record.num_samples) for record in records if record.num_samples > 0
    ]
    weighed = weighed or [(record.metrics[metric], 1) for record in records]
    # Not fsum, which raises on inf + -inf; a training that diverged has both.
    return sum(value * weight for value, weight in weighed) / sum(weight for _, weight in weighed)


def metric_names(records: Iterable[Record]) -> tuple[str, ...]:
    """Return the names of all metrics, in the order in which they were first reported."""
    return tuple(dict.fromkeys(name for record in records for name in record.metrics))


def is_validation(metric: str) -> bool:
    """Tell by its name whether a metric was measured on held-out data."""
    return metric.lower().startswith(VALIDATION_PREFIXES)


def records_frame(storage: Storage, run_id: str, *, all_attempts: bool = False) -> "pd.DataFrame":
    """Return the records as a pandas DataFrame: a row a record, a column a metric.

    With `all_attempts` also those that a newer attempt superseded.

    Raises:
        InvalidParamsError: pandas isn't installed.
    """
    try:
        import pandas as pd  # noqa: PLC0415 - optional, and heavy
    except ImportError as error:
        msg = (
            "read_metrics returns a pandas DataFrame, and pandas isn't installed: run "
            "`pip install pandas`, or install prefect-torch-ddp with its extra `analysis`"
        )
        raise InvalidParamsError(msg) from error
    plain = ["step", "epoch", "rank", "attempt", "time", "num_samples"]
    records = read_all_records(storage, run_id)
    if all_attempts:
        records.sort(key=lambda record: (record.attempt, record.step, record.rank))
    else:
        records = surviving_records(records)
    columns = {name: [getattr(record, name) for record in records] for name in plain}
    for name in metric_names(records):
        columns.setdefault(name, [record.metrics.get(name, math.nan) for record in records])
    return pd.DataFrame(columns)
