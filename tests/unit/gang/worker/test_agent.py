"""Whom an agent gives time to stop or to end, and what it says if that was too short."""

from types import SimpleNamespace
from typing import Any

import pytest
from distributed.core import Status

from prefect_torch_ddp.gang.worker import agent as agent_module
from prefect_torch_ddp.gang.worker.agent import _Agent, _GracefulShutdown
from prefect_torch_ddp.gang.worker.mailbox import Mailbox
from prefect_torch_ddp.protocol.heartbeat import Heartbeat
from prefect_torch_ddp.protocol.rank import RankOrder
from tests.support.waiting import HANG_S


@pytest.mark.parametrize("has_begun", [False, True])
def test_ranks_that_have_begun_steps_get_time_to_stop(has_begun: bool) -> None:
    """Also before their first step: while they restore, load, or run code after passed calls."""
    told: list[RankOrder] = []
    page = SimpleNamespace(read=lambda: Heartbeat(listens=has_begun, step=0))
    io = SimpleNamespace(page=page, tell=told.append)
    rank: Any = SimpleNamespace(io=io, is_settled=False)
    shutdown = _GracefulShutdown(HANG_S)
    assert shutdown.is_over([rank], leave_when_returned=True) is not has_begun
    assert told == [RankOrder.STOP] * has_begun


@pytest.mark.parametrize(
    ("status", "when"),
    [
        pytest.param(Status.running, "0 s after its failure", id="time_is_up"),
        pytest.param(Status.closing, "as its worker closes, after its failure", id="closes"),
    ],
)
def test_the_log_says_why_a_failed_rank_had_no_more_time(
    monkeypatch: pytest.MonkeyPatch, status: Status, when: str
) -> None:
    """It names the time only if the rank had got it."""
    monkeypatch.setattr(agent_module, "FAILED_GRACE_S", 0.0 if when[0] == "0" else HANG_S)
    reservation: Any = SimpleNamespace(token="t", stop_grace_s=0.0, liveness_timeout_s=HANG_S)
    worker: Any = SimpleNamespace(status=status)
    rank: Any = SimpleNamespace(
        is_ending=True,
        place=SimpleNamespace(rank=3),
        file_descriptors=lambda: (),
        read=lambda: (),
    )
    box = Mailbox()
    agent = _Agent(reservation, worker, box)
    agent._ranks = [rank]
    with box.alarm():
        agent._kill_but_failed()
    (line,) = box._news().events
    assert (line.rank, line.text.partition(": ")[0]) == (3, f"it is killed {when}")
