"""The process that feeds trackers ends with its flow, with one more sync or at once."""

import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from prefect_torch_ddp.records.log import RecordLog
from prefect_torch_ddp.records.run_record import RunRecord, write_record
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.tasks.watch import tracker_feed
from prefect_torch_ddp.tracking.trackers.feed import Feed, Told
from tests.support.waiting import HANG_S, wait_until

RUN = "calm-otter-12345678"


@pytest.fixture
def storage(tmp_path: Path) -> DirectoryStorage:
    """Make a run of ten steps."""
    storage = DirectoryStorage(tmp_path)
    about = {"experiment": "e", "workload": "w", "storage": storage.uri, "flow_run_id": "flow"}
    trackers = {"trackers": ["tensorboard"]}
    began = datetime.now(UTC)
    write_record(storage, RunRecord(run_id=RUN, began=began, parameters=trackers, **about))
    log = RecordLog(storage, RUN, "metrics", rank=0, attempt=1)
    for step in range(1, 11):
        at = {"step": step, "epoch": 1, "rank": 0, "attempt": 1, "time": 1.0 * step}
        log.append({**at, "num_samples": 1, "metrics": {"loss": 1.0 / step}})
    log.close()
    return storage


@pytest.fixture
def feed(storage: DirectoryStorage) -> Iterator[tuple]:
    """Start a process that feeds TensorBoard, and wait until it has found the run."""
    since = datetime.now(UTC) - timedelta(hours=1)
    with tempfile.TemporaryFile() as answers:
        asked = Feed(("tensorboard",), storage, "e", "flow", since)
        process = tracker_feed._start(asked, answers)
        try:
            wait_until((storage.local_folder / "tensorboard" / RUN).exists)
            yield process, answers
        finally:
            process.kill()
            process.wait()
            process.stdin.close()


def test_at_the_flows_end_it_syncs_once_more(storage: DirectoryStorage, feed: tuple) -> None:
    """What was completed just before is there, and it says so."""
    process, answers = feed
    record = RunRecord.from_bytes(
        storage.read(next(storage.list("run-records/")).key), "the record"
    )
    done = {"state": "completed", "ended": datetime.now(UTC), "num_steps": 10}
    write_record(storage, record.model_copy(update=done))
    assert tracker_feed._end(process, HANG_S) == 0
    answers.seek(0)
    told = {each.run_id: each for each in Told.read(answers.read())}
    folder = storage.local_folder / "tensorboard" / RUN
    assert told[RUN] == Told("tensorboard", RUN, is_last=True, url=str(folder))
    points = EventAccumulator(str(folder)).Reload().Scalars("loss")
    assert [each.step for each in points] == list(range(1, 11))


def test_without_its_flow_it_ends_at_once(feed: tuple) -> None:
    """The pipe closes without a word, as it does if the flow's process is killed."""
    process, _ = feed
    process.stdin.close()
    assert process.wait(HANG_S) == 1
