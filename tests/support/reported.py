"""A run in memory whose ranks reported, with its checkpoints, resumes and record."""

import json
from collections import defaultdict
from datetime import UTC, datetime

from prefect_torch_ddp.checkpoint.attempts import write_resume
from prefect_torch_ddp.checkpoint.keys import CheckpointId, manifest_key
from prefect_torch_ddp.checkpoint.manifest import Manifest
from prefect_torch_ddp.records.metrics import by_steps, read_new_records, surviving_records
from prefect_torch_ddp.records.run_record import RunRecord, write_run_record
from prefect_torch_ddp.storage.formats import METRICS
from tests.support.formats import head
from tests.support.records import Record, Shelf, record

RUN = "calm-otter-12345678"
BEGAN = datetime(2026, 11, 22, 2, tzinfo=UTC)


def put(shelf: Shelf, attempt: int, *rows: Record) -> None:
    """Write an attempt's records, as its ranks do."""
    by_rank = defaultdict(bytes)
    for row in rows:
        by_rank[row.rank] += json.dumps(vars(row)).encode() + b"\n"
    for rank, lines in by_rank.items():
        key = f"runs/{RUN}/metrics/rank-{rank:05d}/{attempt:06d}-000001.jsonl"
        shelf.write(key, head(METRICS) + lines)


def steps_of(attempt: int, first: int, last: int) -> list[Record]:
    """Return what two ranks report in an attempt."""
    return [
        record(step, rank, attempt, loss=step + attempt / 10 + rank, accuracy=1.0 / step)
        for step in range(first, last + 1)
        for rank in range(2)
    ]


def checkpoint(shelf: Shelf, step: int, attempt: int = 1, **position) -> None:
    """Commit a checkpoint."""
    manifest = Manifest(RUN, step, attempt, epoch=1, position=position, world_size=2)
    shelf.write(manifest_key(RUN, step, attempt), manifest.as_bytes())


def resume(shelf: Shelf, attempt: int, step: int, of_attempt: int) -> None:
    """Have an attempt resume from a checkpoint."""
    write_resume(shelf, RUN, attempt, CheckpointId(step, of_attempt))


def say(shelf: Shelf, state: str = "training", **more: object) -> None:
    """Write the run's record."""
    about = {"run_id": RUN, "experiment": "e", "workload": "w", "began": BEGAN, "storage": "s"}
    write_run_record(shelf, RunRecord(state=state, **{**about, **more}))


def history(shelf: Shelf) -> dict[str, list[tuple[int, float]]]:
    """Return each metric's series, as `read_metrics(by="step")` has it."""
    records = by_steps(surviving_records(read_new_records(shelf, RUN, set())))
    return {
        name: sorted(zip(records.rows["step"][having].tolist(), values.tolist(), strict=True))
        for name, (having, values) in records.metrics.items()
    }
