"""Bad input to the flow is refused with a clear error before a rank or a cluster is started."""

from pathlib import Path
from typing import Any
from uuid import UUID

import dask
import psutil
import pytest
from dask.system import CPU_COUNT
from prefect import flow
from prefect.runtime import flow_run
from prefect_dask import DaskTaskRunner

from prefect_torch_ddp import (
    ClusterParams,
    InvalidParamsError,
    RankContext,
    StorageError,
    TrainParams,
    ddp_task,
    train_flow,
)
from prefect_torch_ddp.frames import users_traceback
from prefect_torch_ddp.tasks.clusters.chosen import point_at_cluster
from prefect_torch_ddp.tasks.clusters.current import _runner
from tests.support.runs import wait_until_said

NOBODY = "tcp://127.0.0.1:1"
NO_CLASS = ClusterParams(cluster_class="no_such.Cluster")
NO_CLUSTER = ClusterParams(address=NOBODY)
STEP_400 = "no-such-run/checkpoints/step-00000400"
WAY_OUT = "names no run; write a run's id, or <storage>/runs/<run id>"


@pytest.mark.extended
@pytest.mark.usefixtures("prefect_api")
@pytest.mark.parametrize(
    ("params", "says"),
    [
        (
            {"workload": "tests.workloads.no_such"},
            "workload 'tests.workloads.no_such' can't be found",
        ),
        ({"storage": "/proc/nowhere"}, "/proc/nowhere"),
        ({"source": "/proc/nowhere"}, "there is no folder /proc/nowhere here"),
        ({"source": "empty"}, "/empty, but nothing is there"),
        ({"storage": "ftp://host/x"}, "ftp: names no known storage"),
        ({"storage": "s3-bucket/absent"}, "s3-bucket/absent"),
        ({"cluster": NO_CLASS}, "no_such.Cluster"),
        (
            {"max_world_size": 9},
            "max_world_size is 9, but the run's own local cluster has room for 2 ranks",
        ),
        ({"cluster": NO_CLUSTER}, f"'{NOBODY}' gave no Dask cluster.*is its scheduler running"),
        ({"data_options": {"x": {1}}}, "data_options can't be written as JSON"),
        ({"resume_from": "no-such-run"}, "no-such-run"),
        ({"resume_from": STEP_400}, "no-such-run has no checkpoint of step 400"),
        (
            {"resume_from": "/no/such/store/runs/otter"},
            "/no/such/store holds no complete checkpoint",
        ),
        ({"resume_from": "/no/such/store"}, WAY_OUT),
        ({"resume_from": "s3-bucket/absent/runs/otter"}, "s3-bucket/absent"),
    ],
)
def test_refused_before_a_process_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, params: dict[str, Any], says: str
) -> None:
    """Each error names the value and what to do; no Dask worker and no rank was started."""
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    before = set(psutil.Process().children(recursive=True))
    error = StorageError if says == "/proc/nowhere" else InvalidParamsError
    with pytest.raises(error, match=says) as refused:
        train_flow(
            TrainParams(**{"workload": "tests.workloads.tiny", "storage": str(tmp_path), **params})
        )
    new = set(psutil.Process().children(recursive=True)) - before
    commands = [part for process in new for part in process.cmdline()]
    assert not [part for part in commands if "prefect_torch_ddp.rank" in part]
    assert not (tmp_path / "runs").exists()
    shown = users_traceback(refused.value)
    assert shown.count('  File "') == 1, "other frames than the user's say nothing more"


@pytest.mark.extended
@pytest.mark.usefixtures("prefect_api")
def test_a_flow_whose_scheduler_is_not_there_says_so(tmp_path: Path) -> None:
    """Of a task; Dask's error had 140 lines of frames."""
    fit = ddp_task(do_nothing, world_size=1, storage=str(tmp_path))

    @flow(task_runner=DaskTaskRunner(address=NOBODY))
    def line() -> None:
        fit.submit()

    says = f"the flow's DaskTaskRunner gave no Dask cluster: .*{NOBODY}.*; is its scheduler running"
    limit = dask.config.set({"distributed.comm.timeouts.connect": "2s"})
    with limit, pytest.raises(InvalidParamsError, match=says):
        line()


def do_nothing(_ctx: RankContext) -> None:
    """Run."""


@pytest.mark.usefixtures("prefect_api")
def test_more_ranks_than_cores_are_warned_of() -> None:
    """The run continues: it may be a test of the code."""

    @flow(task_runner=DaskTaskRunner())
    def ask() -> UUID:
        point_at_cluster(_runner(), TrainParams(world_size=CPU_COUNT + 1))
        return UUID(flow_run.id)

    says = f"{CPU_COUNT + 1} ranks share the {CPU_COUNT} cores of this machine"
    wait_until_said(ask(), says)
