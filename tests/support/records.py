"""Metric records as rows, which tests compare; the package reads them in columns."""

from collections.abc import Iterable
from dataclasses import astuple, dataclass

from prefect_torch_ddp.records import metrics
from prefect_torch_ddp.storage.protocol import Storage


@dataclass(frozen=True)
class Record:
    """What one rank reported at one step."""

    step: int
    epoch: int
    rank: int
    attempt: int
    time: float
    num_samples: int
    metrics: dict[str, float]


def columns(rows: Iterable[Record]) -> metrics.Records:
    """Make columns of rows."""
    return metrics.records_of((astuple(row)[:-1], row.metrics) for row in rows)


def rows(records: metrics.Records) -> list[Record]:
    """Make rows of columns, in order of step and rank."""
    found = [Record(*row, {}) for row in records.rows.tolist()]
    for name, (numbers, values) in records.metrics.items():
        for number, value in zip(numbers.tolist(), values.tolist(), strict=True):
            found[number].metrics[name] = value
    return sorted(found, key=lambda row: (row.step, row.rank, row.attempt))


def read_records(storage: Storage, run_id: str) -> list[Record]:
    """Read the records that no newer attempt superseded, in order of step and rank."""
    return rows(metrics.surviving_records(metrics.read_all_records(storage, run_id)))
