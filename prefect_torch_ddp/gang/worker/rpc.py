"""Owns the orders a Dask worker takes from callers of gangs, over Dask's connections: no port
of ours, TLS where Dask has it.

Owns what a Dask worker tells about its machine: which one it is, and the addresses that it has.
"""

import os
import signal
import socket
import threading
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import psutil
from distributed.comm import get_address_host

from prefect_torch_ddp.gang.worker.fork_server_pool import EndRankHost, host_of
from prefect_torch_ddp.gang.worker.mailbox import MAILBOXES
from prefect_torch_ddp.gang.worker.slots import SLOTS
from prefect_torch_ddp.protocol.agent import (
    AgentOrder,
    AgentState,
    Answer,
    Cleared,
    Occupant,
    Rpc,
    StartOrder,
    WorkerIdentity,
    encode_answer,
)

if TYPE_CHECKING:
    from distributed import Worker


async def register_rpc(  # noqa: C901 - four small handlers that close over the worker
    dask_worker: "Worker",
    *,
    warm: bool = False,
) -> WorkerIdentity:
    """Teach the worker our orders and tell who it is; run on it by `Client.run`. Doing it twice
    changes nothing.

    With `warm` its rank host starts to load torch now, so that ranks can be forked later.

    Handlers instead of further `Client.run` calls: those write a line to the worker's log each
    time.
    """
    MAILBOXES.drop_abandoned()
    if dask_worker.nanny and threading.current_thread() is threading.main_thread():
        # Ctrl-C in a terminal, and Prefect's cancel, reach all processes of a local cluster.
        # Its caller ends this worker, through the nanny, once the ranks have stopped. Not
        # SIG_IGN, which ranks would inherit.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _leave_it_to_the_nanny)

    async def poll(token: str, next_event: int, known_state: AgentState, wait_s: float) -> Answer:
        box = MAILBOXES.open(token)
        return encode_answer(
            await box.news(next_event, known_state, wait_s, lambda: _occupant(dask_worker, token))
        )

    async def clear(token: str, timeout_s: float) -> Answer:
        """Stop the agent at once; answer when none of its ranks is left, with what they said
        meanwhile.
        """
        box = MAILBOXES.find(token)
        if box is None:
            return encode_answer(Cleared(ended=True))
        box.give(abort=True)
        ended = await box.until_ended(timeout_s)
        if ended:
            MAILBOXES.drop(token)
        return encode_answer(Cleared(ended, box.first_event, box.leftovers()))

    def start(
        token: str, launches: bytes, payload: bytes, progress_timeout_s: float | None
    ) -> Answer:
        box = MAILBOXES.find(token)
        if box is not None:
            box.give(order=StartOrder.decode(launches, payload, progress_timeout_s))
        return encode_answer(box is not None)

    def give(token: str, order: AgentOrder) -> Answer:
        box = MAILBOXES.find(token)
        if box is not None:
            box.give(stop=order == "stop", leave=order == "leave", look=order == "look")
        return encode_answer(box is not None)

    handlers: dict[Rpc, Any] = {Rpc.POLL: poll, Rpc.START: start, Rpc.GIVE: give, Rpc.CLEAR: clear}
    for name, handler in handlers.items():
        dask_worker.handlers.setdefault(str(name), handler)
    if EndRankHost.name not in dask_worker.plugins:
        await dask_worker.plugin_add(plugin=EndRankHost(), name=EndRankHost.name)
    if warm:
        host_of(dask_worker.address).warm_up()
    return _identity(dask_worker)


def _leave_it_to_the_nanny(number: int, frame: FrameType | None) -> None:
    """Do nothing."""


def _identity(worker: "Worker") -> WorkerIdentity:
    occupant = _occupant(worker, "")
    return WorkerIdentity(
        address=worker.address,
        process_id=worker.id,
        host=get_address_host(worker.address),
        visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        occupant=occupant.text if occupant else None,
        machine=machine_id(),
        addresses=interface_addresses(),
        free_resources=dict(worker.state.available_resources),
    )


def _occupant(worker: "Worker", token: str) -> Occupant | None:
    holder = SLOTS.occupant(worker.address, token)
    if holder is not None:
        return holder
    running = [ts.key for ts in worker.state.executing if not str(ts.key).endswith(token or "\0")]
    if len(running) >= worker.state.nthreads:
        return Occupant(f"task {running[0]!s}")
    return None


def machine_id() -> str:
    """Return what tells this machine from others; two containers with networks of their own are
    two machines.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"  # noqa: PTH116 - the link's target is what counts
    except OSError:
        return socket.gethostname()


def interface_addresses() -> tuple[tuple[str, str], ...]:
    """Return this machine's internet addresses as (interface, address), in the system's
    order.
    """
    return tuple(
        (name, entry.address)
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    )
