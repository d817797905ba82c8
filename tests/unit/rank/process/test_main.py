"""How a rank process and its fork server prepare, and what a rank says whose agent falls silent."""

import multiprocessing.context
import os
import pickle
import socket
import threading
from typing import Any

import pytest

from prefect_torch_ddp.protocol.events import FailureWritten, RankFailure, decode_event
from prefect_torch_ddp.protocol.rank import RankOrder
from prefect_torch_ddp.rank import link as link_module
from prefect_torch_ddp.rank.heartbeat_writer import HeartbeatWriter
from prefect_torch_ddp.rank.link import AgentLink
from prefect_torch_ddp.rank.user_code import default_to_fork
from tests.support.launches import launch_of
from tests.support.waiting import HANG_S


def test_data_workers_are_forked_unless_the_user_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a fork server by default, as in Python 3.14; the user's own choice is no error."""
    default: Any = multiprocessing.context._default_context
    monkeypatch.setattr(default, "_default_context", multiprocessing.get_context("forkserver"))
    monkeypatch.setattr(default, "_actual_context", None)
    default_to_fork()
    assert multiprocessing.get_start_method(allow_none=True) is None
    assert multiprocessing.get_context().get_start_method() == "fork"
    monkeypatch.setattr(default, "_actual_context", None)
    multiprocessing.set_start_method("spawn")
    assert multiprocessing.get_start_method() == "spawn"


@pytest.mark.parametrize("own_failure", [None, "ValueError: boom"])
def test_a_rank_that_ends_itself_leaves_word(
    own_failure: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent that continues learns why the rank ended, and the rank's own failure stays."""
    over = threading.Event()
    monkeypatch.setattr(link_module, "_end_session", over.set)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    monkeypatch.setattr(HeartbeatWriter, "shared", lambda _fd: HeartbeatWriter())
    outcome = os.memfd_create("outcome")
    orders, control = os.pipe()
    with ours, os.fdopen(control, "wb", buffering=0) as agent:
        link = AgentLink(launch_of(1, 2), theirs.detach(), os.dup(outcome), orders, 0)
        if own_failure:
            link.failed(RankFailure(1, "a", 1, "exception", own_failure))
        agent.write(RankOrder.BEAT.value)
        assert over.wait(HANG_S)
        assert isinstance(decode_event(ours.recv(1 << 16), 1), FailureWritten)
        link._events.close()
        link._outcome.close()
    os.close(orders)
    with os.fdopen(outcome, "rb") as file:
        file.seek(0)
        failure = pickle.load(file)
    if own_failure:
        assert failure.summary == own_failure
    else:
        assert failure.kind == "worker_lost"
        assert failure.summary == "worker tcp://a:1 gave its ranks no sign of life for 1.5 s"
