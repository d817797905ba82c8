"""Whether a run continues, by its record and its flow run's state."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.states import Cancelling, Crashed, Running

from prefect_torch_ddp.checkpoint.resume_point import ResumePoint
from prefect_torch_ddp.params import ContextParams
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.tracking.resume import began_from, continues
from tests.support.pages import RECORD


@pytest.mark.parametrize(
    ("state", "deployment_id", "expected"),
    [
        pytest.param(Cancelling, None, True, id="it may train to its end"),
        pytest.param(Cancelling, uuid4(), True, id="its runner may be away"),
        pytest.param(Running, None, True, id="it runs"),
        pytest.param(Crashed, None, False, id="it crashed"),
    ],
)
def test_a_cancelled_run_continues_however_long_it_takes(
    state: Any, deployment_id: UUID | None, *, expected: bool
) -> None:
    """A flow doesn't notice its cancel while a task trains that it didn't submit.

    The training counted as over a minute after the cancel: a second one began next to it.
    """
    flow_run = FlowRun(flow_id=uuid4(), deployment_id=deployment_id)
    flow_run.state = state(timestamp=datetime.now(UTC) - timedelta(hours=3))
    assert continues(RECORD, flow_run) == expected


def test_what_a_choice_led_to_is_put_on_record_as_a_person_names_it(tmp_path: Path) -> None:
    """A run of the own storage by its id, which stays right if the storage is moved."""
    own, other = DirectoryStorage(tmp_path / "own"), DirectoryStorage(tmp_path / "other")
    latest, best, named = (ContextParams(resume_from=each) for each in ("latest", "best", "old-1"))
    assert began_from(latest, ResumePoint(own, "old-1"), own) == "old-1"
    assert began_from(latest, ResumePoint(other, "old-1"), own) == f"{other.uri}/runs/old-1"
    assert began_from(latest, None, own) is None
    assert began_from(best, ResumePoint(own, "old-1", 7, 1, only_weights=True), own) is None
    assert began_from(named, ResumePoint(own, "old-1"), own) is None
