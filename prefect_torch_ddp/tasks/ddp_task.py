"""Owns level 2: a function becomes a Prefect task that runs on a gang of ranks."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

from prefect import Task
from prefect.runtime import task_run

from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.gang.launch import run_gang
from prefect_torch_ddp.messages import Backend
from prefect_torch_ddp.params import DEFAULT_STORAGE, CheckpointParams
from prefect_torch_ddp.rank.config import CheckpointPolicy, Determinism, RankConfig, check_virtual_ranks
from prefect_torch_ddp.rank.context import RankContext
from prefect_torch_ddp.tasks.blocks import resolve_storage
from prefect_torch_ddp.tasks.cancel import or_cancelled
from prefect_torch_ddp.tasks.cluster import current_client
from prefect_torch_ddp.tasks.run import RUN_WITH_CONTEXT, log_to_run, slug
from prefect_torch_ddp.tasks.run_journal import RunJournal
from prefect_torch_ddp.tasks.train import is_worth_a_retry
from prefect_torch_ddp.tasks.watched_task import WatchedTask

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
    **task_options: Any,
) -> Task[P, R] | Callable[[RankFunction[P, R]], Task[P, R]]:
    """Make a function a Prefect task that runs on `world_size` ranks of the flow's Dask cluster.

    The function takes a RankContext first; the task is called without it, and gives rank 0's return value. A retry resumes
    from the newest checkpoint of what the function tracks. Its flow uses a DaskTaskRunner.

    Args:
        fn: the function, when the decorator is written without parentheses.
        world_size: number of ranks; None takes one for each worker.
        ranks_per_worker: ranks on each Dask worker.
        backend: "auto" takes nccl where CUDA is, else gloo.
        storage: where checkpoints, metrics and results go: a directory, an s3:// URI, or a Prefect block reference.
        seed: seeds everything random.
        options: what the function finds as `rank.options`.
        checkpoint: when checkpoints are written and which are kept.
        max_restarts: how often a gang that failed is started again at once, on warm workers, before Prefect's retries count. As
            with those none is made unless asked for: the function would run a second time.
        min_world_size: how few ranks will do while workers are missing; None: no fewer than `world_size`.
        workers_timeout_s: how long to wait until the cluster has enough workers.
        queue_timeout_s: how long to wait for workers that are busy; None: as long as it takes.
        progress_timeout_s: how long the gang may go without progress in a step, once it has begun the first, before it ends
            as hung and retried; see `run_gang`. None: as long as it takes.
        resources: Dask resources that the gang takes from each of its workers, e.g. `{"GPU": 1}`; others aren't used.
        interface: the network that the ranks talk by: an interface's name, or `"10.1.0.0/16"`; None: the one Dask uses.
        stop_grace_s: how long ranks in `rank.steps` get, when the task is cancelled, to stop after one step and to save it.
        determinism: "elastic" gives the same bits on every number of ranks that divides `virtual_ranks`, by `rank.micro_batches`.
        virtual_ranks: the most ranks that the training may ever have; see determinism.
        **task_options: Prefect's own task options: retries, retry_delay_seconds, tags, timeout_seconds, ...
    """
    check_virtual_ranks(determinism, virtual_ranks, world_size)

    def decorate(fn: RankFunction[P, R]) -> Task[P, R]:
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            run_id = f"{slug(str(task_run.task_name))}-{task_run.id}"
            where = resolve_storage(storage)
            where.check_writable()  # one that ignores conditions would let two attempts commit

            def arguments(attempt: int) -> tuple[Any, ...]:
                config = RankConfig(
                    run_id=run_id,
                    attempt=attempt,
                    stage="task",
                    storage=where,
                    options=dict(options or {}),
                    seed=seed,
                    checkpoint=CheckpointPolicy(**(checkpoint or CheckpointParams()).model_dump()),
                    determinism=determinism,
                    virtual_ranks=virtual_ranks,
                )
                return config, fn, args, kwargs

            def on_gang() -> R:
                with current_client() as client:
                    values: list[R] = run_gang(
                        client,
                        RUN_WITH_CONTEXT,
                        args=arguments,
                        world_size=world_size,
                        ranks_per_worker=ranks_per_worker,
                        backend=backend,
                        workers_timeout_s=workers_timeout_s,
                        queue_timeout_s=queue_timeout_s,
                        progress_timeout_s=progress_timeout_s,
                        resources=resources,
                        interface=interface,
                        stop_grace_s=stop_grace_s,
                        name=run_id,
                        max_restarts=max_restarts,
                        min_world_size=min_world_size,
                        world_size_divides=virtual_ranks,
                        journal=RunJournal(where, run_id, knows_steps=False),
                        on_event=log_to_run(),
                    )
                return values[0]

            return or_cancelled(on_gang)

        functools.update_wrapper(run, fn)
        # Prefect asks this for the parameters, and looks through `__wrapped__` for the source that cached results depend on.
        run.__signature__ = _signature_without_rank(fn)  # type: ignore[attr-defined]
        made = WatchedTask(run, **{"retry_condition_fn": is_worth_a_retry, **task_options})
        made.stop_grace_s = stop_grace_s
        return made

    return decorate if fn is None else decorate(fn)


def _signature_without_rank(fn: Callable[..., Any]) -> inspect.Signature:
    signature = inspect.signature(fn)
    parameters = list(signature.parameters.values())
    if not parameters or parameters[0].kind not in (parameters[0].POSITIONAL_ONLY, parameters[0].POSITIONAL_OR_KEYWORD):
        msg = f"{fn.__qualname__} takes no positional argument; a ddp_task's function takes a RankContext first"
        raise InvalidParamsError(msg)
    return signature.replace(parameters=parameters[1:])
