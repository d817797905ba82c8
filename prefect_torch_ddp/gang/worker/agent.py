"""Owns the agent: the Dask task that holds a worker's slot for a gang and runs that worker's
ranks.

Owns the winding down of an agent's ranks: those that listen get time to stop at an agreed step
and to write a checkpoint.
"""

import dataclasses
import select
import socket
import time
from collections.abc import Sequence

from distributed import Worker, get_worker
from distributed.core import Status

from prefect_torch_ddp.errors import AgentRefusedError
from prefect_torch_ddp.gang.liveness import LIVENESS_TIMEOUT_S, Liveness
from prefect_torch_ddp.gang.stop import UNWANTED_STATES
from prefect_torch_ddp.gang.worker.mailbox import MAILBOXES, Alarm, Mailbox
from prefect_torch_ddp.gang.worker.progress_probe import ProgressProbe
from prefect_torch_ddp.gang.worker.rank_io import listen
from prefect_torch_ddp.gang.worker.rank_process import RankProcess
from prefect_torch_ddp.gang.worker.slots import SLOTS
from prefect_torch_ddp.protocol.agent import Reservation, StartOrder
from prefect_torch_ddp.protocol.events import GangEvent, LogLine, RankFailedEvent, RankFailure
from prefect_torch_ddp.protocol.rank import RankLaunch, RankOrder

TICK_S = 0.1
"""How often an agent looks whether its Dask task was cancelled."""
BEAT_S = 1.0
"""How often ranks are told that their agent lives; see AGENT_TIMEOUT_S in `rank/link.py`."""
EXIT_GRACE_S = 10.0
"""How long ranks that returned may take for their exit handlers."""


def agent_key(token: str) -> str:
    """Return the Dask key of an agent."""
    return f"ddp-agent-{token}"


def run_agent(reservation: Reservation) -> tuple[bytes, ...]:
    """Hold the worker's slot, run the ranks the caller orders, and return their pickled values
    in rank order.
    """
    worker = get_worker()
    if worker.id != reservation.process_id:
        msg = f"agent of gang {reservation.gang_name!r} is for another life of worker {reservation.worker}; training is not run again"
        raise AgentRefusedError(msg)
    box = MAILBOXES.open(reservation.token)
    if box.state != "absent":
        msg = f"agent of gang {reservation.gang_name!r} on worker {reservation.worker} was already used; training is not run again"
        raise AgentRefusedError(msg)
    return _Agent(reservation, worker, box).run()


