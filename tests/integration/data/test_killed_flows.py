"""Flows on what Dask prepares lose a Dask worker meanwhile, and in mid-epoch ranks, a Dask worker
and their own process."""

import os
from pathlib import Path

import pytest

from prefect_torch_ddp import CheckpointParams, ClusterParams, TrainParams, read_ledger, train_flow
from prefect_torch_ddp.records.run_record import list_run_records
from prefect_torch_ddp.storage.locate import storage_from_uri
from tests.integration.tasks.test_cancel import flow_process, newest_run
from tests.support.runs import newest_flow_run, retry_train_flow
from tests.support.s3_server import S3Server
from tests.support.waiting import wait_until

pytest.importorskip("zarr")
pytest.importorskip("xarray")
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("prefect_api"),
]


def faults(mark: Path) -> list[dict[str, object]]:
    """Kill all ranks, one, a Dask worker; then pause, until the test kills the flow."""
    return [
        {"how": "SIGKILL", "step": 4, "rank": None, "attempts": [1]},
        {"how": "SIGKILL", "step": 7, "rank": 1, "attempts": [2]},
        {"how": "kill_grandparent", "step": 14, "rank": 1, "attempts": [3]},
        {"how": "pause", "step": 17, "rank": 0, "attempts": [4], "mark": str(mark)},
    ]


@pytest.mark.parametrize(
    ("kind", "num_samples"), [("Table", 500), pytest.param("Array", 420, marks=pytest.mark.more)]
)
def test_whatever_is_killed_the_weights_are_the_undisturbed_ones(
    kind: str, num_samples: int, chain_s3_server: S3Server, shared: ClusterParams, tmp_path: Path
) -> None:
    """On S3 as on a directory, and the ledger counts each sample once an epoch."""
    (tmp_path / "mark").mkdir()
    undisturbed = TrainParams(
        workload=f"tests.workloads.dask_data:{kind}",
        storage=str(tmp_path / "store"),
        checkpoint=CheckpointParams(every_s=None, every_steps=3),
        ledger=True,
        cluster=shared,
    )
    calm = train_flow(undisturbed)
    bucket = chain_s3_server.storage().uri
    changes = {
        "storage": bucket,
        "data_options": {"dies_in": str(tmp_path)},
        "options": {"faults": faults(tmp_path / "mark")},
        "cluster": ClusterParams(),
        "max_restarts": 3,
        "retry_delay_s": 0.1,
    }
    params = undisturbed.model_copy(update=changes)
    with flow_process(tmp_path, params.model_dump_json()) as process:
        for reached in (tmp_path / "died", tmp_path / "mark" / "0"):
            wait_until(reached.exists, what=str(reached))
        _, run_id = newest_run()
        process.kill()
    lost = "already computed task(s)"
    assert lost not in (tmp_path / "said").read_text(), "the finished preparation runs again"
    wait_until(lambda: newest_flow_run().state_name == "Crashed")
    retry_train_flow(os.environ["PREFECT_API_URL"], run_id, tmp_path / "home")
    (record,) = list_run_records(storage_from_uri(bucket))
    assert (record.state, record.run_id, record.value) == ("completed", run_id, calm.training.value)
    assert [attempt.attempt for attempt in record.attempts] == [1, 2, 3, 4, 5]
    for storage, each in ((bucket, run_id), (tmp_path / "store", calm.run_id)):
        assert str(read_ledger(storage, each)).splitlines() == [
            f"epoch {epoch}: {num_samples} samples, each once" for epoch in (1, 2)
        ]
