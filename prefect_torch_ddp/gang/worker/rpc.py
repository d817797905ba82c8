"""The RPC handlers of a Dask worker: they take a caller's orders over Dask's own connections.

They need no port of their own, and have TLS where Dask has it.
"""

import os
import pickle
import signal
import socket
import threading
from dataclasses import replace
from pathlib import Path
from types import FrameType

import psutil
from distributed import Worker
from distributed.comm import get_address_host

from prefect_torch_ddp.gang.versions import versions
from prefect_torch_ddp.gang.worker.fork_client import CloseForkServer, fork_client
from prefect_torch_ddp.gang.worker.mailbox import MAILBOXES, drop_abandoned, open_mailbox
from prefect_torch_ddp.gang.worker.slots import SLOTS
from prefect_torch_ddp.protocol.agent import (
    AgentReport,
    AgentState,
    Answer,
    Occupant,
    Rpc,
    WorkerIdentity,
    encode_answer,
)
from prefect_torch_ddp.protocol.rank import Preload


async def register_rpc(dask_worker: Worker, warm: Preload | None = None) -> WorkerIdentity:
    """Add our handlers to the worker and return who it is. Doing it twice changes nothing.

    The caller runs this by `Client.run`; handlers take the orders after it because each
    `Client.run` writes a line to the worker's log.
    """
    drop_abandoned()
    if dask_worker.nanny and threading.current_thread() is threading.main_thread():
        # Ctrl-C in a terminal, and Prefect's cancel, reach all processes of a local cluster.
        # Its caller ends this worker, through the nanny, once the ranks have stopped. Not
        # SIG_IGN, which ranks would inherit.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _leave_it_to_the_nanny)
    handlers = _Handlers(dask_worker)
    for rpc in Rpc:
        dask_worker.handlers.setdefault(str(rpc), getattr(handlers, rpc.name.lower()))
    if CloseForkServer.name not in dask_worker.plugins:
        await dask_worker.plugin_add(plugin=CloseForkServer(), name=CloseForkServer.name)
    if warm is not None:
        fork_client(dask_worker.address).warm_up(warm)
    return _identity(dask_worker)


def _leave_it_to_the_nanny(number: int, frame: FrameType | None) -> None:
    pass


class _Handlers:
    """A method for each Rpc, by its name."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def poll(
        self, token: str, next_event: int, known_state: AgentState, wait_s: float
    ) -> Answer:
        box = open_mailbox(token)
        report = await box.news(next_event, known_state, wait_s)
        return encode_answer(replace(report, occupant=_occupant(self._worker, token)))

    async def clear(self, token: str, timeout_s: float) -> Answer:
        box = MAILBOXES.get(token)
        report = await box.clear(timeout_s) if box else AgentReport("absent")
        if report.has_ended:
            MAILBOXES.pop(token, None)
        return encode_answer(report)

    def give(self, token: str, order: bytes) -> Answer:
        box = MAILBOXES.get(token)
        if box is not None:
            box.give(pickle.loads(order))
        return encode_answer(box is not None)


def _occupant(worker: Worker, token: str) -> Occupant | None:
    holder = SLOTS.occupant(worker.address, token)
    if holder is not None:
        return holder
    running = [ts.key for ts in worker.state.executing if not str(ts.key).endswith(token or "\0")]
    if len(running) >= worker.state.nthreads:
        return Occupant(f"task {running[0]!s}")
    return None


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
    """Tell machines apart, and containers with networks of their own."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}/{Path('/proc/self/ns/net').stat().st_ino}"
