"""Importing a public name loads no library before it is needed."""

import subprocess
import sys

PREFECT, DASK = {"prefect", "prefect_dask", "prefect_aws"}, {"distributed", "dask"}
TORCH = {"torch", "torchvision"}
HEAVY = PREFECT | DASK | TORCH
EXTRAS = {"pandas", "pyarrow", "zarr", "xarray", "datasets"}
"""Of tables, arrays and Hugging Face."""
VALUES = "TrainParams ClusterParams CheckpointParams TrainReport Report RankFailedError"
EVERY_GANG_MODULE = """
import importlib, pkgutil, prefect_torch_ddp.gang as gang
for found in pkgutil.walk_packages(gang.__path__, gang.__name__ + '.'):
    importlib.import_module(found.name)
"""
HELP = """
from prefect_torch_ddp.cli.app import main
try:
    main(['train', '--help'])
except SystemExit as ended:
    assert not ended.code
print()
"""
STEPS = [
    ("import prefect_torch_ddp as ours", HEAVY | {"pydantic", "numpy", "boto3"}),
    ("ours.__version__.split('.')", HEAVY | {"pydantic"}),
    # A name is unpickled from the package that exports it, or that `help` shows.
    (r"__import__('pickle').loads(b'cprefect_torch_ddp\nTrainReport\n.')", HEAVY),
    (r"__import__('pickle').loads(b'cprefect_torch_ddp\nGangParams\n.')", HEAVY),
    ("ours.S3Storage('b', 'p'), ours.DirectoryStorage('p')", HEAVY | {"boto3", "botocore"}),
    (f"[getattr(ours, name) for name in {VALUES.split()}]", HEAVY),
    ("ours.RankContext", HEAVY),
    ("ours.run_gang", PREFECT | TORCH),
    (EVERY_GANG_MODULE, PREFECT | TORCH),
    ("ours.ddp_task", TORCH),
    ("ours.train_flow", TORCH),
    ("from prefect_torch_ddp.data import array, table", set[str]()),
]


def test_a_fresh_interpreter_loads_only_what_it_needs() -> None:
    """Each name loads only the libraries of its kind of process."""
    code = "import sys\n" + "".join(f"{step}\nprint(*sys.modules)\n" for step, _ in STEPS)
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stderr
    for (step, unneeded), line in zip(STEPS, done.stdout.splitlines(), strict=True):
        loaded = {name.partition(".")[0] for name in line.split()}
        assert not loaded & (unneeded | EXTRAS), step


def test_a_worker_that_starts_loads_little_before_its_fork_server() -> None:
    """What the preload of Dask workers needs to start one loads no parameters, nor pydantic."""
    fork_client = "prefect_torch_ddp.gang.worker.fork_client"
    code = f"import sys, prefect_torch_ddp.gang.warm, {fork_client}; print(*sys.modules)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stderr
    assert not {*done.stdout.split()} & {"pydantic", "prefect_torch_ddp.params"}


def test_the_commands_help_loads_nothing_heavy() -> None:
    """Help and a shell's completion load nothing heavier than typer's pydantic."""
    code = f"import sys{HELP}print(*sys.modules)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stderr
    loaded = {name.partition(".")[0] for name in done.stdout.splitlines()[-1].split()}
    assert not loaded & (HEAVY | {"rich", "boto3", "numpy", "yaml"})
