"""Records that are read again and again are those that one reading has, to the last bit."""

import json
from collections.abc import Sequence

import pytest

from prefect_torch_ddp.errors import StorageError
from prefect_torch_ddp.records.growing import GrowingRecords
from prefect_torch_ddp.records.metrics import by_steps
from prefect_torch_ddp.storage.formats import METRICS
from tests.support.formats import head
from tests.support.records import Record, Shelf, read_all_records, record, rows

RUN = "calm-otter-12345678"


def put(shelf: Shelf, rank: int, attempt: int, part: int, records: Sequence[Record]) -> None:
    """Write a part."""
    lines = b"".join(json.dumps(vars(each)).encode() + b"\n" for each in records)
    key = f"runs/{RUN}/metrics/rank-{rank:05d}/{attempt:06d}-{part:06d}.jsonl"
    shelf.write(key, head(METRICS) + lines)


def values(records) -> dict[str, list[float]]:
    """Return the means over the ranks, which depend on the order of the sum."""
    return {name: each[1].tolist() for name, each in by_steps(records).metrics.items()}


def losses(rank: int, first: int, last: int) -> list[Record]:
    """Return what a rank reports; sums of three such numbers depend on their order."""
    return [
        record(step, rank, loss=0.1 * (step + 1) ** rank + 1e-9 * rank, **{f"r{rank}": 1.0})
        for step in range(first, last)
    ]


def test_each_part_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes later is joined as if all had been read at once."""
    shelf, read = Shelf(), []
    monkeypatch.setattr(Shelf, "read", lambda self, key: read.append(key) or self.objects[key])
    growing = GrowingRecords(shelf, RUN)
    assert len(growing.read()) == 0
    for part in range(1, 6):
        for rank in (2, 0, 1):
            put(shelf, rank, 1, part, losses(rank, 10 * part, 10 * part + 10))
            found = growing.read()
    put(shelf, 1, 2, 1, [record(60, 1, 2, loss=0.5, other=2.0)])
    found = growing.read()
    assert len(read) == len(set(read)) == len(shelf.objects)
    all_at_once = read_all_records(shelf, RUN)
    assert rows(found) == rows(all_at_once)
    assert values(found) == values(all_at_once)
    assert growing.read() is found


def test_a_part_between_others_has_all_read_again() -> None:
    """An agent writes what a killed rank left, maybe before a part that was read."""
    shelf = Shelf()
    put(shelf, 0, 1, 1, losses(0, 0, 10))
    put(shelf, 0, 1, 3, losses(0, 20, 30))
    growing = GrowingRecords(shelf, RUN)
    growing.read()
    put(shelf, 0, 1, 2, losses(0, 10, 20))
    found = growing.read()
    assert found.rows.tolist() == read_all_records(shelf, RUN).rows.tolist()
    assert len(found) == 30


def test_a_reading_that_failed_is_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it counts as read."""
    shelf = Shelf()
    put(shelf, 0, 1, 1, losses(0, 0, 10))
    growing = GrowingRecords(shelf, RUN)

    def fail(self: Shelf, key: str) -> bytes:
        msg = f"can't read {key}"
        raise StorageError(msg)

    with monkeypatch.context() as patch, pytest.raises(StorageError):
        patch.setattr(Shelf, "read", fail)
        growing.read()
    assert len(growing.read()) == 10


def test_a_second_reading_that_failed_forgets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts that had been read before were missing from then on."""
    shelf = Shelf()
    for part in (1, 3):
        put(shelf, 0, 1, part, losses(0, 10 * part, 10 * part + 10))
    growing = GrowingRecords(shelf, RUN)
    growing.read()
    put(shelf, 0, 1, 2, losses(0, 20, 30))

    def fail_if_read_before(self: Shelf, key: str) -> bytes:
        if key.endswith("000002.jsonl"):
            return self.objects[key]
        msg = f"can't read {key}"
        raise StorageError(msg)

    with monkeypatch.context() as patch, pytest.raises(StorageError):
        patch.setattr(Shelf, "read", fail_if_read_before)
        growing.read()
    found = growing.read()
    assert found.rows.tolist() == read_all_records(shelf, RUN).rows.tolist()
    assert len(found) == 30