class _Agent:
    def __init__(self, reservation: Reservation, worker: Worker, box: Mailbox) -> None:
        self._reservation = reservation
        self._worker = worker
        self._box = box
        self._key = agent_key(reservation.token)
        self._store: socket.socket | None = None
        self._ranks: list[RankProcess] = []
        self._shutdown = GracefulShutdown(reservation.stop_grace_s)
        self._left_s: float | None = None
        self._heartbeats: ProgressProbe | None = None
        self._alarm = Alarm()
        self._beat_s = 0.0
        self._caller = Liveness()
        self._heard_s = box.last_poll_s

    def run(self) -> tuple[bytes, ...]:
        box = self._box
        box.enter("waiting")
        try:
            with SLOTS.hold(self._reservation, self._must_end) as got_it:
                if not got_it:
                    return ()
                try:
                    return self._run_on_slot()
                finally:
                    self._close()
        finally:
            box.alarm = None
            self._alarm.close()
            box.enter("ended")

    def _run_on_slot(self) -> tuple[bytes, ...]:
        if self._reservation.hosts_store:
            self._store = listen(self._reservation.store_host)
        self._box.enter("reserved", self._store.getsockname()[1] if self._store else 0)
        while self._box.order is None:
            if self._must_end():
                return ()
            self._box.wait_for_orders(TICK_S)
        SLOTS.mark_running(self._reservation)
        self._box.enter("running")
        if not self._start(self._box.order):
            return ()
        self._heartbeats = ProgressProbe(self._ranks, self._box.order.progress_timeout_s)
        return self._attend()

    def _start(self, order: StartOrder) -> bool:
        for launch in order.launches:
            fd = self._store_fd(launch)
            try:
                launch_here = dataclasses.replace(launch, store_fd=fd)
                self._ranks.append(RankProcess(launch_here, order.payload))
            except OSError as error:
                self._box.post(RankFailedEvent(_start_failure(launch, error)))
                return False
        if self._store is not None and order.launches[0].process_group != "user":
            self._store.close()  # rank 0 has it now
        return True

    def _store_fd(self, launch: RankLaunch) -> int | None:
        if self._store is None or launch.place.rank != 0:
            return None
        if launch.process_group != "user":
            return self._store.fileno()
        # Rank 0 will listen at this port itself. A socket that is bound but doesn't listen
        # keeps others from getting the number, and SO_REUSEADDR on both sides lets rank 0 bind
        # it all the same.
        address, family = self._store.getsockname(), self._store.family
        self._store.close()
        self._store = socket.socket(family, socket.SOCK_STREAM)
        self._store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._store.bind(address)
        return None

    def _attend(self) -> tuple[bytes, ...]:
        """Pass on what the ranks say until all have left, or until the gang must end."""
        self._box.alarm = self._alarm.ring
        while not all(rank.reaped for rank in self._ranks):
            self._wait()
            for event in self._new_events():
                self._box.post(event)
            self._watch_progress()
            if self._is_over():
                return ()
            self._pass_on_orders()
            if self._left_s is not None and time.monotonic() - self._left_s > EXIT_GRACE_S:
                break
        if not all(rank.returned for rank in self._ranks):
            while (
                not self._must_end()
            ):  # the caller ends the gang once it has settled what was the cause
                self._box.wait_for_orders(TICK_S)
            return ()
        return tuple(rank.value() for rank in self._ranks)

    def _watch_progress(self) -> None:
        assert self._heartbeats is not None
        self._box.heartbeats = self._heartbeats.heartbeats() or self._box.heartbeats
        if self._box.look_requested:
            self._heartbeats.look()
            for stack in self._heartbeats.stacks():
                self._box.post(stack)

    def _pass_on_orders(self) -> None:
        if self._box.leave_requested and self._left_s is None:
            self._left_s = time.monotonic()
            self._tell(RankOrder.LEAVE)

    def _wait(self) -> None:
        room = self._box.has_room
        poller = select.poll()
        for rank in self._ranks:
            if not rank.reaped:
                for fd in rank.file_descriptors(with_output=room):
                    poller.register(fd, select.POLLIN)
        poller.register(self._alarm.fd, select.POLLIN)
        self._beat()
        poller.poll(TICK_S * 1000)
        self._alarm.quiet()

    def _beat(self) -> None:
        """Tell the ranks that this agent lives.

        From the thread that attends them, so that they don't outlive it frozen.
        """
        now = time.monotonic()
        if now - self._beat_s >= BEAT_S:
            self._beat_s = now
            self._tell(RankOrder.BEAT)

    def _new_events(self) -> Sequence[GangEvent]:
        events: list[GangEvent] = []
        for rank in self._ranks:
            if rank.reaped:
                continue
            if self._box.has_room:
                events += rank.read()
            if rank.is_dead:
                events += rank.bury()
        return events

    def _tell(self, order: RankOrder) -> None:
        for rank in self._ranks:
            rank.tell(order)

    def _is_over(self) -> bool:
        """Whether the ranks are to be killed: on the caller's word at once, else when they had
        their time to stop.
        """
        if self._box.abort_requested:
            return True
        must_end = self._must_end()
        return (must_end or self._box.stop_requested) and self._shutdown.is_over(
            self._ranks, leave_when_returned=must_end
        )

    def _must_end(self) -> bool:
        """Whether the caller, Dask or the worker wants this agent gone; a killed caller shows
        as a cancelled task.
        """
        task = self._worker.state.tasks.get(self._key)
        if self._box.abort_requested or task is None or task.state in UNWANTED_STATES:
            return True
        if self._worker.status in (Status.closing, Status.closed, Status.failed):
            self._box.why_ended = f"worker {self._reservation.worker} was closed"
        elif self._has_lost_caller():
            self._box.why_ended = f"worker {self._reservation.worker} had heard nothing from the caller for {LIVENESS_TIMEOUT_S:g} s"
        return bool(self._box.why_ended)

    def _has_lost_caller(self) -> bool:
        """Whether the caller, which polls every second, is frozen or cut off; a killed one's
        task is cancelled by Dask.
        """
        if self._box.last_poll_s != self._heard_s:
            self._heard_s = self._box.last_poll_s
            self._caller.heard()
        return not self._caller.left_s

    def _close(self) -> None:
        for rank in self._ranks:
            rank.kill()
        for rank in self._ranks:
            if not rank.reaped:
                for event in rank.bury():
                    if isinstance(
                        event, LogLine
                    ):  # how it ended is our doing, what it said before is not
                        self._box.post(event)
            for left in rank.records_left():
                self._box.post(left)
            rank.close()
        if self._store is not None:
            self._store.close()


def _start_failure(launch: RankLaunch, error: OSError) -> RankFailure:
    return RankFailure(
        rank=launch.place.rank,
        host=launch.place.host,
        pid=0,
        kind="start",
        summary=f"its process could not be started: {error}",
        exception_type=type(error).__name__,
    )


PEERS_GRACE_S = 0.5
"""How long ranks that have returned stay for the last reads of peers on other workers."""


class GracefulShutdown:
    """Begins when it is first asked."""

    def __init__(self, grace_s: float) -> None:
        """Give the ranks so many seconds."""
        self._grace_s = grace_s
        self._began_s: float | None = None
        self._returned_s: float | None = None
        self._is_worth_it = False

    def is_over(self, ranks: Sequence[RankProcess], *, leave_when_returned: bool) -> bool:
        """Tell whether the ranks are to be killed now: none listens, their time is up, or they
        all have returned.

        Args:
            ranks: those of this agent.
            leave_when_returned: whether nobody else will tell ranks that returned to leave.
        """
        now = time.monotonic()
        if self._began_s is None:
            self._began_s = now
            self._is_worth_it = any(rank.listens for rank in ranks)
            for rank in ranks if self._is_worth_it else ():
                rank.tell(RankOrder.STOP)
        if leave_when_returned and all(rank.is_settled for rank in ranks):
            self._returned_s = self._returned_s or now
            return now - self._returned_s > PEERS_GRACE_S
        return not self._is_worth_it or now - self._began_s > self._grace_s
