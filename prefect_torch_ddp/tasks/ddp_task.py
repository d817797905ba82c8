"""ddp_task, level 2: a function becomes a Prefect task that runs on a gang of ranks."""

import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, Unpack, overload

from prefect import Task
from prefect.cache_policies import NO_CACHE, CachePolicy
from prefect.context import TaskRunContext
from prefect.tasks import TaskOptions

from prefect_torch_ddp.blocks import absolute_reference, check_reference
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.gang.checks import check_function, checked
from prefect_torch_ddp.lazy import exported_by
from prefect_torch_ddp.option_lines import add_option_lines
from prefect_torch_ddp.params import ContextOptions
from prefect_torch_ddp.protocol.call import Call
from prefect_torch_ddp.protocol.rank import ProcessGroupMode
from prefect_torch_ddp.rank.context import RankContext
from prefect_torch_ddp.tasks.calls.submitting import refuse_unbound, submitting
from prefect_torch_ddp.tasks.cancel.states import or_cancelled
from prefect_torch_ddp.tasks.gangs.task_training import (
    TaskCode,
    TaskParams,
    check_run_key,
    experiment_of_task,
    train,
)
from prefect_torch_ddp.tasks.train import is_worth_a_retry
from prefect_torch_ddp.tasks.watch.beside_flow import accompany
from prefect_torch_ddp.tasks.watch.watched_task import watched, watched_list
from prefect_torch_ddp.tracking.digest import value_digest

P = ParamSpec("P")
R = TypeVar("R")
RankFunction = Callable[Concatenate[RankContext, P], R]
STATE = "return_state"
"""A keyword of Prefect's, whose own wait for the state isn't watched."""


@exported_by("prefect_torch_ddp")
class DdpTaskOptions(ContextOptions, TaskOptions, total=False):
    """Options of `ddp_task` by keyword, which it explains, and Prefect's task options.

    Example:
        A decorator of yours with another default:

            from typing import Any, Unpack
            from prefect_torch_ddp import DdpTaskOptions, ddp_task

            def patient_task(fn: Any, **options: Unpack[DdpTaskOptions]) -> Any:
                options.setdefault("retries", 3)
                return ddp_task(fn, **options)
    """

    world_size: int | None
    run_key: str | None
    process_group: ProcessGroupMode


@overload
def ddp_task(fn: RankFunction[P, R], /) -> Task[P, R]: ...


@overload
def ddp_task(**options: Unpack[DdpTaskOptions]) -> Callable[[RankFunction[P, R]], Task[P, R]]: ...


