"""Checks a file of ClusterParams before a job is submitted."""

import importlib
import shutil
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from rich.console import Console

from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.params import ClusterParams
from prefect_torch_ddp.refusals import in_words


def read_cluster_file(path: Path) -> ClusterParams:
    """Read a YAML file as ClusterParams, such as those in `deployments/clusters`.

    Raises:
        InvalidParamsError: the file can't be read, or doesn't hold ClusterParams; says why.
    """
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        msg = f"the cluster file {path} can't be read: {error}"
        raise InvalidParamsError(msg) from error
    if not isinstance(found, dict):
        msg = f"the cluster file {path} has no fields: write them as name: value"
        raise InvalidParamsError(msg)
    try:
        return ClusterParams(**found)
    except ValidationError as error:
        msg = f"the cluster file {path}: {in_words(error, ClusterParams)}"
        raise InvalidParamsError(msg) from error


def look_before_jobs(params: ClusterParams, console: Console) -> list[str]:
    """Create a batch system's cluster without a job, show its job script; return the problems.

    Other classes are only imported, because creating such a cluster starts its workers.
    """
    named = str(params.cluster_class)
    module, _, name = named.rpartition(".")
    try:
        made: Any = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        return [f"cluster_class {named!r} can't be imported here: {error}"]
    job = getattr(made, "job_cls", None)
    if job is None:
        console.print(f"{named} can be imported; it has no job script, so nothing more was tried")
        return []
    problems = []
    # `sbatch`, or `qsub` and options.
    command = str(getattr(job, "submit_command", "")).partition(" ")[0]
    if command and shutil.which(command) is None:
        problems.append(f"there is no {command} here: start the flow run where jobs are submitted")
    try:
        with made(**{**params.cluster_kwargs, "n_workers": 0}) as cluster:
            console.print(f"the job script of {named}; nothing was submitted:\n", markup=False)
            console.print(cluster.job_script(), markup=False, highlight=False, soft_wrap=True)
            console.print(f"workers will connect to {cluster.scheduler_address}", markup=False)
    except Exception as error:  # noqa: BLE001 - classes of others raise anything for what they get
        text = f"{type(error).__name__}: {error}"
        problems.append(f"{named} refuses the file's cluster_kwargs: {text}")
    return problems
