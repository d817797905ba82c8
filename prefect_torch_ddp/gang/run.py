"""run_gang, level 1: a function on N ranks across the workers of a Dask cluster."""

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack, cast

import cloudpickle
from distributed import Client

from prefect_torch_ddp.errors import GangError, InvalidParamsError
from prefect_torch_ddp.gang.attempt import run_attempt
from prefect_torch_ddp.gang.caller.lines import log_event
from prefect_torch_ddp.gang.caller.placement import GangSize
from prefect_torch_ddp.gang.caller.plan import CallParams, GangPlan
from prefect_torch_ddp.gang.caller.sent.code import pickle_call
from prefect_torch_ddp.gang.caller.sent.preload import preload_of
from prefect_torch_ddp.gang.checks import check_arguments, check_call, check_client, checked
from prefect_torch_ddp.gang.own_task import leave_thread, refuse_held_resources
from prefect_torch_ddp.gang.restarts import AttemptLog, CallAttemptLog, Restarts
from prefect_torch_ddp.lazy import exported_by
from prefect_torch_ddp.option_lines import add_option_lines
from prefect_torch_ddp.params import GangOptions, GangParams
from prefect_torch_ddp.protocol.call import Call
from prefect_torch_ddp.protocol.events import GangEvent
from prefect_torch_ddp.protocol.rank import ProcessGroupMode, is_script


@exported_by("prefect_torch_ddp")
def run_gang(  # noqa: PLR0913 - level 1 is one call
    client: Client,
    fn: Callable[..., Any] | str,
    args: Sequence[Any] | Callable[[int], Sequence[Any]] = (),
    kwargs: Mapping[str, Any] | None = None,
    world_size: int | None = None,
    *,
    process_group: ProcessGroupMode | None = None,
    world_size_divides: int | None = None,
    name: str | None = None,
    attempt: int = 1,
    attempt_log: object | None = None,
    on_event: Callable[[GangEvent], None] | None = None,
    **options: Unpack[GangOptions],
) -> list[Any]:
    """Run a function on `world_size` ranks. Each rank is a separate process on a Dask worker.

    Args:
        client: a synchronous Dask client. If you call this in a Dask task, the task secedes from
            its worker's thread pool.
        fn: a callable, `"package.module:function"`, or a script that was written for torchrun. Give
            a script by its path or as `"-m package.module"`; `args` is then its argv.
        args: positional arguments, or a function that takes an attempt's number and returns them.
        kwargs: keyword arguments, as one mapping, so that they can have any name.
        world_size: number of ranks. None: `ranks_per_worker` for each worker.
        process_group: "default": it is initialised before `fn` runs. "user": `fn` initialises it
            from the environment, as under torchrun. "none": there is no process group. None:
            "user" for a script, otherwise "default".
        world_size_divides: a number that must be a multiple of the number of ranks in every
            attempt.
        name: the name shown to gangs that wait for this one.
        attempt: number of the first attempt; ranks see it as TORCHELASTIC_RESTART_COUNT + 1.
        attempt_log: what `gang_report` gives. It numbers the attempts in place of `attempt`, and
            keeps failures beyond this call.
        on_event: called in this thread with every event. By default the ranks' lines are logged.
        **options: listed below, with their defaults.

    Returns:
        The values that `fn` returned, in rank order. CUDA tensors are returned on the CPU.

    Raises:
        InvalidParamsError: an argument is invalid; nothing was started.
        NotEnoughWorkersError: the cluster has too few workers, or they stayed busy.
        RankFailedError: a rank failed in the last attempt; `__cause__` is the rank's exception.
        WorkerLostError: a Dask worker that ran ranks is gone.
        GangHungError: the ranks made no progress. The message says which ranks did not arrive, and
            where they are in the code.
        GangCancelledError: the gang was cancelled from outside. The message says by what, and what
            was saved.
        SchedulerLostError: the Dask scheduler is gone, or doesn't answer.
        VersionConflictError: the caller and the workers, or two workers, have versions of a package
            that don't fit together.

    Example:
        The sum of `0 + 1`, on each of two ranks. The function may be in the same file:

            import torch
            import torch.distributed as dist
            from distributed import Client, LocalCluster
            from prefect_torch_ddp import run_gang

            def total() -> float:
                value = torch.tensor(float(dist.get_rank()))
                dist.all_reduce(value)
                return value.item()

            if __name__ == "__main__":
                with LocalCluster(n_workers=2, threads_per_worker=1) as cluster:
                    print(run_gang(Client(cluster), total, world_size=2))  # [1.0, 1.0]
    """
    check_client(client)
    call = fn if isinstance(fn, Call) else Call(fn)  # callers above give one with a RankContext
    check_call(call.fn, () if callable(args) else args, kwargs)
    mode = process_group or ("user" if is_script(call.fn) else "default")
    own = {"process_group": mode, "world_size_divides": world_size_divides}
    given = checked(CallParams, {"world_size": world_size, **own, **options})
    log = cast("AttemptLog", attempt_log or CallAttemptLog(attempt))
    plan = _plan(call, name or call.name, given, log)
    restarts = Restarts(log, given.max_restarts, on_event or log_event)

    def attempt_once(number: int) -> list[bytes]:
        made = call.with_arguments(args(number) if callable(args) else args, kwargs or {})
        preload, payload = preload_of(made.code, given.preload), pickle_call(made)
        check_arguments(made)
        whole = replace(plan, payload=payload, preload=preload)
        return _attempt(client, whole, restarts, number)

    refuse_held_resources(plan.resources)
    leave_thread()
    values = restarts.run(attempt_once)
    return [_unpickle_value(data, rank) for rank, data in enumerate(values)]


add_option_lines(run_gang, GangParams, GangOptions.__annotations__)


def _plan(call: Call, name: str, given: CallParams, log: AttemptLog) -> GangPlan:
    if given.max_world_size is not None and not call.takes_context:
        lacks = "fn takes no RankContext, so it has no checkpoint at which it could grow"
        msg = f"max_world_size is {given.max_world_size}, but {lacks}; leave it out"
        raise InvalidParamsError(msg)
    logs = cloudpickle.dumps(log.logs)
    return GangPlan.new(name, given, logs, watched_from_start=not call.takes_context)


def _attempt(client: Client, plan: GangPlan, restarts: Restarts, number: int) -> list[bytes]:
    given = plan.options
    plan = replace(
        plan,
        attempt=number,
        # As torchrun counts: from the start of the whole job, never beyond the maximum.
        max_restarts=number - 1 + restarts.num_left,
        full_size_s=restarts.full_size_s(given.workers_timeout_s),
    )
    most, least = restarts.size_to_ask_for(given.world_size), given.min_world_size
    each, divides = given.ranks_per_worker or 1, given.world_size_divides
    size = GangSize(most, least, each, divides, given.max_world_size, restarts.has_grown)
    return run_attempt(client, plan, size, restarts.receive)


def _unpickle_value(data: bytes, rank: int) -> Any:
    try:
        return pickle.loads(data)
    except Exception as error:
        msg = (
            f"the value that rank {rank} returned can't be rebuilt here: "
            f"{type(error).__name__}: {error}"
        )
        raise GangError(msg) from error
