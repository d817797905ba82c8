"""Files that follow a run end with it, also if it has failed for good."""

import json
import threading
from pathlib import Path

import pytest
from distributed import LocalCluster
from prefect import flow
from prefect_dask import DaskTaskRunner

from prefect_torch_ddp import RankContext, RankFailedError, ddp_task, export_records
from prefect_torch_ddp.records.run_record import list_run_records
from prefect_torch_ddp.storage.directory import DirectoryStorage
from tests.support.waiting import HANG_S, wait_until

pytestmark = [
    pytest.mark.extended,
    pytest.mark.timeout(400),
    pytest.mark.usefixtures("prefect_api"),
]

NUM_STEPS = 3


def report_and_fail(ctx: RankContext) -> None:
    """Report some steps, then fail, in each attempt with another text."""
    for step in range(1, NUM_STEPS + 1):
        ctx.progress(step, NUM_STEPS)
        ctx.report(loss=1.0 / step)
    msg = f"attempt {ctx.attempt} fails"
    raise ConnectionError(msg)


def test_files_of_a_failing_run_follow_its_retry_and_end_with_it(
    dask_cluster: LocalCluster, tmp_path: Path
) -> None:
    """The first failure, which Prefect retries, isn't the end; the second one is."""
    store, out = tmp_path / "store", tmp_path / "out"
    train = ddp_task(
        world_size=1, storage=str(store), max_restarts=0, retries=1, retry_delay_seconds=0
    )(report_and_fail)

    def export() -> None:
        storage = DirectoryStorage(store)
        wait_until(lambda: store.is_dir() and list_run_records(storage))
        (record,) = list_run_records(storage)
        export_records(store, record.run_id, out, follow=True, formats=["json"])

    @flow(task_runner=DaskTaskRunner(address=dask_cluster.scheduler_address))  # type: ignore[arg-type]
    def fails() -> None:
        train()

    follower = threading.Thread(target=export, daemon=True)
    follower.start()
    with pytest.raises(RankFailedError):
        fails()
    follower.join(HANG_S)
    assert not follower.is_alive()
    (record,) = list_run_records(DirectoryStorage(store))
    assert (record.state, record.is_over, len(record.attempts)) == ("failed", True, 2)
    lines = [json.loads(line) for line in (out / "rank-00000.jsonl").read_text().splitlines()]
    assert [(line["attempt"], line["loss"]) for line in lines] == [
        (2, 1.0 / step) for step in range(1, NUM_STEPS + 1)
    ]
