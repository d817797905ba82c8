"""Whom an agent gives time to stop."""

from types import SimpleNamespace
from typing import Any

import pytest

from prefect_torch_ddp.gang.worker.agent import _GracefulShutdown
from prefect_torch_ddp.protocol.heartbeat import Heartbeat
from prefect_torch_ddp.protocol.rank import RankOrder
from tests.support.waiting import HANG_S


@pytest.mark.parametrize("has_begun", [False, True])
def test_ranks_that_have_begun_steps_get_time_to_stop(has_begun: bool) -> None:
    """Also before their first step: while they restore, load, or run code behind passed calls."""
    told: list[RankOrder] = []
    page = SimpleNamespace(read=lambda: Heartbeat(listens=has_begun, step=0))
    io = SimpleNamespace(page=page, tell=told.append)
    rank: Any = SimpleNamespace(io=io, is_settled=False)
    shutdown = _GracefulShutdown(HANG_S)
    assert shutdown.is_over([rank], leave_when_returned=True) is not has_begun
    assert told == [RankOrder.STOP] * has_begun
