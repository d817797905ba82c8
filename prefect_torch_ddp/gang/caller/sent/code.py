"""The code of a gang's call: its pickle, and the paths of its modules."""

import sys
from dataclasses import replace
from pathlib import Path

import cloudpickle

from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.gang.caller.sent.modules import let_modules_be_sent
from prefect_torch_ddp.gang.caller.sent.unsendable import unsendable
from prefect_torch_ddp.protocol.call import Call
from prefect_torch_ddp.protocol.rank import CodePaths, is_installed, package_folders


def pickle_call(call: Call) -> bytes:
    """Pickle the call, a script by its whole path; raises InvalidParamsError if that fails."""
    if isinstance(call.fn, str) and call.fn.endswith(".py"):
        call = replace(call, fn=str(Path(call.fn).resolve()))
    let_modules_be_sent()
    try:
        payload: bytes = cloudpickle.dumps(call)
    except Exception as error:
        parts = (unsendable(each.fn, each.args, each.kwargs) for each in (call.users_own, call))
        msg = next(filter(None, parts), None) or (
            f"{call.name} or its arguments can't be sent to the ranks: "
            f"{type(error).__name__}: {error}"
        )
        raise InvalidParamsError(msg) from error
    return payload


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
