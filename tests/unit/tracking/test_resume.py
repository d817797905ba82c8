"""Whether a run continues, by its record and its flow run's state."""

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.states import Cancelling, Crashed, Running

from prefect_torch_ddp.tracking.resume import CANCELLED_BY_S, continues
from tests.support.pages import RECORD

NOW = datetime.now(UTC)


def flow_run(state: Any, seconds_ago: float, deployment_id: UUID | None) -> FlowRun:
    """Return a flow run that has been in a state for some time."""
    timestamp = NOW - timedelta(seconds=seconds_ago)
    run = FlowRun(flow_id=uuid4(), deployment_id=deployment_id)
    run.state = state(timestamp=timestamp)
    return run


@pytest.mark.parametrize(
    ("state", "seconds_ago", "deployment_id", "expected"),
    [
        pytest.param(Cancelling, 1, None, True, id="it stops"),
        pytest.param(Cancelling, CANCELLED_BY_S, None, True, id="it may take long to stop"),
        pytest.param(Cancelling, CANCELLED_BY_S + 31, None, False, id="it was killed"),
        pytest.param(Cancelling, 9999, uuid4(), True, id="its runner may be away"),
        pytest.param(Running, 9999, None, True, id="it runs"),
        pytest.param(Crashed, 1, None, False, id="it crashed"),
    ],
)
def test_a_cancelled_run_whose_process_is_gone_does_not_continue(
    state: Any, seconds_ago: float, deployment_id: UUID | None, *, expected: bool
) -> None:
    """Its flow run is Cancelling for ever, so it could never be resumed.

    A flow without a deployment notices its cancel by itself, and ends.
    """
    record = RECORD.model_copy(update={"parameters": {"stop_grace_s": 30.0}})
    assert continues(record, flow_run(state, seconds_ago, deployment_id), NOW) == expected
