"""ddp_script: a script that was written for torchrun becomes a Prefect task, as it is."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Unpack

from prefect import Task, unmapped
from prefect.futures import PrefectFuture
from prefect.utilities.annotations import BaseAnnotation
from prefect.utilities.collections import isiterable

from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.lazy import exported_by
from prefect_torch_ddp.protocol.rank import MODULE_FLAG, is_script
from prefect_torch_ddp.rank.context import RankContext
from prefect_torch_ddp.rank.lazy_dataset import refuse_for_script
from prefect_torch_ddp.tasks.ddp_task import STATE, DdpTaskOptions, GangTask, ddp_task
from prefect_torch_ddp.tasks.gangs.task_training import TaskCode
from prefect_torch_ddp.tasks.watch.watched_task import watched_list


@exported_by("prefect_torch_ddp")
def ddp_script(
    script: str | os.PathLike[str],
    args: Sequence[object] = (),
    *,
    resume_args: Sequence[object] = (),
    **options: Unpack[DdpTaskOptions],
) -> Task[..., None]:
    """Turn a torchrun script into a Prefect task that runs on ranks of the flow's Dask cluster.

    The script needs no changes: it initialises the process group from the environment and writes
    its own checkpoints. A call of the task may add arguments, `train("--seed", 1)`, so the task can
    be mapped: `train.map(unmapped("--seed"), [1, 2])`, with Prefect's `unmapped`. In the script,
    `current_context()` returns the RankContext; under torchrun it returns None.

    Args:
        script: path of the script, readable on every worker, or `"-m package.module"`. A relative
            path is resolved against the current directory of this call.
        args: the script's `sys.argv[1:]`; each value is converted to a string.
        resume_args: arguments to add after a restart or a retry of the same training, with which
            the script continues from its own checkpoint.
        **options: those of `ddp_task`. The default of `process_group` is "user", and that of the
            task's name is the script's name.

    Returns:
        The task. Its result is None. Files that the script writes aren't collected. The run record
        of a call, and what `sweep_report` returns, has the arguments of the task and of the call as
        texts, unless they are long or look like secrets: `ddp_script("train.py", best["args"])`
        gives them again.

    Raises:
        InvalidParamsError: an option is unknown or has an invalid value, `args` or `resume_args` is
            no list, an argument is a Dask collection, or `script` doesn't name a script. When the
            task is called: the script's file doesn't exist.

    Example:
        Run a script on two ranks as torchrun would:

            from prefect_torch_ddp import ddp_script

            train = ddp_script(
                "train.py", ["--lr", 0.1], resume_args=["--resume"], world_size=2, retries=2
            )
    """
    named = os.fspath(script)
    _check(named, args=args, resume_args=resume_args)
    args, resume_args = tuple(args), tuple(resume_args)  # the caller may go on to change a list
    path = None if named.startswith(MODULE_FLAG) else Path(named).absolute()
    what = named if path is None else str(path)

    def run(ctx: RankContext, *more: object) -> None:
        # Not at the top: this function travels by value, and only ranks need it.
        from prefect_torch_ddp.rank.generators import seed_rank  # noqa: PLC0415
        from prefect_torch_ddp.rank.process.script import run_script  # noqa: PLC0415

        seed_rank(ctx.seed, 0, ctx.rank)  # under torchrun, ranks draw different numbers too
        run_script(what, [*args, *more, *(resume_args if ctx.attempt > 1 else ())])

    name = named.removeprefix(MODULE_FLAG).strip() if path is None else path.stem
    run.__name__ = run.__qualname__ = name.rpartition(".")[2]
    run.__doc__ = f"Run {named} on every rank."
    run.runs_script = what  # type: ignore[attr-defined]  # for `Call.code`
    options.setdefault("name", name)
    options.setdefault("process_group", "user")
    task: Any = ddp_task(**options)(run)
    task.__class__ = ScriptTask
    given, on_resume = (tuple(map(str, each)) for each in (args, resume_args))
    task.code = TaskCode(str(what), named, path, (given, on_resume))
    return task.with_params(task.params)  # type: ignore[no-any-return]


def _check(script: str, **arguments: Sequence[object]) -> None:
    if not is_script(script):
        msg = f"script is {script!r}; give the path of a .py file, or '-m package.module'"
        raise InvalidParamsError(msg)
    for name, given in arguments.items():
        if isinstance(given, str | bytes) or not isinstance(given, Sequence):
            msg = f"{name} is {given!r}; give a list of arguments, such as ['--lr', 0.1]"
            raise InvalidParamsError(msg)
        for value in given:
            refuse_for_script(value, script)


class ScriptTask(GangTask[..., None]):
    """A script as a task; it looks for the file before work starts."""

    def map(self, *args: Any, **kwargs: Any) -> Any:
        """Submit it for each element of the lists among the arguments, which the script gets.

        Raises:
            InvalidParamsError: there is no list, or they are of different lengths.
        """
        calls = _calls([arg.result() if isinstance(arg, PrefectFuture) else arg for arg in args])
        if calls:
            return super().map(*calls, **kwargs)
        return [] if kwargs.get(STATE) else watched_list([], self.params.stop_grace_s)

    def _from_here(self) -> "ScriptTask":
        source = self.code.source
        if source is not None and not source.is_file():
            msg = f"there is no script {source}: give its path, from {Path.cwd()} or absolute"
            raise InvalidParamsError(msg)
        return super()._from_here()


def _calls(args: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return the arguments of each call of a `map`.

    Prefect would map over the tuple that `*more` is: one call with all elements.
    """
    columns: list[Any] = [
        list(arg) if isiterable(arg) and not isinstance(arg, BaseAnnotation) else None
        for arg in args
    ]
    lengths = {len(column) for column in columns if column is not None}
    if len(lengths) != 1:
        what = f"lists of {sorted(lengths)} elements" if lengths else "no list"
        msg = f"map was given {what}: pass lists of one length, as in map(['--seed=1', '--seed=2'])"
        raise InvalidParamsError(msg)
    (num_calls,) = lengths
    for at, arg in enumerate(args):
        if columns[at] is None:
            columns[at] = [arg.value if isinstance(arg, unmapped) else arg] * num_calls
    return list(zip(*columns, strict=True))
