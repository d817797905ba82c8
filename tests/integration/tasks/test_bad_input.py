"""Bad input to the flow is refused with a clear error before a rank or a cluster is started."""

from pathlib import Path
from typing import Any

import psutil
import pytest

from prefect_torch_ddp import (
    ClusterParams,
    InvalidParamsError,
    StorageError,
    TrainParams,
    train_flow,
)
from tests.support.runs import free_port

pytestmark = pytest.mark.usefixtures("prefect_api")


@pytest.mark.parametrize(
    ("params", "error", "says"),
    [
        (
            {"workload": "tests.workloads.no_such"},
            InvalidParamsError,
            "workload 'tests.workloads.no_such' can't be found",
        ),
        (
            {"workload": "no_such_package.module"},
            InvalidParamsError,
            "No module named 'no_such_package'",
        ),
        (
            {"workload": "tests.workloads.no_train"},
            InvalidParamsError,
            "has no function 'train'.* defines prepare, evaluate",
        ),
        ({"workload": "tests.workloads.tiny:Absent"}, InvalidParamsError, "defines no 'Absent'"),
        ({"storage": "/proc/nowhere"}, StorageError, "/proc/nowhere"),
        ({"storage": "ftp://host/x"}, InvalidParamsError, "ftp: names no known storage"),
        ({"storage": "s3-bucket/absent"}, InvalidParamsError, "s3-bucket/absent"),
        (
            {"cluster": ClusterParams(cluster_class="no_such.Cluster")},
            InvalidParamsError,
            "no_such.Cluster",
        ),
        ({"data_options": {"x": {1}}}, InvalidParamsError, "data_options can't be written as JSON"),
        ({"resume_from": "no-such-run"}, InvalidParamsError, "no-such-run"),
        (
            {"resume_from": "no-such-run/checkpoints/step-00000400"},
            InvalidParamsError,
            "no-such-run has no checkpoint of step 400",
        ),
        (
            {"resume_from": "/no/such/store/runs/otter"},
            InvalidParamsError,
            "/no/such/store holds no complete checkpoint",
        ),
        (
            {"resume_from": "/no/such/store"},
            InvalidParamsError,
            "names no run; write a run's id, or <storage>/runs/<run id>",
        ),
        ({"resume_from": "s3-bucket/absent/runs/otter"}, InvalidParamsError, "s3-bucket/absent"),
    ],
)
def test_refused_before_a_process_starts(
    tmp_path: Path, params: dict[str, Any], error: type[Exception], says: str
) -> None:
    """Each error names the value and what to do; no Dask worker and no rank was started."""
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    with pytest.raises(error, match=says):
        train_flow(
            TrainParams(**{"workload": "tests.workloads.tiny", "storage": str(tmp_path), **params})
        )
    new = [p.cmdline() for p in psutil.Process().children(recursive=True) if p.pid not in before]
    assert not [
        command for command in new if any("prefect_torch_ddp.rank" in part for part in command)
    ]
    assert not (tmp_path / "runs").exists()


def test_unreachable_address(tmp_path: Path) -> None:
    """A scheduler address where nobody listens is refused within its limit and named."""
    address = f"tcp://127.0.0.1:{free_port()}"
    with pytest.raises(
        InvalidParamsError,
        match=f"cluster.address '{address}' gave no Dask cluster.*is its scheduler running",
    ):
        train_flow(
            TrainParams(
                workload="tests.workloads.tiny",
                storage=str(tmp_path),
                cluster=ClusterParams(address=address),
            )
        )
