"""A training that has finished is recognised, also where Prefect's own result of it is out of reach, and isn't run again."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from prefect.client.orchestration import get_client

import prefect_torch_ddp.flow
from prefect_torch_ddp import RankFailedError, TrainParams, train_flow
from prefect_torch_ddp.checkpoint.attempts import newest_attempt
from prefect_torch_ddp.metrics.read import read_all_records
from prefect_torch_ddp.storage.directory import DirectoryStorage
from tests.integration.runs import logs_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def test_prefect_flow_run_retry_on_another_machine_trains_nothing(prefect_api: str, tmp_path: Path) -> None:
    """The flow failed in its evaluation; `prefect flow-run retry` with another Prefect home evaluates, no attempt is made."""
    store, marker = tmp_path / "store", tmp_path / "failed"
    params = TrainParams(
        workload="tests.workloads.tiny", storage=str(store), world_size=1, options={"fail_evaluation_once": str(marker)}
    )
    with pytest.raises(RankFailedError, match="told to fail once"):
        train_flow(params)
    (folder,) = (store / "runs").iterdir()
    storage = DirectoryStorage(store)
    before = read_all_records(storage, folder.name)
    with get_client(sync_client=True) as client:
        (flow_run,) = (run for run in client.read_flow_runs(limit=50) if folder.name == f"{run.name}-{str(run.id)[:8]}")
    entrypoint = f"{prefect_torch_ddp.flow.__file__}:train_flow"
    command = [sys.executable, "-m", "prefect", "flow-run", "retry", str(flow_run.id), "--entrypoint", entrypoint]
    env = {**os.environ, "PREFECT_HOME": str(tmp_path / "home"), "PREFECT_API_URL": prefect_api}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    with get_client(sync_client=True) as client:
        state = client.read_flow_run(flow_run.id).state
    assert state is not None
    assert state.is_completed(), done.stdout[-3000:] + done.stderr[-3000:]
    assert any("the training has finished already, in attempt 1" in line.message for line in logs_of(flow_run.id))
    assert newest_attempt(storage, folder.name) == 1
    assert read_all_records(storage, folder.name) == before
