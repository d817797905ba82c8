"""Which training a call of a ddp_task is, and where it begins."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from distributed import LocalCluster
from prefect import Task, flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowFilter, FlowFilterName
from prefect_dask import DaskTaskRunner

from prefect_torch_ddp import (
    CheckpointParams,
    InvalidParamsError,
    RankFailedError,
    ddp_task,
    read_ledger,
)
from prefect_torch_ddp.checkpoint.attempts import newest_attempt
from prefect_torch_ddp.storage.directory import DirectoryStorage
from tests.integration.runs import retry_from_the_cli
from tests.workloads import retried_flow
from tests.workloads.retried_flow import fit

pytestmark = [pytest.mark.timeout(400), pytest.mark.usefixtures("prefect_api")]


def on(cluster: LocalCluster) -> Any:
    """Return a runner of a running cluster; Any, since Prefect's flow takes no runner whose
    futures are PrefectDaskFutures."""
    return DaskTaskRunner(address=cluster.scheduler_address)


def task(folder: Path, **options: Any) -> Task[..., dict[str, Any]]:
    """Return the training as a task with a checkpoint every three steps."""
    made: Task[..., dict[str, Any]] = ddp_task(
        world_size=2,
        seed=5,
        checkpoint=CheckpointParams(every_steps=3),
        storage=str(folder),
        **options,
    )(fit)
    return made


def test_calls_of_one_key_and_equal_arguments_are_one_training(
    dask_cluster: LocalCluster, tmp_path: Path
) -> None:
    """Over a retry of the flow run, and after a failure that the flow caught, each resumes what it
    left, to the same bits; with other arguments the key is another training."""
    train = task(tmp_path, run_key="fit")
    again = train.with_options(run_key="again")  # type: ignore[call-arg]

    @flow(task_runner=on(dask_cluster), retries=1)
    def trains() -> list[dict[str, Any]]:
        whole, broken = train(None), train.submit(7).result()
        with pytest.raises(RankFailedError, match="failed in attempt 1: ValueError: told to fail"):
            again(7)
        return [whole, broken, again.submit(7).result()]

    whole, broken, taken_up = trains()
    assert (whole["attempt"], whole["made"]) == (2, [])  # it had ended before the flow's retry
    for value in (broken, taken_up):
        # The checkpoint of step 6 may not be whole when step 7 fails.
        assert (value["attempt"], value["made"][0] in (4, 7)) == (2, True)
        assert value["weights"] == whole["weights"]
    runs = {value["run_id"] for value in (whole, broken, taken_up)}
    assert runs == {path.name for path in (tmp_path / "runs").iterdir()}
    assert len(runs) == 3


def test_prefect_flow_run_retry_resumes_it(
    prefect_api: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the command line, in another process, with another Prefect home."""
    command = [sys.executable, "-c", "from tests.workloads.retried_flow import retried; retried()"]
    env = {**os.environ, "PREFECT_API_URL": prefect_api, "RETRIED_STORE": str(tmp_path / "store")}
    failed = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=200, check=False
    )
    assert "failed in attempt 1: ValueError: told to fail" in failed.stderr
    storage = DirectoryStorage(tmp_path / "store")
    begun = sorted(path.name for path in (tmp_path / "store/runs").iterdir())
    assert len(begun) == 2
    with get_client(sync_client=True) as client:
        runs = client.read_flow_runs(flow_filter=FlowFilter(name=FlowFilterName(any_=["retried"])))
    (flow_run,) = (run for run in runs if run.state_name == "Failed")
    env["PREFECT_HOME"] = str(tmp_path / "home")
    printed = retry_from_the_cli(flow_run.id, f"{retried_flow.__file__}:retried", **env)
    assert sorted(path.name for path in (tmp_path / "store/runs").iterdir()) == begun
    assert [newest_attempt(storage, run_id) for run_id in begun] == [2, 2]
    assert "resuming from the checkpoint of step" in printed


def test_a_new_run_begins_from_another_with_its_ledger(
    dask_cluster: LocalCluster, tmp_path: Path
) -> None:
    """resume_from takes a run's id, a place and a step, also by with_options; the ledger of the
    new run begins where it does."""
    train = task(tmp_path, ledger=True)

    @flow(task_runner=on(dask_cluster))
    def first() -> dict[str, Any]:
        return train(None, epochs=1)

    @flow(task_runner=on(dask_cluster))
    def then(reference: str) -> dict[str, Any]:
        return train.with_options(resume_from=reference, name="later").submit(None).result()

    @flow(task_runner=on(dask_cluster))
    def whole() -> dict[str, Any]:
        return train.with_options(ledger=False, seed=5)(None)

    begun = first()
    undisturbed = whole()
    at_3 = f"{tmp_path}/runs/{begun['run_id']}/checkpoints/step-00000003"
    for reference, made in ((begun["run_id"], range(7, 13)), (at_3, range(4, 13))):
        later = then(reference)
        assert later["made"] == list(made)
        assert later["weights"] == undisturbed["weights"]
        proof = read_ledger(tmp_path, later["run_id"])
        assert proof.is_clean, str(proof)
        assert [(epoch.epoch, epoch.begins_at, epoch.num_samples) for epoch in proof.epochs] == (
            [(2, 0, 24)] if made[0] == 7 else [(1, 12, 12), (2, 0, 24)]
        )
    assert read_ledger(tmp_path, begun["run_id"]).is_clean
    assert read_ledger(tmp_path, undisturbed["run_id"]).epochs == ()


def test_a_source_that_is_not_there_is_refused(dask_cluster: LocalCluster, tmp_path: Path) -> None:
    """Before a rank starts, once though retries are left."""
    train = task(tmp_path, resume_from="no-such-run", retries=3, retry_delay_seconds=0)

    @flow(task_runner=on(dask_cluster))
    def trains() -> dict[str, Any]:
        return train(None)

    with pytest.raises(InvalidParamsError, match=r"resume_from names .*no-such-run"):
        trains()
    assert not list((tmp_path / "runs").glob("*/attempts/*"))
    with pytest.raises(InvalidParamsError, match="virtual_ranks is 3 and world_size 2"):
        train.with_options(determinism="elastic", virtual_ranks=3)  # type: ignore[call-arg]
