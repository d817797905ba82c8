"""Owns run_gang: level 1, a function on N ranks across the workers of a Dask cluster."""

import asyncio
import logging
import os
import pickle
import queue
import site
import sys
import sysconfig
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import cloudpickle
from distributed import Client

from prefect_torch_ddp.errors import GangError, InvalidParamsError, WorkerLostError
from prefect_torch_ddp.gang.checks import check_call, check_choice, check_client, check_counts, check_limits
from prefect_torch_ddp.gang.orders import Seniority
from prefect_torch_ddp.gang.placement import choose, num_workers_needed, place
from prefect_torch_ddp.gang.plan import GangPlan
from prefect_torch_ddp.gang.supervision import Supervision
from prefect_torch_ddp.gang.workers import gather_workers
from prefect_torch_ddp.messages import NO_RANK, Backend, GangEvent, Launcher, LogLine, ProcessGroupMode

if TYPE_CHECKING:
    from concurrent.futures import Future as ThreadFuture

rank_logger = logging.getLogger("prefect_torch_ddp.ranks")

END_TIMEOUT_S = 15.0


def run_gang(  # noqa: PLR0913 - level 1 is one call; what can be left out is keyword-only
    client: Client,
    fn: Callable[..., Any] | str,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    world_size: int | None = None,
    *,
    ranks_per_worker: int = 1,
    process_group: ProcessGroupMode = "default",
    backend: Backend = "auto",
    workers_timeout_s: float = 60.0,
    queue_timeout_s: float | None = None,
    rendezvous_timeout_s: float = 300.0,
    resources: Mapping[str, float] | None = None,
    name: str | None = None,
    attempt: int = 1,
    launcher: Launcher = "auto",
    on_event: Callable[[GangEvent], None] | None = None,
) -> list[Any]:
    """Run a function on `world_size` ranks, each a process of its own on a Dask worker, with the process group up.

    Args:
        client: a synchronous Dask client.
        fn: any callable, an import string `"package.module:function"`, or the path of a script (`"train.py"`, with `args` as
            its argv; give `process_group="user"` to a script written for torchrun).
        args: positional arguments, as one sequence.
        kwargs: keyword arguments, as one mapping, so that any name reaches `fn`.
        world_size: number of ranks; None takes all workers.
        ranks_per_worker: ranks on each Dask worker, whatever its threads.
        process_group: "default": initialised before `fn` runs; "user": `fn` initialises it from the environment, as under
            torchrun; "none": there is none.
        backend: "auto" takes nccl where CUDA is, else gloo.
        workers_timeout_s: how long to wait until the cluster has enough workers.
        queue_timeout_s: how long to wait for workers that are busy; None: as long as it takes.
        rendezvous_timeout_s: how long ranks wait for one another at the start.
        resources: Dask resources that each seat takes from its worker, e.g. `{"GPU": 1}`.
        name: what other gangs are told that they wait for.
        attempt: counts from 1; ranks see it as TORCHELASTIC_RESTART_COUNT + 1.
        launcher: "auto" forks ranks from a warm helper process of each Dask worker, in milliseconds, where that is safe; "exec"
            starts a fresh Python for each.
        on_event: called in this thread for every event of the ranks; the default logs their lines to
            `prefect_torch_ddp.ranks` with the rank in front.

    Returns:
        What `fn` returned on each rank, in rank order; CUDA tensors come back on the CPU.

    Raises:
        InvalidParamsError: an argument can't work; nothing was started.
        NotEnoughWorkersError: too few workers, or they stayed busy.
        RankFailedError: a rank failed; all others were stopped. Its `__cause__` is the user's own exception.
        WorkerLostError: a Dask worker that held ranks is gone.
        GangCancelledError: the gang was cancelled from outside.
    """
    check_client(client)
    check_call(fn, args, kwargs)
    check_counts(world_size=world_size, ranks_per_worker=ranks_per_worker)
    check_choice("process_group", process_group, get_args(ProcessGroupMode))
    check_choice("backend", backend, get_args(Backend))
    check_choice("launcher", launcher, get_args(Launcher))
    check_limits(workers_timeout_s=workers_timeout_s, queue_timeout_s=queue_timeout_s, rendezvous_timeout_s=rendezvous_timeout_s)
    plan = GangPlan(
        name=name or _name_of(fn),
        seniority=Seniority(time.time(), uuid.uuid4().hex[:12]),
        payload=_pickle_call(fn, tuple(args), dict(kwargs or {})),
        process_group=process_group,
        backend=backend,
        attempt=attempt,
        max_restarts=0,
        rendezvous_timeout_s=rendezvous_timeout_s,
        extra_sys_path=_own_code_paths(),
        launcher=launcher,
        resources=dict(resources or {}),
    )
    events: queue.SimpleQueue[GangEvent | None] = queue.SimpleQueue()
    waits = _Waits(workers_timeout_s, queue_timeout_s)
    work = _drive(client, plan, world_size, ranks_per_worker, waits, events.put)
    pickles = _follow(client, work, events, on_event or log_event)
    return [_unpickle(data, rank) for rank, data in enumerate(pickles)]