@exported_by("prefect_torch_ddp")
def ddp_task(
    fn: RankFunction[P, R] | None = None, /, **options: Unpack[DdpTaskOptions]
) -> Task[P, R] | Callable[[RankFunction[P, R]], Task[P, R]]:
    """Turn a function into a Prefect task that runs on ranks of the flow's Dask cluster.

    The function's first parameter is a RankContext. Call the task without it; the task returns
    rank 0's value. The flow must use a DaskTaskRunner. A retry of the task restores tracked objects
    from the newest checkpoint and continues there; see `run_key` for retries of the flow run. The
    task's `with_options` takes the same options.

    If an argument is a Dask DataFrame, Array or Bag, or an xarray object of Dask arrays, the Dask
    workers compute it and write it to the task's storage, once. The function gets the dataset's
    storage instead, for `data.table` or `data.array`.

    In a test, call the function directly, without Prefect or Dask:
    `with RankContext.local() as ctx: fit.fn(ctx, ...)`.

    Args:
        fn: the function, if the decorator is written without parentheses.
        **options: Prefect's task options (retries, retry_delay_seconds, tags, timeout_seconds,
            ...), and the options listed below, with their defaults.

    Raises:
        InvalidParamsError: an option is unknown or has an invalid value.
        GangError: when the task is called: the gang failed; see `run_gang` for the subclasses.
        StorageError: when the task is called: the storage can't be used.

    Example:
        A task that trains on two ranks, in your flow:

            from prefect_torch_ddp import RankContext, ddp_task

            @ddp_task(world_size=2, retries=2)
            def fit(ctx: RankContext, lr: float) -> float:
                model = ctx.wrap(torch.nn.Linear(1, 1))
                optimizer = torch.optim.SGD(model.parameters(), lr=lr)
                ctx.track(model=model, optimizer=optimizer)
                loader = ctx.loader(dataset(), global_batch_size=16)
                for inputs, targets in ctx.steps(loader, epochs=20):
                    loss = mse_loss(model(inputs.to(ctx.device)), targets.to(ctx.device))
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                return loss.item()

            @flow(task_runner=DaskTaskRunner(cluster_kwargs={"n_workers": 2}))
            def nightly() -> float:
                return fit.submit(lr=0.1).result()
    """

    def decorate(fn: RankFunction[P, R]) -> Task[P, R]:
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            if _brings_context(fn, args, kwargs):  # a test of the function, in one process
                value: R = fn(*args, **kwargs)  # type: ignore[arg-type]
            else:
                value = or_cancelled(_run_as_task, fn, args, kwargs)
            return value

        functools.update_wrapper(run, fn)
        # Prefect asks this for the parameters, and looks through `__wrapped__` for the source
        # that cached results depend on.
        run.__signature__ = _signature_without_context(fn)  # type: ignore[attr-defined]
        task: GangTask[P, R] = GangTask(run, **{"retry_condition_fn": is_worth_a_retry, **prefects})
        task.code = _code_of(fn)
        return task.with_params(params)

    ours, prefects = _parted(options)
    params = checked(TaskParams, ours)
    return decorate if fn is None else decorate(fn)


add_option_lines(ddp_task, TaskParams, TaskParams.model_fields)


def _parted(options: Mapping[str, object]) -> tuple[dict[str, Any], dict[str, Any]]:
    prefects = TaskOptions.__annotations__.keys()
    ours = {name: value for name, value in options.items() if name not in prefects}
    return ours, {name: value for name, value in options.items() if name in prefects}


def _code_of(fn: Callable[..., Any]) -> TaskCode:
    source = Path(getattr(getattr(fn, "__code__", None), "co_filename", ""))
    named = f"{fn.__module__}:{fn.__qualname__}"
    return TaskCode(_module_of(fn), named, source if source.is_file() else None)


def _module_of(fn: Callable[..., Any]) -> str:
    """Name the module that a function is from; that of a script by its file."""
    if fn.__module__ != "__main__":
        return fn.__module__
    main = sys.modules["__main__"]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None:  # python -m
        return str(spec.name.removesuffix(".__main__"))
    return Path(file).stem if file else fn.__module__


def _signature_without_context(fn: Callable[..., Any]) -> inspect.Signature:
    check_function(fn)
    signature = inspect.signature(fn)
    parameters = list(signature.parameters.values())
    if parameters and parameters[0].name in ("self", "cls"):
        what = f"{fn.__qualname__} is a method, and would get a RankContext as"
        msg = f"{what} {parameters[0].name}; make it a function that takes ctx first"
        raise InvalidParamsError(msg)
    if not parameters or parameters[0].kind not in (
        parameters[0].POSITIONAL_ONLY,
        parameters[0].POSITIONAL_OR_KEYWORD,
    ):
        needs = "a ddp_task's function takes a RankContext first"
        msg = f"{fn.__qualname__} takes no positional argument; {needs}"
        raise InvalidParamsError(msg)
    return signature.replace(parameters=parameters[1:])


