"""Events: what is in them; and they are told from two threads, the task's and its live report's."""

import json
import threading
import time
from datetime import UTC, datetime
from typing import Any

import numpy as np
from prefect.events import Event
from prefect.events.schemas.events import Resource

from prefect_torch_ddp.records.run_record import RunRecord
from prefect_torch_ddp.tracking.bus import INTERVAL_S, RunEvents, payload_as_json
from tests.support.waiting import HANG_S

NUM_TURNS = 10_000


class Kept(RunEvents):
    """Events that are kept here; while the first held one is sent, another thread tells of one."""

    def __init__(self) -> None:
        super().__init__(
            RunRecord(
                run_id="run",
                experiment="experiment",
                workload="workload",
                began=datetime.now(UTC),
                storage="s",
            )
        )
        self.sent: list[tuple[str, int]] = []
        self._is_sending = threading.Event()
        self.other = threading.Thread(target=self._tell)

    def _tell(self) -> None:
        assert self._is_sending.wait(HANG_S)
        self.emit("training.finished", number=2)

    def _send(self, name: str, payload: dict[str, Any]) -> None:
        if payload["number"] == 1 and not self._is_sending.is_set():
            self._is_sending.set()
            for _ in range(NUM_TURNS):  # it may have to wait for this event
                if not self.other.is_alive():
                    break
                time.sleep(0)  # only gives it its turn
        self.sent.append((name, payload["number"]))


def test_two_threads_tell_of_one_run() -> None:
    """None fails at an event that the other has just sent: in the task's thread that would end the
    training. Each event is sent once, in the order in which they were told."""
    events = Kept()
    events.other.start()
    for number in (0, 1):  # the second one of each kind is held back
        for name in INTERVAL_S:
            events.emit(name, number=number)
    events.emit("rank.failed", number=1)  # sends what is held back first
    events.other.join(HANG_S)
    held = [(name, number) for number in (0, 1) for name in INTERVAL_S]
    assert events.sent == [*held, ("rank.failed", 1), ("training.finished", 2)]


def test_a_metric_that_is_not_finite_is_in_an_event_as_in_the_records() -> None:
    """Not as null, which Prefect sends for it: an automation may tell a loss of NaN from none."""
    metrics = {"loss": float("nan"), "best": np.float64("-inf"), "lr": 0.1, "top": None}
    payload = payload_as_json({"metrics": metrics, "of": (float("inf"), 1)})
    resource = Resource({"prefect.resource.id": "run"})
    event = Event(event="epoch.completed", resource=resource, payload=payload)
    assert json.loads(event.model_dump_json())["payload"] == {
        "metrics": {"loss": "NaN", "best": "-Infinity", "lr": 0.1, "top": None},
        "of": ["Infinity", 1],
    }
