"""The RPC handler of a Dask worker: it takes a caller's polls and orders over Dask's connections.

It needs no port of its own, and has TLS if Dask has it.
"""

import os
import pickle
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType

import psutil
from distributed import Worker
from distributed.comm import get_address_host

from prefect_torch_ddp.gang.versions import versions
from prefect_torch_ddp.gang.worker.agent import agent_key
from prefect_torch_ddp.gang.worker.fork_client import CloseForkServer, fork_client
from prefect_torch_ddp.gang.worker.mailbox import MAILBOXES, drop_abandoned, open_mailbox
from prefect_torch_ddp.gang.worker.slots import SLOTS
from prefect_torch_ddp.protocol.messages import POLL, AgentState, Occupant, WorkerIdentity
from prefect_torch_ddp.protocol.rank import Preload

WAITS_OF_PREFECT = {
    "prefect.concurrency.": "a slot of a concurrency limit",
    "prefect.task_engine:wait_until_ready": "its retry",
}
"""What a thread waits for that is in such a module, or function of one."""


async def register_rpc(dask_worker: Worker, warm: Preload | None = None) -> WorkerIdentity:
    """Add our handler to the worker and return who it is. Doing it twice changes nothing.

    The caller runs this by `Client.run`; the handler takes the orders after it because each
    `Client.run` writes a line to the worker's log.
    """
    drop_abandoned()
    if dask_worker.nanny and threading.current_thread() is threading.main_thread():
        # Ctrl-C in a terminal, and Prefect's cancel, reach all processes of a local cluster.
        # Its caller ends this worker, through the nanny, once the ranks have stopped. Not
        # SIG_IGN, which ranks would inherit.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _leave_it_to_the_nanny)
    dask_worker.handlers.setdefault(POLL, _handler_of_polls(dask_worker))
    if CloseForkServer.name not in dask_worker.plugins:
        await dask_worker.plugin_add(plugin=CloseForkServer(), name=CloseForkServer.name)
    if warm is not None:
        fork_client(dask_worker.address).warm_up(warm)
    return _identity(dask_worker)


def _leave_it_to_the_nanny(number: int, frame: FrameType | None) -> None:
    pass


def _handler_of_polls(worker: Worker) -> Callable[..., Awaitable[dict[str, bytes]]]:
    async def poll(
        token: str, next_event: int, known_state: AgentState, wait_s: float, order: bytes = b""
    ) -> dict[str, bytes]:
        box = open_mailbox(token)
        if order:
            box.give(pickle.loads(order))
        news = await box.news(next_event, known_state, wait_s)
        if news.has_ended and "abort" in box.orders:
            MAILBOXES.pop(token, None)
        return {"answer": pickle.dumps(replace(news, occupant=_occupant(worker, token)))}

    return poll


def _occupant(worker: Worker, token: str) -> Occupant | None:
    holder = SLOTS.occupant(worker.address, token)
    if holder is not None:
        return holder
    running = [ts.key for ts in worker.state.executing if not str(ts.key).endswith(token or "\0")]
    if len(running) >= worker.state.nthreads:
        return Occupant(f"task {running[0]!s}{_why_it_waits(worker, running[0])}")
    return _holder_of_resources(worker, token)


def _holder_of_resources(worker: Worker, token: str) -> Occupant | None:
    """Name the task that holds what an agent, which waits on this worker, was submitted with."""
    agent = worker.state.tasks.get(agent_key(token))
    if agent is None or agent in worker.state.all_running_tasks:
        return None
    free = worker.state.available_resources
    wanted = agent.resource_restrictions or {}  # Dask has None for none
    lacks = [name for name, want in wanted.items() if free.get(name, 0) < want]
    for task in worker.state.all_running_tasks:
        held = {name: (task.resource_restrictions or {}).get(name, 0) for name in lacks}
        amounts = ", ".join(f"{name}={amount:g}" for name, amount in held.items() if amount)
        if amounts:
            return Occupant(f"task {task.key!s}, which holds {amounts}")
    return None


def _why_it_waits(worker: Worker, key: object) -> str:
    """Say what a task waits for in Prefect's engine, which takes a thread all the same."""
    with worker.active_threads_lock:
        thread = next((at for at, held in worker.active_threads.items() if held == key), None)
    frame = sys._current_frames().get(thread or 0)  # noqa: SLF001 - documented all the same
    while frame is not None:
        module, function = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        for where, what in WAITS_OF_PREFECT.items():
            if f"{module}:{function}".startswith(where):
                return f", which waits for {what}"
        frame = frame.f_back
    return ""


def _identity(worker: Worker) -> WorkerIdentity:
    occupant = _occupant(worker, "")
    return WorkerIdentity(
        address=worker.address,
        process_id=worker.id,
        host=get_address_host(worker.address),
        visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        occupant=occupant.text if occupant else None,
        machine=_machine_id(),
        addresses=tuple(
            (name, entry.address)
            for name, entries in psutil.net_if_addrs().items()
            for entry in entries
            if entry.family in (socket.AF_INET, socket.AF_INET6)
        ),
        free_resources=dict(worker.state.available_resources),
        versions=versions(),
    )


def _machine_id() -> str:
    """Tell machines apart, and containers with their own networks."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{Path('/proc/self/ns/net').stat().st_ino}"
    except OSError:
        return socket.gethostname()
