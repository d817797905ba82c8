"""Events on Prefect's bus: what a training tells, for automations to react to.

Prefect sends them from its own thread; what goes wrong there reaches no training.
"""

import logging
import threading
import time
from collections.abc import Mapping
from typing import Any

from prefect.events import emit_event
from prefect.events.worker import EventsWorker
from prefect.utilities.context import get_task_and_flow_run_ids
from pydantic_core import to_jsonable_python

from prefect_torch_ddp.records.non_finite import as_stored
from prefect_torch_ddp.records.run_record import RunRecord

NAMESPACE = "prefect-torch-ddp"
INTERVAL_S = {"epoch.completed": 5.0, "checkpoint.committed": 1.0}
"""The least time between two events of a kind; what comes sooner gives way to the next one, and
the newest is always sent."""
SEND_TIMEOUT_S = 5.0

logger = logging.getLogger(__name__)


def payload_as_json(payload: Mapping[str, Any]) -> dict[str, Any]:
    """Return an event's payload as JSON has it, with texts for NaN and infinities as in records.

    Prefect would send null for them.
    """
    as_json: dict[str, Any] = as_stored(to_jsonable_python(payload, fallback=str))
    return as_json


class RunEvents:
    """Tells Prefect's bus what happens in a training; made in the task that trains.

    `resource` is the run, `prefect-torch-ddp.run.<run id>`; the flow run and the task run are
    related. For several threads: events reach the bus in the order in which they were emitted.
    """

    def __init__(self, record: RunRecord) -> None:
        """Make it, by what is known of the run; nothing is sent yet."""
        run_id, experiment, workload = record.run_id, record.experiment, record.workload
        self._about = {"run_id": run_id, "experiment": experiment, "workload": workload}
        self._resource = {
            "prefect.resource.id": f"{NAMESPACE}.run.{run_id}",
            "prefect.resource.name": run_id,
            f"{NAMESPACE}.experiment": experiment,
            f"{NAMESPACE}.workload": workload,
            f"{NAMESPACE}.made-by": "train_flow" if record.is_of_flow else "ddp_task",
        }
        roles = ("task-run", "flow-run")
        self._related = [
            {"prefect.resource.id": f"prefect.{role}.{each}", "prefect.resource.role": role}
            for role, each in zip(roles, get_task_and_flow_run_ids(), strict=True)
            if each is not None
        ]
        self._has_failed = False
        self._held: dict[str, dict[str, Any]] = {}
        self._next_s: dict[str, float] = {}
        # Also held while an event is sent, for the order; Prefect only puts it into a queue.
        self._lock = threading.RLock()

    def emit(self, name: str, **payload: Any) -> None:
        """Send an event, now or when its kind is due again; costs a fraction of a millisecond."""
        with self._lock:
            if name in INTERVAL_S:
                self._held[name] = payload
                self.send_due()
            else:
                self.send_due(all_held=True)  # in the order in which things happened
                self._send(name, payload)

    def send_due(self, *, all_held: bool = False) -> None:
        """Send what was held back, if it is due."""
        if not self._held:
            return
        with self._lock:
            now_s = time.monotonic()
            for name in list(self._held):
                if all_held or now_s >= self._next_s.get(name, 0.0):
                    self._next_s[name] = now_s + INTERVAL_S[name]
                    self._send(name, self._held.pop(name))

    def emit_end(self, record: RunRecord, report_uri: str = "", **at: Any) -> None:
        """Tell how a run ended.

        Args:
            record: of the run.
            report_uri: where its report is, if it was written.
            at: where it was: step, attempt and world size.
        """
        more = {"report": report_uri} if report_uri else {}
        if record.state != "completed" and record.continues_from is not None:
            more["resume_from"] = record.continues_from
        self.emit("training.finished", **at, state=record.state, cause=record.cause, **more)

    def flush(self) -> None:
        """Wait until all is sent, at most `SEND_TIMEOUT_S`: the process may end next."""
        try:
            # Here: in a new thread it would know no server, and start one.
            wait = EventsWorker.instance().wait_until_empty
        except Exception:
            logger.debug("events can't be waited for", exc_info=True)
            return
        thread = threading.Thread(target=wait, name="prefect-torch-ddp-events", daemon=True)
        thread.start()
        thread.join(SEND_TIMEOUT_S)

    def _send(self, name: str, payload: dict[str, Any]) -> None:
        resource = dict(self._resource)
        if "state" in payload:
            resource[f"{NAMESPACE}.state"] = payload["state"]  # automations match only by labels
        try:
            as_json = payload_as_json({**self._about, **payload})
            emit_event(f"{NAMESPACE}.{name}", resource, related=self._related, payload=as_json)
        except Exception as error:  # noqa: BLE001 - the training continues without its events
            level = logging.DEBUG if self._has_failed else logging.WARNING
            logger.log(level, "the event %s could not be sent: %r", name, error)
            self._has_failed = True
