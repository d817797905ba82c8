"""The code of a gang's call: its pickle, its name, and the paths of its modules."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle

from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.gang.caller.unsendable import unsendable
from prefect_torch_ddp.protocol.rank import CodePaths, is_installed, package_folders


def pickle_call(
    fn: Callable[..., Any] | str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bytes:
    """Pickle the call, a script by its whole path; raises InvalidParamsError where that fails."""
    if isinstance(fn, str) and fn.endswith(".py"):
        fn = str(Path(fn).resolve())
    try:
        payload: bytes = cloudpickle.dumps((fn, args, kwargs))
    except Exception as error:
        if brings_context(fn) and len(args) == 4:  # noqa: PLR2004 - the user's call, and its context
            _, fn, own_args, kwargs = args
            args = (None, *own_args)
        msg = unsendable(fn, args, kwargs) or (
            f"{name_of(fn)} or its arguments can't be sent to the ranks: "
            f"{type(error).__name__}: {error}"
        )
        raise InvalidParamsError(msg) from error
    return payload


def brings_context(fn: Callable[..., Any] | str) -> bool:
    """Whether this is our own entry with a RankContext, which says from when it is watched."""
    return isinstance(fn, str) and fn.startswith("prefect_torch_ddp.rank.stages:")


def name_of(fn: Callable[..., Any] | str) -> str:
    """Return the function's name for people."""
    return fn if isinstance(fn, str) else getattr(fn, "__qualname__", type(fn).__name__)


def own_code_paths() -> CodePaths:
    """Return the caller's import paths with the user's own code, without installed packages.

    A function that is pickled by reference must be importable at its rank, also when the Dask
    worker was started elsewhere on the same machine or a shared file system; and a name that the
    user's own module shares with an installed package must mean the same there.
    """
    paths = list(dict.fromkeys(Path(path).resolve() for path in sys.path))
    where = [paths.index(folder) for folder in package_folders() if folder in paths]
    boundary = min(where, default=len(paths))
    own = [(at, str(path)) for at, path in enumerate(paths) if not is_installed(path)]
    return CodePaths(
        first=tuple(path for at, path in own if at < boundary),
        last=tuple(path for at, path in own if at > boundary),
    )
