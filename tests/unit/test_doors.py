"""The package's doors: every public name opens, and none loads a library before it is
needed."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import prefect_torch_ddp

PREFECT, DASK, TORCH = (
    ("prefect", "prefect_dask", "prefect_aws"),
    ("distributed", "dask"),
    ("torch", "torchvision"),
)
HEAVY = (*PREFECT, *DASK, *TORCH)


def loaded_after(statement: str) -> set[str]:
    """Run a statement in a fresh interpreter; return which top-level packages it loaded."""
    code = f"import sys\nimport prefect_torch_ddp\n{statement}\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_importing_the_package_loads_nothing_heavy() -> None:
    """`import prefect_torch_ddp` loads none of the heavy three, and pydantic neither."""
    assert not loaded_after("pass") & {*HEAVY, "pydantic", "numpy", "boto3"}


def test_asking_for_the_version_loads_nothing_heavy() -> None:
    """The version is the installed distribution's."""
    assert not loaded_after("assert prefect_torch_ddp.__version__.count('.') == 2") & {
        *HEAVY,
        "pydantic",
    }


@pytest.mark.parametrize(
    "name",
    [
        "TrainParams",
        "ClusterParams",
        "CheckpointParams",
        "TrainReport",
        "Report",
        "RankFailedError",
    ],
)
def test_values_load_none_of_the_heavy_three(name: str) -> None:
    """Parameters, results and errors can be used anywhere."""
    assert not loaded_after(f"prefect_torch_ddp.{name}") & set(HEAVY)


@pytest.mark.parametrize(
    ("name", "unneeded"),
    [
        ("run_gang", (*PREFECT, *TORCH)),
        ("RankContext", (*PREFECT, *DASK)),
        ("ddp_task", TORCH),
        ("train_flow", TORCH),
    ],
)
def test_each_level_loads_its_own_library_alone(name: str, unneeded: tuple[str, ...]) -> None:
    """The caller of a gang and the Dask worker need no torch, a rank no Dask and no Prefect, a
    flow's process no torch."""
    assert not loaded_after(f"prefect_torch_ddp.{name}") & set(unneeded)


def test_a_dask_worker_loads_no_torch() -> None:
    """Whatever of gang is unpickled on a worker, torch stays out."""
    every_module = (
        "import importlib, pkgutil, prefect_torch_ddp.gang as gang\n"
        "for found in pkgutil.walk_packages(gang.__path__, gang.__name__ + '.'): importlib.import_module(found.name)"
    )
    assert not loaded_after(every_module) & set(TORCH)


def test_doors_and_types_agree() -> None:
    """What opens at run time is what the type checker sees, and each name opens on itself."""
    tree = ast.parse(Path(prefect_torch_ddp.__file__).read_text())
    for_types = {
        alias.name: node.module
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert {*for_types, "__version__"} == set(prefect_torch_ddp.__all__)
    homes = prefect_torch_ddp._HOMES
    assert for_types == {
        name: f"prefect_torch_ddp.{homes.get(name, 'errors')}" for name in for_types
    }


def test_every_error_has_a_door() -> None:
    """A caller can catch each of our errors by a name of the package itself."""
    from prefect_torch_ddp import errors

    ours = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.PrefectTorchDdpError)
    }
    assert ours <= set(prefect_torch_ddp.__all__)


def test_dir_lists_the_doors() -> None:
    """Completion shows names that are not loaded yet."""
    assert set(prefect_torch_ddp.__all__) <= set(dir(prefect_torch_ddp))


def test_an_unknown_name_is_an_attribute_error() -> None:
    """A typo says which name of which module; hasattr works."""
    with pytest.raises(
        AttributeError, match=r"module 'prefect_torch_ddp' has no attribute 'train_folw'"
    ):
        prefect_torch_ddp.train_folw  # noqa: B018
    assert not hasattr(prefect_torch_ddp, "nothing")
