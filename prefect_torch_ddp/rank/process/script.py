"""A script in a rank: a file, or a module of a package, that runs as torchrun runs it."""

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.protocol.rank import MODULE_FLAG
from prefect_torch_ddp.rank.process.logs import leave_root_to_script


def run_script(script: str, args: Sequence[object]) -> None:
    """Run `train.py`, or `-m package.module`, as `__main__`; exit code 0 is success.

    Args:
        script: a path, or `-m` and the name of a module that can be imported.
        args: its `sys.argv[1:]`, as texts.

    Raises:
        InvalidParamsError: there is no such file.
        SystemExit: it ended with another exit code.
    """
    sys.argv = [script, *map(str, args)]
    leave_root_to_script()
    try:
        if script.startswith(MODULE_FLAG):
            name = script.removeprefix(MODULE_FLAG).strip()
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        elif not Path(script).is_file():
            msg = (
                f"there is no script {script} here: give a path that every worker can read, such "
                "as one on a shared file system"
            )
            raise InvalidParamsError(msg)
        else:
            sys.path.insert(0, str(Path(script).parent))
            runpy.run_path(script, run_name="__main__")
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            raise
