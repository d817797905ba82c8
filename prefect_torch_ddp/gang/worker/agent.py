"""The agent: the Dask task that holds a worker's slot for a gang and runs that worker's ranks."""

import dataclasses
import logging
import pickle
import time
from collections.abc import Iterator, Sequence

from distributed import Worker, get_worker

from prefect_torch_ddp.errors import AgentRefusedError
from prefect_torch_ddp.gang.liveness import Liveness, is_closing, is_unwanted
from prefect_torch_ddp.gang.worker.fork_client import fork_client
from prefect_torch_ddp.gang.worker.mailbox import Mailbox, open_mailbox
from prefect_torch_ddp.gang.worker.progress_probe import ProgressProbe
from prefect_torch_ddp.gang.worker.rank_io import StoreSocket
from prefect_torch_ddp.gang.worker.rank_process import RankProcess
from prefect_torch_ddp.gang.worker.slots import SLOTS
from prefect_torch_ddp.protocol.events import NO_RANK, GangEvent, LogLine, RankFailure
from prefect_torch_ddp.protocol.messages import Reservation, StartOrder
from prefect_torch_ddp.protocol.rank import RankOrder
from prefect_torch_ddp.records.rank_log import LogFolder

TICK_S = 0.25
"""How often an agent checks whether its Dask task was cancelled."""
BEAT_S = 1.0
"""How often ranks get a beat from their agent; see `RankLaunch.agent_timeout_s`."""
EXIT_GRACE_S = 60.0
"""How long ranks that returned may take for their exit handlers."""
FAILED_GRACE_S = 5.0
"""The same for ranks that failed, while the others are gone already."""
ENDING_TICK_S = 0.01
"""How often is looked whether ranks that failed have ended; a restart waits for it."""
LOGS_TIMEOUT_S = 5.0
"""How long the end of a gang waits for its ranks' lines to be in the storage."""
PEERS_GRACE_S = 0.5
"""How long ranks that have returned stay for the last reads of peers on other workers."""


def agent_key(token: str) -> str:
    """Return the Dask key of an agent."""
    return f"ddp-agent-{token}"


def run_agent(reservation: Reservation) -> tuple[bytes, ...]:
    """Hold the worker's slot and run the ranks that the caller orders; return their values.

    Returns none if the gang ended early; raises AgentRefusedError if Dask runs it again.
    """
    worker = get_worker()
    gang, name = repr(reservation.gang_name), reservation.worker
    if worker.id != reservation.process_id:
        msg = f"worker {name} restarted since gang {gang} reserved it; refusing to train twice"
        raise AgentRefusedError(msg)
    box = open_mailbox(reservation.token)
    if box.state != "absent":
        msg = f"the agent of gang {gang} on worker {name} has run before; refusing to train twice"
        raise AgentRefusedError(msg)
    return _Agent(reservation, worker, box).run()


