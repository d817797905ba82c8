"""Owns run_gang: level 1, a function on N ranks across the workers of a Dask cluster."""

import functools
import queue
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

from distributed import Client

from prefect_torch_ddp.gang.attempt_log import AttemptLog, CallAttemptLog
from prefect_torch_ddp.gang.caller.attempt import GangSize, Waits, drive
from prefect_torch_ddp.gang.caller.plan import GangPlan
from prefect_torch_ddp.gang.caller.stop import Leaving, follow, log_event
from prefect_torch_ddp.gang.options import (
    check_call,
    check_choice,
    check_client,
    check_counts,
    check_divides,
    check_interface,
    check_limits,
    check_resources,
    check_restarts,
)
from prefect_torch_ddp.gang.payload import (
    brings_context,
    name_of,
    own_code_paths,
    pickle_call,
    unpickle_value,
)
from prefect_torch_ddp.gang.restarts import FULL_SIZE_S, Restarts
from prefect_torch_ddp.gang.stop import StopSwitch
from prefect_torch_ddp.protocol.agent import Seniority
from prefect_torch_ddp.protocol.events import GangEvent
from prefect_torch_ddp.protocol.rank import Backend, Launcher, ProcessGroupMode


def run_gang(  # noqa: PLR0913 - level 1 is one call; what can be left out is keyword-only
    client: Client,
    fn: Callable[..., Any] | str,
    args: Sequence[Any] | Callable[[int], Sequence[Any]] = (),
    kwargs: Mapping[str, Any] | None = None,
    world_size: int | None = None,
    *,
    ranks_per_worker: int = 1,
    process_group: ProcessGroupMode = "default",
    backend: Backend = "auto",
    workers_timeout_s: float = 60.0,
    queue_timeout_s: float | None = None,
    rendezvous_timeout_s: float = 300.0,
    stop_grace_s: float = 8.0,
    progress_timeout_s: float | None = None,
    resources: Mapping[str, float] | None = None,
    interface: str | None = None,
    name: str | None = None,
    attempt: int = 1,
    max_restarts: int = 0,
    min_world_size: int | None = None,
    world_size_divides: int | None = None,
    attempt_log: AttemptLog | None = None,
    launcher: Launcher = "auto",
    on_event: Callable[[GangEvent], None] | None = None,
) -> list[Any]:
    """Run a function on `world_size` ranks, each a process of its own on a Dask worker, with
    the process group up.

    Args:
        client: a synchronous Dask client.
        fn: any callable, an import string `"package.module:function"`, or the path of a script
            (`"train.py"`, with `args` as its argv; give `process_group="user"` to a script
            written for torchrun).
        args: positional arguments, as one sequence, or a function that returns them for the
            number of an attempt.
        kwargs: keyword arguments, as one mapping, so that any name reaches `fn`.
        world_size: number of ranks; None takes all workers.
        ranks_per_worker: ranks on each Dask worker, whatever its threads.
        process_group: "default": initialised before `fn` runs; "user": `fn` initialises it from
            the environment, as under torchrun; "none": there is none.
        backend: "auto" takes nccl where CUDA is, else gloo.
        workers_timeout_s: how long to wait until the cluster has enough workers.
        queue_timeout_s: how long to wait for workers that are busy; None: as long as it takes.
        rendezvous_timeout_s: how long ranks wait for one another at the start.
        stop_grace_s: how long ranks that are in `ctx.steps` get to stop after the same step and
            to write a checkpoint, when the caller leaves by Ctrl-C or is cancelled; others are
            killed at once.
        progress_timeout_s: how long all ranks together may go without progress while those that
            are behind are idle, ten times that while they work or load; then the gang is ended
            as hung. Progress is a collective on the default process group, a step, a report, or
            `report_progress()`. None: as long as it takes.
        resources: Dask resources that the gang takes from each of its workers, e.g. `{"GPU":
            1}`; workers that don't have them aren't used.
        interface: the network that the ranks talk by, as an interface's name (`"ib0"`) or in
            CIDR notation (`"10.1.0.0/16"`; `"::/0"` is any IPv6 one); None: the address by
            which Dask knows each worker.
        name: what other gangs are told that they wait for.
        attempt: number of the first attempt, from 1; ranks see it as TORCHELASTIC_RESTART_COUNT
            + 1.
        max_restarts: how often a gang that failed is started again; `fn` has to find by itself
            where to go on. A cancel, an ImportError or SyntaxError, and the same exception at
            the same step twice in a row are not tried again.
        min_world_size: how few ranks will do when workers are missing: at the start after
            `workers_timeout_s`, at a restart after 10 s; None: no fewer than `world_size`.
        world_size_divides: a number that the number of ranks divides in every attempt; None:
            any number of ranks will do.
        attempt_log: numbers the attempts in place of `attempt`, and keeps their failures beyond
            this call.
        launcher: "auto" forks ranks from a warm helper process of each Dask worker, in
            milliseconds, where that is safe; "exec" starts a fresh Python for each.
        on_event: called in this thread for every event of the ranks; the default logs their
            lines to `prefect_torch_ddp.ranks` with the rank in front.

    Returns:
        What `fn` returned on each rank, in rank order; CUDA tensors come back on the CPU.

    Raises:
        InvalidParamsError: an argument can't work; nothing was started.
        NotEnoughWorkersError: too few workers, or they stayed busy.
        RankFailedError: a rank failed; all others were stopped. Its `__cause__` is the user's
            own exception. With restarts: that of the last attempt; it says so when another one
            was not made because it would have failed too.
        WorkerLostError: a Dask worker that held ranks is gone.
        GangHungError: the ranks made no progress; says who did not arrive, and where it is.
        GangCancelledError: the gang was cancelled from outside; says by what, after which step,
            and with which checkpoint.
    """
    check_client(client)
    check_call(fn, () if callable(args) else args, kwargs)
    check_counts(world_size=world_size, ranks_per_worker=ranks_per_worker)
    check_restarts(max_restarts, min_world_size, world_size)
    check_divides(world_size_divides, world_size, min_world_size)
    check_choice("process_group", process_group, get_args(ProcessGroupMode))
    check_choice("backend", backend, get_args(Backend))
    check_choice("launcher", launcher, get_args(Launcher))
    check_resources(resources)
    check_interface(interface)
    check_limits(
        workers_timeout_s=workers_timeout_s,
        queue_timeout_s=queue_timeout_s,
        rendezvous_timeout_s=rendezvous_timeout_s,
        progress_timeout_s=progress_timeout_s,
        stop_grace_s=stop_grace_s,
    )
    plan = functools.partial(
        GangPlan,
        name=name or name_of(fn),
        seniority=Seniority(time.time(), uuid.uuid4().hex[:12]),
        process_group=process_group,
        backend=backend,
        rendezvous_timeout_s=rendezvous_timeout_s,
        extra_sys_path=own_code_paths(),
        progress_timeout_s=progress_timeout_s,
        watched_from_start=not brings_context(fn),
        launcher=launcher,
        resources=dict(resources or {}),
        interface=interface,
        stop_grace_s=stop_grace_s,
    )
    restarts = Restarts(attempt_log or CallAttemptLog(attempt), max_restarts, on_event or log_event)

    def attempt_once(number: int) -> list[bytes]:
        payload = pickle_call(
            fn, tuple(args(number) if callable(args) else args), dict(kwargs or {})
        )
        # As torchrun counts: from the start of the whole job, and never beyond the maximum.
        this_plan = plan(
            payload=payload, attempt=number, max_restarts=number - 1 + restarts.num_left
        )
        size = GangSize(
            restarts.size_to_ask_for(world_size),
            min_world_size,
            ranks_per_worker,
            world_size_divides,
        )
        waits = Waits(
            workers_timeout_s,
            queue_timeout_s,
            FULL_SIZE_S if restarts.num_made else workers_timeout_s,
        )
        events: queue.SimpleQueue[GangEvent | None] = queue.SimpleQueue()
        stop = StopSwitch()
        work = drive(client, this_plan, size, waits, sink=events.put, stop=stop)
        return follow(client, work, events, restarts.receive, Leaving(stop, stop_grace_s))

    return [unpickle_value(data, rank) for rank, data in enumerate(restarts.run(attempt_once))]