def log_event(event: GangEvent) -> None:
    """Log a rank's line with the rank in front."""
    if isinstance(event, LogLine):
        if not rank_logger.hasHandlers():
            rank_logger.addHandler(logging.StreamHandler())  # a plain script: its ranks' prints must show
        if rank_logger.level == logging.NOTSET:
            rank_logger.setLevel(logging.INFO)
        rank_logger.log(event.level, "%s", rank_text(event))


def rank_text(line: LogLine) -> str:
    """Return a rank's line as people read it, the rank in front."""
    if line.rank == NO_RANK:
        return line.text
    return f"[rank {line.rank}] {line.logger + ': ' if line.logger else ''}{line.text}"


@dataclass(frozen=True)
class _Waits:
    workers_timeout_s: float
    queue_timeout_s: float | None


async def _drive(  # noqa: PLR0913, PLR0917 - the loop over attempts to take seats needs all of run_gang's choices
    client: Client,
    plan: GangPlan,
    world_size: int | None,
    ranks_per_worker: int,
    waits: _Waits,
    sink: Callable[[GangEvent], None],
) -> list[bytes]:
    """Gather, place, seat, run and end the gang; on the client's event loop."""
    num_needed = None if world_size is None else num_workers_needed(world_size, ranks_per_worker)
    queue_deadline_s: float | None = None
    while True:
        workers = await gather_workers(
            client, num_needed, ranks_per_worker, waits.workers_timeout_s, warm=plan.launcher == "auto"
        )
        if waits.queue_timeout_s is not None and queue_deadline_s is None:
            queue_deadline_s = time.monotonic() + waits.queue_timeout_s
        chosen = choose(workers, num_needed or len(workers))
        size = world_size or len(chosen) * ranks_per_worker
        supervision = Supervision(client, plan, chosen, place(chosen, size, ranks_per_worker))
        try:
            if await _seat(supervision, queue_deadline_s, sink):
                return await supervision.run(sink)
        finally:
            # Shielded: a caller that leaves by Ctrl-C or a timeout cancels this coroutine, and the ranks must go all the same.
            await asyncio.shield(supervision.clear(sink))


async def _seat(supervision: Supervision, deadline_s: float | None, sink: Callable[[GangEvent], None]) -> bool:
    """Take all seats; False when the gang is to be placed anew, also since a worker left while it waited for it."""
    try:
        return await supervision.seat(deadline_s, lambda text: sink(LogLine(NO_RANK, logging.INFO, text)))
    except WorkerLostError as error:
        sink(LogLine(NO_RANK, logging.WARNING, f"{error}; the gang is placed anew"))
        return False


def _follow(
    client: Client, work: Any, events: "queue.SimpleQueue[GangEvent | None]", on_event: Callable[[GangEvent], None]
) -> list[bytes]:
    """Hand out events in the caller's thread until the work is done; end the gang when the caller leaves."""
    over = threading.Event()
    done: ThreadFuture[list[bytes]] = asyncio.run_coroutine_threadsafe(_tell_when_over(work, over), _loop_of(client))
    done.add_done_callback(lambda _: events.put(None))
    try:
        while True:
            try:
                # In short turns, so that Ctrl-C and Prefect's task timeout take effect here.
                event = events.get(timeout=0.5)
            except queue.Empty:
                continue
            if event is None:
                return done.result()
            on_event(event)
    finally:
        if not done.done():
            done.cancel()
            if not over.wait(END_TIMEOUT_S):
                rank_logger.error("the gang was not over %g s after its caller left", END_TIMEOUT_S)


def _loop_of(client: Client) -> asyncio.AbstractEventLoop:
    loop: asyncio.AbstractEventLoop = client.loop.asyncio_loop  # type: ignore[union-attr]  # a running client has it
    return loop


async def _tell_when_over(work: Any, over: threading.Event) -> list[bytes]:
    """Await the work; a cancelled future is done at once, but `over` is set only when the ranks are gone."""
    try:
        values: list[bytes] = await work
        return values
    finally:
        over.set()


def _pickle_call(fn: Callable[..., Any] | str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    if isinstance(fn, str) and fn.endswith(".py"):
        fn = str(Path(fn).resolve())
    try:
        payload: bytes = cloudpickle.dumps((fn, args, kwargs))
    except Exception as error:
        msg = f"{_name_of(fn)} or its arguments can't be sent to the ranks: {type(error).__name__}: {error}"
        raise InvalidParamsError(msg) from error
    return payload


def _unpickle(data: bytes, rank: int) -> Any:
    try:
        return pickle.loads(data)
    except Exception as error:
        msg = f"the value that rank {rank} returned can't be rebuilt here: {type(error).__name__}: {error}"
        raise GangError(msg) from error


def _name_of(fn: Callable[..., Any] | str) -> str:
    return fn if isinstance(fn, str) else getattr(fn, "__qualname__", type(fn).__name__)


def _own_code_paths() -> tuple[str, ...]:
    """Return the caller's import paths that hold the user's own code, not Python's or installed packages.

    A function that is pickled by reference must be importable at its rank, also when the Dask worker was started elsewhere
    on the same machine or a shared file system.
    """
    installed = [sys.prefix, sys.base_prefix, sysconfig.get_path("stdlib"), *site.getsitepackages(), site.getusersitepackages()]
    paths = (str(Path(path).resolve()) for path in sys.path)
    return tuple(path for path in dict.fromkeys(paths) if not any(_is_below(path, prefix) for prefix in installed))


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)
