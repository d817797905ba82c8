"""Owns level 2: a function becomes a Prefect task that runs on a gang of ranks."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

from prefect import Task

from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.params import DEFAULT_STORAGE, CheckpointParams, Determinism
from prefect_torch_ddp.protocol.rank import Backend
from prefect_torch_ddp.rank.context import RankContext
from prefect_torch_ddp.tasks.gang_task import GangOptions, GangTask, run_as_task
from prefect_torch_ddp.tasks.train import is_worth_a_retry
from prefect_torch_ddp.tasks.watch.cancel import or_cancelled

P = ParamSpec("P")
R = TypeVar("R")
RankFunction = Callable[Concatenate[RankContext, P], R]


@overload
def ddp_task(fn: RankFunction[P, R], /) -> Task[P, R]: ...


@overload
def ddp_task(
    *,
    world_size: int | None = None,
    ranks_per_worker: int = 1,
    backend: Backend = "auto",
    storage: str = DEFAULT_STORAGE,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    checkpoint: CheckpointParams | None = None,
    max_restarts: int = 0,
    min_world_size: int | None = None,
    workers_timeout_s: float = 60.0,
    queue_timeout_s: float | None = None,
    progress_timeout_s: float | None = 60.0,
    resources: Mapping[str, float] | None = None,
    interface: str | None = None,
    stop_grace_s: float = 20.0,
    determinism: Determinism = "default",
    virtual_ranks: int | None = None,
    resume_from: str | None = None,
    ledger: bool = False,
    **task_options: Any,
) -> Callable[[RankFunction[P, R]], Task[P, R]]: ...


def ddp_task(  # noqa: PLR0913 - a decorator's options are its documentation
    fn: RankFunction[P, R] | None = None,
    /,
    *,
    world_size: int | None = None,
    ranks_per_worker: int = 1,
    backend: Backend = "auto",
    storage: str = DEFAULT_STORAGE,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    checkpoint: CheckpointParams | None = None,
    max_restarts: int = 0,
    min_world_size: int | None = None,
    workers_timeout_s: float = 60.0,
    queue_timeout_s: float | None = None,
    progress_timeout_s: float | None = 60.0,
    resources: Mapping[str, float] | None = None,
    interface: str | None = None,
    stop_grace_s: float = 20.0,
    determinism: Determinism = "default",
    virtual_ranks: int | None = None,
    resume_from: str | None = None,
    ledger: bool = False,
    **task_options: Any,
) -> Task[P, R] | Callable[[RankFunction[P, R]], Task[P, R]]:
    """Make a function a Prefect task that runs on `world_size` ranks of the flow's Dask
    cluster.

    The function takes a RankContext first; the task is called without it, and gives rank 0's
    return value. Its flow uses a DaskTaskRunner. What the function tracks is resumed from its
    newest checkpoint by a retry of the task, and by the same call in a retry of the flow run:
    of the same task, by its name, with equal arguments, the first such call, the second, ... A
    call that failed is taken up by the next one like it. `with_options` also takes the options
    below.

    Args:
        fn: the function, when the decorator is written without parentheses.
        world_size: number of ranks; None takes one for each worker.
        ranks_per_worker: ranks on each Dask worker.
        backend: "auto" takes nccl where CUDA is, else gloo.
        storage: where checkpoints, metrics and results go: a directory, an s3:// URI, or a
            Prefect block reference.
        seed: seeds everything random.
        options: what the function finds as `ctx.options`.
        checkpoint: when checkpoints are written and which are kept.
        max_restarts: how often a gang that failed is started again at once, on warm workers,
            before Prefect's retries count. As with those none is made unless asked for: the
            function would run a second time.
        min_world_size: how few ranks will do while workers are missing; None: no fewer than
            `world_size`.
        workers_timeout_s: how long to wait until the cluster has enough workers.
        queue_timeout_s: how long to wait for workers that are busy; None: as long as it takes.
        progress_timeout_s: how long the gang may go without progress in a step, once it has
            begun the first, before it ends as hung and retried; see `run_gang`. None: as long
            as it takes.
        resources: Dask resources that the gang takes from each of its workers, e.g. `{"GPU":
            1}`; others aren't used.
        interface: the network that the ranks talk by: an interface's name, or `"10.1.0.0/16"`;
            None: the one Dask uses.
        stop_grace_s: how long ranks in `ctx.steps` get, when the task is cancelled, to stop
            after one step and to save it.
        determinism: "elastic" gives the same bits on every number of ranks that divides
            `virtual_ranks`, by `ctx.micro_batches`.
        virtual_ranks: the most ranks that the training may ever have; see determinism.
        resume_from: where a training begins that has no checkpoint of its own: another run's
            id, as the log says it, or `<storage>/runs/<id>`, either perhaps with
            `/checkpoints/step-00000400`.
        ledger: put on record which samples each step trains on; `read_ledger` checks it.
        **task_options: Prefect's own task options: retries, retry_delay_seconds, tags,
            timeout_seconds, ...
    """
    gang = GangOptions(
        world_size=world_size,
        ranks_per_worker=ranks_per_worker,
        backend=backend,
        storage=storage,
        seed=seed,
        options=dict(options or {}),
        checkpoint=checkpoint or CheckpointParams(),
        max_restarts=max_restarts,
        min_world_size=min_world_size,
        workers_timeout_s=workers_timeout_s,
        queue_timeout_s=queue_timeout_s,
        progress_timeout_s=progress_timeout_s,
        resources=resources,
        interface=interface,
        stop_grace_s=stop_grace_s,
        determinism=determinism,
        virtual_ranks=virtual_ranks,
        resume_from=resume_from,
        ledger=ledger,
    )

    def decorate(fn: RankFunction[P, R]) -> Task[P, R]:
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            value: R = or_cancelled(run_as_task, fn, args, kwargs)
            return value

        functools.update_wrapper(run, fn)
        # Prefect asks this for the parameters, and looks through `__wrapped__` for the source
        # that cached results depend on.
        run.__signature__ = _signature_without_rank(fn)  # type: ignore[attr-defined]
        return GangTask.of(run, gang, **{"retry_condition_fn": is_worth_a_retry, **task_options})

    return decorate if fn is None else decorate(fn)


def _signature_without_rank(fn: Callable[..., Any]) -> inspect.Signature:
    signature = inspect.signature(fn)
    parameters = list(signature.parameters.values())
    if not parameters or parameters[0].kind not in (
        parameters[0].POSITIONAL_ONLY,
        parameters[0].POSITIONAL_OR_KEYWORD,
    ):
        msg = f"{fn.__qualname__} takes no positional argument; a ddp_task's function takes a RankContext first"
        raise InvalidParamsError(msg)
    return signature.replace(parameters=parameters[1:])
