"""Whether a run continues, by its record and its flow run's state."""

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.states import Cancelling, Crashed, Running

from prefect_torch_ddp.tracking.resume import continues
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
