"""A training that has finished is recognised, also where Prefect's own result of it is out of
reach, and isn't run again."""

from pathlib import Path

import pytest

from prefect_torch_ddp import RankFailedError, TrainParams, train_flow
from prefect_torch_ddp.checkpoint.attempts import newest_attempt
from prefect_torch_ddp.records.metrics import read_all_records
from prefect_torch_ddp.storage.directory import DirectoryStorage
from tests.integration.runs import logs_of, retry_train_flow

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def test_prefect_flow_run_retry_on_another_machine_trains_nothing(
    prefect_api: str, tmp_path: Path
) -> None:
    """The flow failed in its evaluation; `prefect flow-run retry` with another Prefect home
    evaluates, no attempt is made."""
    store, marker = tmp_path / "store", tmp_path / "failed"
    params = TrainParams(
        workload="tests.workloads.tiny",
        storage=str(store),
        world_size=1,
        options={"fail_evaluation_once": str(marker)},
    )
    with pytest.raises(RankFailedError, match="told to fail once"):
        train_flow(params)
    (folder,) = (store / "runs").iterdir()
    storage = DirectoryStorage(store)
    before = read_all_records(storage, folder.name)
    flow_run_id = retry_train_flow(prefect_api, folder.name, tmp_path / "home")
    assert any(
        "the training has finished already, in attempt 1" in line.message
        for line in logs_of(flow_run_id)
    )
    assert newest_attempt(storage, folder.name) == 1
    assert read_all_records(storage, folder.name) == before
