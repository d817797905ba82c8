"""The training of one run of a ddp_task: its name, its record, and its gang.

With a `run_key` a call's training is known by a digest of its arguments' content.
"""

import hashlib
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Any, Self

from prefect.context import TaskRunContext
from prefect.logging import get_run_logger
from pydantic import model_validator

from prefect_torch_ddp.blocks import resolve_storage
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.params import ContextParams
from prefect_torch_ddp.protocol.call import Call
from prefect_torch_ddp.protocol.rank import ProcessGroupMode
from prefect_torch_ddp.tasks.clusters.current import current_client
from prefect_torch_ddp.tasks.gangs.checked_ledger import checked_ledger
from prefect_torch_ddp.tasks.gangs.given import GivenCollections
from prefect_torch_ddp.tasks.gangs.preparation import PreparationPage
from prefect_torch_ddp.tasks.gangs.training_gang import training_gang
from prefect_torch_ddp.tasks.train_run import RUN_TASK, rank_config, run_id_of, slug
from prefect_torch_ddp.tracking.description import draft_record, experiment_of, values_for_record
from prefect_torch_ddp.tracking.digest import own_of, value_digest
from prefect_torch_ddp.tracking.recorder import RunRecorder
from prefect_torch_ddp.tracking.resume import began_from, resume_point, weights_from


class TaskParams(ContextParams):
    """The parameters of a ddp_task beyond Prefect's own."""

    run_key: str | None = None
    """Names a training within its flow run. Calls of the task with the same key and equal arguments
    are one training, which each call resumes, also when the flow run is retried. If the training
    had ended, the function runs again from the last checkpoint, and adds no step. With Prefect's
    `persist_result=True` it doesn't run again: Prefect returns the value that it kept. In another
    process equal arguments may count as different if they are pickled by value, such as functions
    and classes of `__main__` and instances of such classes.
    Tasks of one name are told apart by their functions: by the name and the file's name, not its
    folder, and functions that another one made by the plain values that it gave them. If that isn't
    enough, as for `fit` of `vision/train.py` and of `text/train.py`, give the tasks names of their
    own.
    The key may have names of arguments in braces, as in Prefect's `task_run_name`: with `lr-{lr}`
    each learning rate is its own experiment.
    None: each task run is its own training, which only its own retries resume."""
    process_group: ProcessGroupMode = "default"
    """default: initialised before the function runs; user: the function, or a library that it uses,
    initialises it from the environment, as under torchrun; none: there is none. `ctx.wrap` and, on
    several ranks, `ctx.track` need one."""

    @model_validator(mode="after")
    def _check_group(self) -> Self:
        self.check_has_group(self.process_group)
        return self


@dataclass(frozen=True)
class TaskCode:
    """What code a task's ranks run, for the run's record and for comparisons."""

    module: str
    """Where it is from, under the name that the module has when it is imported."""
    workload: str
    source: Path | None
    """The file that is kept with the run, if it is one."""
    script_args: tuple[tuple[str, ...], tuple[str, ...]] | None = None
    """Of a script: what each call gives it, and what a resumed one does too. None: a function."""

    def of_script(self) -> tuple[object, ...]:
        """Return what tells a script's task from another's: Prefect sees one function in all."""
        if self.script_args is None:
            return ()
        source = self.source if self.source is not None and self.source.is_file() else None
        content = "" if source is None else hashlib.sha256(source.read_bytes()).hexdigest()
        return self.module, self.script_args, content


