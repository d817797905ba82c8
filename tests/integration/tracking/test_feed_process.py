"""The process that feeds trackers ends with its flow, with one more sync or at once."""

import tempfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from distributed import LocalCluster
from prefect import flow, task
from prefect_dask import DaskTaskRunner
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from prefect_torch_ddp import ddp_task, list_runs
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.params import ContextParams
from prefect_torch_ddp.records.log import RecordLog
from prefect_torch_ddp.records.run_record import RunRecord, write_run_record
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.tasks.watch import tracker_feed
from prefect_torch_ddp.tracking.trackers.feed import Feed, Told
from tests.support.waiting import HANG_S, wait_until
from tests.workloads.fed_flows import NUM_STEPS, fit

RUN = "calm-otter-12345678"


@pytest.fixture
def storage(tmp_path: Path) -> DirectoryStorage:
    """Make a run of ten steps."""
    storage = DirectoryStorage(tmp_path)
    about = {"experiment": "e", "workload": "w", "storage": storage.uri, "flow_run_id": "flow"}
    trackers = {"trackers": ["tensorboard"]}
    began = datetime.now(UTC)
    write_run_record(storage, RunRecord(run_id=RUN, began=began, parameters=trackers, **about))
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
    write_run_record(storage, record.model_copy(update=done))
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


@pytest.mark.parametrize(
    "call",
    [
        lambda task: task(),
        lambda task: task.submit().result(),
        lambda task: task.map([1000]).result(),
    ],
    ids=["called", "submitted", "mapped"],
)
@pytest.mark.usefixtures("prefect_api")
def test_a_task_is_fed_however_it_is_called(
    call: Callable[[Any], object],
    dask_cluster: LocalCluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A flow with one call of one kind has its run in TensorBoard's files."""
    logs, store = tmp_path / "logs", str(tmp_path / "store")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(logs))
    train = ddp_task(world_size=1, trackers=["tensorboard"], storage=store)(fit)

    @flow(task_runner=DaskTaskRunner(address=dask_cluster.scheduler_address))
    def fed() -> None:
        call(train)

    fed()
    (run_id,) = list_runs(store)["run_id"]
    points = EventAccumulator(str(logs / run_id)).Reload().Scalars("loss")
    assert [each.step for each in points] == list(range(1, NUM_STEPS + 1))


@pytest.mark.usefixtures("prefect_api")
def test_a_process_that_dies_at_once_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Before it has said a word: the warning has the command that sends what it should have."""

    @flow
    def fed() -> None:
        params = ContextParams(trackers=["tensorboard"])
        with tracker_feed.trackers_fed(params, DirectoryStorage(tmp_path), "e"):
            for child in psutil.Process().children():
                if "prefect_torch_ddp.tracking.trackers.feed" in child.cmdline():
                    child.kill()

    fed()
    assert "tensorboard doesn't have all of the flow's runs: its process ended early" in caplog.text
    assert "sync RUN --tracker tensorboard --storage" in caplog.text


@pytest.mark.usefixtures("prefect_api")
def test_a_call_within_a_task_is_refused(dask_cluster: LocalCluster, tmp_path: Path) -> None:
    """Each of the flow's tasks would have a process, and all of them feed the same runs."""
    train = ddp_task(world_size=1, trackers=["tensorboard"], storage=str(tmp_path))(fit)

    @task
    def fold() -> None:
        train()

    @flow(task_runner=DaskTaskRunner(address=dask_cluster.scheduler_address))
    def fed() -> None:
        fold.submit().result()

    with pytest.raises(InvalidParamsError, match="can't be called within a task"):
        fed()
    assert not list(tmp_path.iterdir())
