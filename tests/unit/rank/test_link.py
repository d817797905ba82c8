"""A rank whose agent falls silent: it says why it ends."""

import os
import pickle
import socket
import threading

import pytest

from prefect_torch_ddp.protocol.events import FailureWritten, RankFailure, decode_event
from prefect_torch_ddp.protocol.rank import CodePaths, GangShape, RankLaunch, RankOrder, RankPlace
from prefect_torch_ddp.rank import link as link_module
from prefect_torch_ddp.rank.heartbeat import HeartbeatWriter
from prefect_torch_ddp.rank.link import AgentLink
from tests.support.waiting import HANG_S

LAUNCH = RankLaunch(
    place=RankPlace(1, 0, 0, 0, worker="tcp://a:1", host="a"),
    shape=GangShape(2, 1, (2,)),
    gang_id="g",
    attempt=1,
    max_restarts=0,
    master_addr="a",
    master_port=1,
    store_fd=None,
    process_group="default",
    backend="auto",
    rendezvous_timeout_s=20.0,
    agent_timeout_s=1.5,
    code_paths=CodePaths(),
    launcher="auto",
)


@pytest.mark.parametrize("own_failure", [None, "ValueError: boom"])
def test_a_rank_that_ends_itself_leaves_word(
    own_failure: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent that goes on would else find it killed by SIGKILL; its own failure stays."""
    over = threading.Event()
    monkeypatch.setattr(link_module, "_end_session", over.set)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    monkeypatch.setattr(HeartbeatWriter, "shared", lambda _fd: HeartbeatWriter())
    outcome = os.memfd_create("outcome")
    orders, control = os.pipe()
    with ours, os.fdopen(control, "wb", buffering=0) as agent:
        link = AgentLink(LAUNCH, theirs.detach(), os.dup(outcome), orders, 0)
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
