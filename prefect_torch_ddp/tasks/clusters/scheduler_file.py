"""The address of a run's Dask cluster, if that is started by somebody else."""

from pathlib import Path

from distributed.utils import json_load_robust

from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.params import ClusterParams


def scheduler_address(cluster: ClusterParams, timeout_s: float) -> str | None:
    """Return the address of a scheduler that the parameters name; None if they name none.

    Args:
        cluster: the parameters.
        timeout_s: how long to wait for the scheduler's file, in seconds.

    Raises:
        InvalidParamsError: the file doesn't appear in time, or isn't the file of a scheduler.
    """
    if cluster.scheduler_file is None:
        return cluster.address
    what = f"cluster.scheduler_file {cluster.scheduler_file!r}"
    try:
        found = json_load_robust(Path(cluster.scheduler_file).expanduser(), timeout=timeout_s)
        return str(found["address"])
    except TimeoutError as error:
        do = "start `dask scheduler --scheduler-file`, in a folder that this machine sees"
        msg = f"{what} didn't appear within {timeout_s:g} s: {do}"
        raise InvalidParamsError(msg) from error
    except (OSError, KeyError, TypeError) as error:
        msg = f"{what} isn't the file of a Dask scheduler: {type(error).__name__}: {error}"
        raise InvalidParamsError(msg) from error
