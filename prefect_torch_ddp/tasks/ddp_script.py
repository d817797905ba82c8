"""ddp_script: a script that was written for torchrun becomes a Prefect task, as it is."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Unpack

from prefect import Task

from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.protocol.rank import MODULE_FLAG, is_script
from prefect_torch_ddp.rank.context import RankContext
from prefect_torch_ddp.tasks.ddp_task import DdpTaskOptions, GangTask, ddp_task
from prefect_torch_ddp.tasks.gangs.task_training import TaskCode


def ddp_script(
    script: str | os.PathLike[str],
    args: Sequence[object] = (),
    *,
    resume_args: Sequence[object] = (),
    **options: Unpack[DdpTaskOptions],
) -> Task[..., None]:
    """Make a script for torchrun a Prefect task that runs on ranks of the flow's Dask cluster.

    Nothing in the script has to change: it initialises the process group from the environment and
    keeps its own checkpoints. A call may add arguments, so that the task can be mapped:
    `train("--seed", 1)`. In the script `current_context()` returns its RankContext, and None under
    torchrun.

    Args:
        script: its path, which every worker has to reach, or `"-m package.module"`. A relative path
            is one of the directory where this is called.
        args: its `sys.argv[1:]`; each is made a text.
        resume_args: what is added if an attempt of the same training came before, a restart's or a
            retry's: what the script takes to continue from its own checkpoint.
        **options: those of `ddp_task`. By default `process_group` is "user", and the task has the
            script's name.

    Returns:
        The task. Its result is None; the script's files are its own matter.

    Raises:
        InvalidParamsError: an option is unknown or can't be so; `script` names no script, or, when
            the task is called, a file that isn't there.

    Example:
        What torchrun would be given, as a task for two ranks:

            from prefect_torch_ddp import ddp_script

            train = ddp_script(
                "train.py", ["--lr", 0.1], resume_args=["--resume"], world_size=2, retries=2
            )
    """
    named = os.fspath(script)
    if not is_script(named):
        msg = f"script is {named!r}; give the path of a .py file, or '-m package.module'"
        raise InvalidParamsError(msg)
    path = None if named.startswith(MODULE_FLAG) else Path(named).absolute()
    what = named if path is None else str(path)

    def run(ctx: RankContext, *more: object) -> None:
        # Not at the top: this function travels by value, and only ranks need it.
        from prefect_torch_ddp.rank.process.script import run_script  # noqa: PLC0415

        run_script(what, [*args, *more, *(resume_args if ctx.attempt > 1 else ())])

    name = named.removeprefix(MODULE_FLAG).strip() if path is None else path.stem
    run.__name__ = run.__qualname__ = name.rpartition(".")[2]
    run.__doc__ = f"Run {named} on every rank."
    options.setdefault("name", name)
    options.setdefault("process_group", "user")
    task: Any = ddp_task(**options)(run)
    task.__class__ = ScriptTask
    task.code = TaskCode(str(what), named, path)
    return task  # type: ignore[no-any-return]


class ScriptTask(GangTask[..., None]):
    """A script as a task; it looks for the file before work starts."""

    def _from_here(self) -> "ScriptTask":
        source = self.code.source
        if source is not None and not source.is_file():
            msg = f"there is no script {source}: give its path, from {Path.cwd()} or absolute"
            raise InvalidParamsError(msg)
        return super()._from_here()
