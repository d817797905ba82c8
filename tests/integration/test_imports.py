"""What importing each public name loads: no library before it is needed."""

import subprocess
import sys

import pytest

PREFECT, DASK = {"prefect", "prefect_dask", "prefect_aws"}, {"distributed", "dask"}
TORCH = {"torch", "torchvision"}
HEAVY = PREFECT | DASK | TORCH
VALUES = "TrainParams ClusterParams CheckpointParams TrainReport Report RankFailedError"
EVERY_GANG_MODULE = (
    "import importlib, pkgutil, prefect_torch_ddp.gang as gang\n"
    "for found in pkgutil.walk_packages(gang.__path__, gang.__name__ + '.'):\n"
    "    importlib.import_module(found.name)"
)


@pytest.mark.parametrize(
    ("statement", "unneeded"),
    [
        pytest.param("pass", HEAVY | {"pydantic", "numpy", "boto3"}, id="the package"),
        pytest.param("ours.__version__.split('.')", HEAVY | {"pydantic"}, id="its version"),
        pytest.param(f"[getattr(ours, name) for name in {VALUES.split()}]", HEAVY, id="values"),
        pytest.param("ours.run_gang", PREFECT | TORCH, id="level 1"),
        pytest.param("ours.ddp_task", TORCH, id="level 2"),
        pytest.param("ours.train_flow", TORCH, id="level 3"),
        pytest.param("ours.RankContext", HEAVY, id="a rank"),
        pytest.param(
            "ours.S3Storage('b', 'p'), ours.DirectoryStorage('p')",
            HEAVY | {"boto3", "botocore"},
            id="storages",
        ),
        pytest.param(EVERY_GANG_MODULE, TORCH, id="a Dask worker"),
    ],
)
def test_a_fresh_interpreter_loads_only_what_it_needs(statement: str, unneeded: set[str]) -> None:
    """Values load no heavy library, a caller and a worker no torch, a rank no Dask or Prefect."""
    code = f"import sys, prefect_torch_ddp as ours\n{statement}\nprint(*sys.modules)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stderr
    assert not {name.partition(".")[0] for name in done.stdout.split()} & unneeded