def train(
    context: TaskRunContext,
    params: TaskParams,
    code: TaskCode,
    call: Call,
) -> Any:
    """Make a call, of which a RankContext comes first, on the ranks of a task run.

    Returns rank 0's value.
    """
    storage = resolve_storage(params.storage)
    signature = inspect.signature(context.task.fn)
    given = GivenCollections.in_call(call, signature)
    given.check_writable(storage)  # one that ignores conditions would let two attempts commit
    call = given.call
    # Prefect has filled in the defaults.
    arguments = signature.bind(*call.args, **call.kwargs).arguments
    params = with_key_of(params, arguments)
    run_id = task_run_id(context, params, code, call)
    experiment = experiment_of_task(context.task.name, params, code)
    resume_from = resume_point(params, storage, run_id, experiment)
    logger = get_run_logger()
    logger.info("trains as run %s in %s", run_id, storage.uri)
    draft = draft_record(
        params,
        run_id,
        experiment,
        storage,
        workload=code.workload,
        arguments=values_for_record(_as_named(arguments, signature, code)),
        weights_from=weights_from(resume_from),
        began_from=began_from(params, resume_from, storage),
    )
    if given.found:
        with (
            current_client() as client,
            PreparationPage(experiment, run_id, per_task=True) as page,
        ):
            call = given.computed(client, storage, logger, show=page.show)
    recorder = RunRecorder(storage, draft, code.source)
    with training_gang(
        params,
        recorder,
        storage,
        name=run_id,
        is_workload=False,
        process_group=params.process_group,
        fn=RUN_TASK,
        args=lambda attempt: (
            rank_config(params, run_id, attempt, "task", storage, resume_from=resume_from),
            call.fn,
            call.args,
            call.kwargs,
        ),
        **params.options_of_gang(),
    ) as values:
        recorder.returned(values[0])
    if params.ledger:
        checked_ledger(storage, run_id)
    return values[0]


def _as_named(
    arguments: Mapping[str, Any], signature: inspect.Signature, code: TaskCode
) -> dict[str, Any]:
    """Return arguments by the names that a call gave: those of `**kwargs` aren't one argument.

    A script has `args`, its own and those of the call, as `ddp_script` takes them.
    """
    if code.script_args is not None:
        more = (str(each) for values in arguments.values() for each in values)
        return {"args": [*code.script_args[0], *more]}
    named = dict(arguments)
    for each in signature.parameters.values():
        if each.kind is each.VAR_KEYWORD:
            named |= named.pop(each.name, {})
    return named


def check_run_key(params: TaskParams, signature: inspect.Signature) -> None:
    """Refuse a `run_key` that names what the task has no argument for.

    Raises:
        InvalidParamsError: it does, its braces aren't closed, or there are trackers.
    """
    named = _named_in(params.run_key)
    if unknown := named - signature.parameters.keys():
        takes = ", ".join(signature.parameters) or "none"
        msg = f"run_key={params.run_key!r} names {sorted(unknown)}; the task's arguments: {takes}"
        raise InvalidParamsError(msg)
    if named and params.trackers:
        msg = (
            f"run_key={params.run_key!r} makes an experiment of each call, and trackers are fed an "
            f"experiment at a time: leave out trackers, and run `prefect-torch-ddp sync` later"
        )
        raise InvalidParamsError(msg)


def with_key_of(params: TaskParams, arguments: Mapping[str, Any]) -> TaskParams:
    """Return the parameters of a call whose arguments its `run_key` may name."""
    if not _named_in(params.run_key):
        return params
    try:
        key = str(params.run_key).format(**arguments)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        msg = f"run_key={params.run_key!r} can't be filled in from the call's arguments: {error}"
        raise InvalidParamsError(msg) from error
    return params.model_copy(update={"run_key": key})


def _named_in(key: str | None) -> set[str]:
    try:
        fields = [name for _, name, _, _ in Formatter().parse(key or "") if name is not None]
    except ValueError as error:
        msg = f"run_key={key!r} has a brace that names no argument: {error}; write {{{{ or }}}}"
        raise InvalidParamsError(msg) from error
    return {re.split(r"[.\[]", name)[0] for name in fields}


def experiment_of_task(name: str, params: TaskParams, code: TaskCode) -> str:
    """Return what the runs of a task in this flow, or deployment, have in common."""
    key = params.run_key
    return experiment_of(code.module, name if key is None else f"{name}:{key}")


def task_run_id(context: TaskRunContext, params: TaskParams, code: TaskCode, call: Call) -> str:
    """Name the training of a task run: its own, or with a `run_key` that of all equal calls."""
    if params.run_key is None:
        return run_id_of(context.task.name, context.task_run.id)
    # All that makes another training of it: never may one resume a checkpoint of the other.
    chosen = params.model_dump(include={"seed", "options", "determinism", "virtual_ranks"})
    own = own_of(call.fn) if code.script_args is None else (code.module, code.script_args)
    where = (str(context.task_run.flow_run_id), context.task.name, *own)
    digest = value_digest(
        (where, params.run_key, params.resume_from, chosen, tuple(call.args), dict(call.kwargs))
    )
    return f"{slug(context.task.name)}-{slug(params.run_key)}-{digest[:12]}"