def _brings_context(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call has the context already, which a task run is never given."""
    first = next(iter(inspect.signature(fn).parameters))
    return isinstance(args[0] if args else kwargs.get(first), RankContext)


class GangTask(Task[P, R]):
    """A task whose function runs on ranks; its futures are watched.

    It is stopped gracefully if its flow leaves it.
    """

    params = TaskParams()
    code = TaskCode("", "", None)

    def with_params(self, params: TaskParams) -> Self:
        """Take these parameters, which make another training of a call for Prefect's cache too."""
        check_run_key(params, inspect.signature(self.fn))
        check_reference(params.storage)
        self.params = params
        if isinstance(self.cache_policy, CachePolicy) and self.cache_policy != NO_CACHE:
            task: Any = self  # Prefect lets mypy infer a narrower type
            task.cache_policy = _CachedTraining.of(self.cache_policy, params, self.code)
        return self

    def _from_here(self) -> Self:
        """Return the task for a call of now, which stores where its caller means."""
        made = copy(self)
        storage = absolute_reference(self.params.storage)
        of_task = self.name, self.params, self.code
        accompany(self.params, storage, lambda: experiment_of_task(*of_task))
        return made.with_params(self.params.model_copy(update={"storage": storage}))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it, as any task."""
        refuse_unbound(self.fn, args, kwargs)
        return Task.__call__(self._from_here(), *args, **kwargs)

    def submit(self, *args: Any, **kwargs: Any) -> Any:
        """Submit it, as any task."""
        wants_state = kwargs.pop(STATE, False)
        task = self._from_here()
        with submitting(self.fn, args, kwargs):
            made: Any = Task.submit(task, *args, **kwargs)
        future = watched(made, self.params.stop_grace_s)
        return _state_of(future) if wants_state else future

    def map(self, *args: Any, **kwargs: Any) -> Any:
        """Submit it for each element, as any task."""
        wants_state = kwargs.pop(STATE, False)
        task = self._from_here()
        with submitting(self.fn, args, kwargs):
            made: Any = Task.map(task, *args, **kwargs)
        futures = watched_list(made, self.params.stop_grace_s)
        return [_state_of(each) for each in futures] if wants_state else futures

    def with_options(self, **options: Any) -> Self:
        """Make a task that differs in some options, Prefect's or those of `ddp_task`."""
        ours, prefects = _parted(options)
        given = {name: getattr(self.params, name) for name in self.params.model_fields_set}
        made = type(self).__new__(type(self))
        made.__dict__.update(super().with_options(**prefects).__dict__)
        made.code = self.code
        return made.with_params(checked(TaskParams, {**given, **ours}))


def _state_of(future: Any) -> Any:
    future.wait()
    return future.state


@dataclass(kw_only=True)
class _CachedTraining(CachePolicy):
    """Prefect's key for a call, and what else its training depends on; none if it has none."""

    inner: CachePolicy
    chosen: str

    @classmethod
    def of(cls, inner: CachePolicy, params: TaskParams, code: TaskCode) -> Self:
        inner = inner.inner if isinstance(inner, cls) else inner
        same = {"seed", "options", "determinism", "virtual_ranks", "world_size"}
        chosen = params.model_dump(include=same | {"resume_from", "run_key", "storage"})
        return cls(
            key_storage=inner.key_storage,
            isolation_level=inner.isolation_level,
            lock_manager=inner.lock_manager,
            inner=inner,
            chosen=value_digest((chosen, *own) if (own := code.of_script()) else chosen),
        )

    def compute_key(self, *args: Any, **kwargs: Any) -> str | None:
        key = self.inner.compute_key(*args, **kwargs)
        return key and f"{key}-{self.chosen[:16]}"


def _run_as_task(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run the function on the ranks of this process's task run; return rank 0's value."""
    context = TaskRunContext.get()
    task = None if context is None else context.task
    if context is None or not isinstance(task, GangTask):
        name = getattr(fn, "__name__", type(fn).__name__)
        msg = (
            f"{name}.fn was called without a RankContext: to run {name} in this process, as a test "
            f"does, give it one, `with RankContext.local() as ctx: {name}.fn(ctx, ...)`; to train "
            f"on a gang, call {name}(...) or {name}.submit(...) in a flow"
        )
        raise InvalidParamsError(msg)
    return train(context, task.params, task.code, Call(fn, tuple(args), kwargs))
