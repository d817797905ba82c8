"""Owns the call that a gang makes: how a function and its values travel, and by what name and
paths it is found.
"""

import os
import pickle
import site
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle

from prefect_torch_ddp.errors import GangError, InvalidParamsError


def pickle_call(
    fn: Callable[..., Any] | str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bytes:
    """Pickle the call, a script by its whole path; raises InvalidParamsError where it can't be
    pickled.
    """
    if isinstance(fn, str) and fn.endswith(".py"):
        fn = str(Path(fn).resolve())
    try:
        payload: bytes = cloudpickle.dumps((fn, args, kwargs))
    except Exception as error:
        msg = f"{name_of(fn)} or its arguments can't be sent to the ranks: {type(error).__name__}: {error}"
        raise InvalidParamsError(msg) from error
    return payload


def unpickle_value(data: bytes, rank: int) -> Any:
    """Rebuild what a rank returned; raises GangError that names the rank."""
    try:
        return pickle.loads(data)
    except Exception as error:
        msg = f"the value that rank {rank} returned can't be rebuilt here: {type(error).__name__}: {error}"
        raise GangError(msg) from error


def brings_context(fn: Callable[..., Any] | str) -> bool:
    """Tell whether this is our own entry, which gives its function a RankContext: that says
    itself from when on it is watched.
    """
    return isinstance(fn, str) and fn.startswith("prefect_torch_ddp.rank.workload:")


def name_of(fn: Callable[..., Any] | str) -> str:
    """Return the function's name for people."""
    return fn if isinstance(fn, str) else getattr(fn, "__qualname__", type(fn).__name__)


def own_code_paths() -> tuple[str, ...]:
    """Return the caller's import paths that hold the user's own code, not Python's or installed
    packages.

    A function that is pickled by reference must be importable at its rank, also when the Dask
    worker was started elsewhere on the same machine or a shared file system.
    """
    installed = [
        sys.prefix,
        sys.base_prefix,
        sysconfig.get_path("stdlib"),
        *site.getsitepackages(),
        site.getusersitepackages(),
    ]
    paths = (str(Path(path).resolve()) for path in sys.path)
    return tuple(
        path
        for path in dict.fromkeys(paths)
        if not any(_is_below(path, prefix) for prefix in installed)
    )


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)
