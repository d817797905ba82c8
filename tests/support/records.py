"""Metric records as rows, which tests compare; the package reads them in columns."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter

import pytest

from prefect_torch_ddp import Goodput
from prefect_torch_ddp.errors import ObjectNotFoundError
from prefect_torch_ddp.records import metrics
from prefect_torch_ddp.storage.names import check_key
from prefect_torch_ddp.storage.protocol import Storage, StoredObject


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


_fields_but_metrics = attrgetter("step", "epoch", "rank", "attempt", "time", "num_samples")


def record(step, rank=0, attempt=1, *, epoch=1, num_samples=1, **metrics) -> Record:
    """Make one rank's record of one step."""
    return Record(step, epoch, rank, attempt, float(step), num_samples, metrics)


@dataclass(frozen=True)
class Shelf(Storage):
    """A storage in memory, as far as a reader, or a report, needs one."""

    objects: dict[str, bytes] = field(default_factory=dict, repr=False)
    uri: str = "s3://bucket/prefix"
    secret_key: str = field(default="hunter2-do-not-show", repr=False)

    def list(self, prefix: str = "") -> Iterator[StoredObject]:
        """Yield what is there, in key order."""
        for key in sorted(self.objects):
            if key.startswith(prefix):
                yield StoredObject(key, len(self.objects[key]))

    def read(self, key: str) -> bytes:
        if check_key(key) not in self.objects:
            msg = f"there is no {key} in {self.uri}"
            raise ObjectNotFoundError(msg)
        return self.objects[key]

    def write(self, key: str, data: bytes | memoryview) -> None:
        self.objects[key] = bytes(data)

    def write_if_absent(self, key: str, data: bytes) -> bool:
        return self.objects.setdefault(key, data) is data

    def delete(self, key: str) -> None:
        self.objects.pop(key, None)


def columns(rows: Iterable[Record]) -> metrics.Records:
    """Make columns of rows."""
    return metrics.records_of((_fields_but_metrics(row), row.metrics) for row in rows)


def rows(records: metrics.Records) -> list[Record]:
    """Make rows of columns, in order of step and rank."""
    found = [Record(*row, {}) for row in records.rows.tolist()]
    for name, (numbers, values) in records.metrics.items():
        for number, value in zip(numbers.tolist(), values.tolist(), strict=True):
            found[number].metrics[name] = value
    return sorted(found, key=lambda row: (row.step, row.rank, row.attempt))


def read_records(storage: Storage, run_id: str) -> list[Record]:
    """Read the records that no newer attempt superseded, in order of step and rank."""
    return rows(metrics.surviving_records(metrics.read_new_records(storage, run_id, set())))


def assert_adds_up(goodput: Goodput, *, num_attempts: int, at_most_s: float) -> None:
    """Check that its parts are the wall time, which is within what the test took."""
    assert goodput.num_attempts == num_attempts
    parts = goodput.model_dump(exclude={"run_id", "num_attempts", "wall_s"})
    assert min(parts.values()) >= 0.0, parts
    assert sum(parts.values()) == pytest.approx(goodput.wall_s, rel=0.02), parts
    assert 0.0 < goodput.steps_s < goodput.wall_s <= at_most_s


def read_all_records(storage: Storage, run_id: str) -> metrics.Records:
    """Read what was reported in all attempts; damaged lines are left out, with a warning."""
    return metrics.reported(metrics.read_new_records(storage, run_id, set()))