class _Agent:
    def __init__(self, reservation: Reservation, worker: Worker, box: Mailbox) -> None:
        self._reservation = reservation
        self._worker = worker
        self._box = box
        self._key = agent_key(reservation.token)
        self._store: StoreSocket | None = None
        self._ranks: list[RankProcess] = []
        self._shutdown = _GracefulShutdown(reservation.stop_grace_s)
        self._left_s: float | None = None
        self._beat_s = 0.0
        self._caller = Liveness(reservation.liveness_timeout_s)
        self._heard_s = box.last_poll_s

    def run(self) -> tuple[bytes, ...]:
        self._box.enter("waiting")
        try:
            with SLOTS.hold(self._reservation, self._must_end) as got_it, self._box.alarm():
                if not got_it:
                    return ()
                try:
                    return self._run_on_slot()
                finally:
                    self._close()
        finally:
            self._box.enter("ended")

    def _run_on_slot(self) -> tuple[bytes, ...]:
        if self._reservation.store_host is not None:
            self._store = StoreSocket(self._reservation.store_host)
        self._box.enter("reserved", self._store.port if self._store else 0)
        while (order := self._box.start) is None:
            if self._must_end():
                return ()
            self._box.wait(TICK_S)
        SLOTS.mark_running(self._reservation)
        self._box.enter("running")
        if not self._start(order):
            return ()
        if not self._attend(ProgressProbe(self._ranks, order.progress_timeout_s)):
            return ()
        if all(rank.returned for rank in self._ranks):
            return tuple(rank.io.outcome() for rank in self._ranks)
        while not self._must_end():  # the caller ends the gang once it knows the root cause
            self._box.wait(TICK_S)
        return ()

    def _start(self, order: StartOrder) -> bool:
        logs, client = self._log_folder(order.logs), fork_client(self._reservation.worker)
        client.begin_gang()
        for launch in order.launches:
            fd = None
            if self._store is not None and launch.place.rank == 0:
                fd = self._store.fd_for_rank_0(launch.process_group)
            try:
                launch_here = dataclasses.replace(launch, store_fd=fd)
                self._ranks.append(RankProcess(launch_here, order.payload, logs))
            except OSError as error:
                why, kind = f"its process could not be started: {error}", type(error).__name__
                place = launch.place
                failure = RankFailure(place.rank, place.host, 0, "start", why, exception_type=kind)
                self._box.post(failure)
                return False
        # Taken on every worker, so that no later gang says them; hosts are the same: one says it.
        notes = client.take_notes(order.launches[0].preload)
        for note in notes if self._store is not None else ():
            self._box.post(LogLine(NO_RANK, logging.INFO, note))
        if self._store is not None and order.launches[0].process_group != "user":
            self._store.close()  # rank 0 has it now
        return True

    def _log_folder(self, pickled: bytes) -> LogFolder | None:
        try:
            folder: LogFolder | None = pickle.loads(pickled) if pickled else None
        except Exception as error:  # noqa: BLE001 - of a user's class, which ranks may find
            lacks = f"worker {self._reservation.worker} can't load its class: {error!r}"
            text = f"the ranks' lines are not kept in the storage: {lacks}"
            self._box.post(LogLine(NO_RANK, logging.WARNING, text))
            return None
        return folder

    def _attend(self, probe: ProgressProbe) -> bool:
        """Pass on ranks' events until all have left; False if the gang must end before."""
        while not all(rank.child.is_reaped for rank in self._ranks):
            self._wait()
            for event in self._new_events():
                self._box.post(event)
            self._box.heartbeats = probe.heartbeats() or self._box.heartbeats
            for order in {"look", "look_by_signal"} & self._box.orders:
                self._box.orders.discard(order)
                probe.ask_for_stacks(may_signal=order == "look_by_signal")
            for stack in probe.stacks():
                self._box.post(stack)
            if self._is_over():
                return False
            if "leave" in self._box.orders and self._left_s is None:
                self._left_s = time.monotonic()
                self._tell(RankOrder.LEAVE)
            if self._left_s is not None and time.monotonic() - self._left_s > EXIT_GRACE_S:
                alive = [rank for rank in self._ranks if not rank.child.is_reaped]
                self._warn_of_kill(alive, f"{EXIT_GRACE_S:g} s after all ranks had returned")
                break
        return True

    def _wait(self) -> None:
        # Beats come from the thread that attends the ranks: they don't outlive it frozen.
        now = time.monotonic()
        if now - self._beat_s >= BEAT_S:
            self._beat_s = now
            self._tell(RankOrder.BEAT)
        alive = [rank for rank in self._ranks if not rank.child.is_reaped]
        self._box.wait(TICK_S, [fd for rank in alive for fd in rank.file_descriptors()])

    def _new_events(self) -> Iterator[GangEvent]:
        for rank in self._ranks:
            if rank.child.is_reaped:
                continue
            yield from rank.read()
            if rank.child.is_dead:
                yield from rank.end()

    def _tell(self, order: RankOrder) -> None:
        for rank in self._ranks:
            rank.io.tell(order)

    def _is_over(self) -> bool:
        """Tell whether to kill the ranks: on the caller's abort at once, else after their grace."""
        if "pause" in self._box.orders:
            self._box.orders.discard("pause")
            self._tell(RankOrder.STOP)
        if "abort" in self._box.orders:
            return True
        must_end = self._must_end()
        return (must_end or "stop" in self._box.orders) and self._shutdown.is_over(
            self._ranks, leave_when_returned=must_end
        )

    def _must_end(self) -> bool:
        """Tell whether the caller, Dask or the worker wants this agent gone."""
        name = self._reservation.worker
        if is_closing(self._worker):  # first: Dask also lets go of the tasks of such a worker
            self._box.why_ended = f"worker {name} was closed"
        elif "abort" in self._box.orders or is_unwanted(self._worker, self._key):
            return True  # Dask cancels the task of a killed caller
        elif self._has_lost_caller():
            heard = f"had heard nothing from the caller for {self._caller.limit_s:g} s"
            self._box.why_ended = f"worker {name} {heard}"
        return bool(self._box.why_ended)

    def _has_lost_caller(self) -> bool:
        """Tell whether the caller, which polls about every second, is frozen or cut off."""
        if self._box.last_poll_s != self._heard_s:
            self._heard_s = self._box.last_poll_s
            self._caller.heard()
        return not self._caller.look_left_s()

    def _close(self) -> None:
        self._kill_but_failed()
        for rank in self._ranks:
            rank.child.kill()
        for rank in self._ranks:
            if not rank.child.is_reaped:
                # How it ended is our doing, what it said before is not.
                for event in rank.end():
                    if isinstance(event, LogLine):
                        self._box.post(event)
            for left in rank.records_left():
                self._box.post(left)
            rank.close()
        if self._store is not None:
            self._store.close()
        self._wait_for_logs()

    def _kill_but_failed(self) -> None:
        """Kill the ranks; those that failed get time for their exit handlers and files before."""
        for rank in self._ranks:
            if not rank.is_ending:
                rank.child.kill()
        until_s = time.monotonic() + FAILED_GRACE_S
        while ending := [rank for rank in self._ranks if rank.is_ending]:
            if is_closing(self._worker):
                self._warn_of_kill(ending, "as its worker closes, after its failure")
                return
            if time.monotonic() > until_s:
                self._warn_of_kill(ending, f"{FAILED_GRACE_S:g} s after its failure")
                return
            self._box.wait(ENDING_TICK_S, [fd for rank in ending for fd in rank.file_descriptors()])
            for event in (event for rank in ending for event in rank.read()):
                if isinstance(event, LogLine):
                    self._box.post(event)

    def _warn_of_kill(self, ranks: Sequence[RankProcess], when: str) -> None:
        what = "its exit handlers or threads had not ended, and files may lack buffered data"
        text = f"it is killed {when}: {what}"
        for rank in ranks:
            self._box.post(LogLine(rank.place.rank, logging.WARNING, text))

    def _wait_for_logs(self) -> None:
        until_s = time.monotonic() + LOGS_TIMEOUT_S
        for rank in self._ranks:
            writer = rank.lines.writer
            if writer and (trouble := writer.join(max(0.0, until_s - time.monotonic()))):
                text = f"its log in the storage lacks lines: {trouble}"
                self._box.post(LogLine(rank.place.rank, logging.WARNING, text))


class _GracefulShutdown:
    """Gives ranks that have begun `ctx.steps` time to stop at an agreed step and to save it."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._began_s: float | None = None
        self._returned_s: float | None = None
        self._is_worth_it = False

    def is_over(self, ranks: Sequence[RankProcess], *, leave_when_returned: bool) -> bool:
        """Begin when first asked; tell whether to kill the ranks now.

        That is when none has begun `ctx.steps`, when their time is up, or when all have returned
        and nobody else will tell them to leave (`leave_when_returned`).
        """
        now = time.monotonic()
        if self._began_s is None:
            self._began_s = now
            self._is_worth_it = any(rank.io.page.read().listens for rank in ranks)
            for rank in ranks if self._is_worth_it else ():
                rank.io.tell(RankOrder.STOP)
        if leave_when_returned and all(rank.is_settled for rank in ranks):
            self._returned_s = self._returned_s or now
            return now - self._returned_s > PEERS_GRACE_S
        return not self._is_worth_it or now - self._began_s > self._grace_s
