"""Workers leave gracefully while loops train whose checkpoints have other numbers than steps."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from prefect_torch_ddp import WorkerLostError, run_gang
from prefect_torch_ddp.params import CheckpointParams
from prefect_torch_ddp.protocol.events import FailureRecord, GangEvent
from prefect_torch_ddp.rank.config import RankConfig
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.tracking.attempt_log import RunAttemptLog
from tests.integration.gang.test_leaving import worker_of
from tests.support.gangs import RUN_WITH_CONTEXT, attempts_in, begun, own_cluster
from tests.support.waiting import HANG_S, wait_until
from tests.workloads import hanging

pytestmark = pytest.mark.long


@contextmanager
def left_by_a_worker(
    home: Path, how: str, events: list[GangEvent]
) -> Iterator["Future[list[int]]"]:
    """Retire a worker of a gang of two without restarts, whose loop is `how`; give the gang."""
    storage, marks = DirectoryStorage(home / "store"), home / "marks"
    marks.mkdir()
    policy = CheckpointParams(every_s=None)

    def arguments(attempt: int) -> tuple[object, ...]:
        config = RankConfig("run", attempt, "task", storage, checkpoint=policy)
        if how == "folder":
            return config, hanging.commit_until_enough, (str(marks),)
        return config, hanging.count_until_enough, (str(marks), how)

    call = {
        "args": arguments,
        "world_size": 2,
        "attempt_log": RunAttemptLog(storage, "run", knows_steps=True),
        "on_event": events.append,
    }
    with own_cluster(3) as (_, client), ThreadPoolExecutor(1) as pool:
        gang = pool.submit(run_gang, client, RUN_WITH_CONTEXT, **call)
        client.retire_workers([worker_of(client, begun(marks, 1, 0)[0])])
        wait_until(lambda: gang.done() or any(marks.glob("2-0-from-*[0-9]")), HANG_S)
        (marks / "enough").touch()
        yield gang


@pytest.mark.parametrize("how", ["own", "total", "folder"])
def test_a_worker_that_leaves_a_loop_with_other_numbers_costs_no_restart(
    tmp_path: Path, how: str
) -> None:
    """The checkpoint counts, also if its number isn't the step: of an own loop, or after an own
    save. A commit has the step's number."""
    events: list[GangEvent] = []
    with left_by_a_worker(tmp_path, how, events) as gang:
        gang.result(HANG_S)
    _, first = begun(tmp_path / "marks", 2, 0)
    assert attempts_in(events) == [(1, 2), (2, 2)]
    (failure,) = (event for event in events if isinstance(event, FailureRecord))
    assert failure.is_move
    assert f"after step {first - 1}" in failure.summary


def test_a_worker_that_leaves_a_loop_that_saves_nothing_costs_a_restart(tmp_path: Path) -> None:
    """An own loop that ignores `due.save` keeps what an earlier checkpoint has."""
    with left_by_a_worker(tmp_path, "deaf", []) as gang, pytest.raises(WorkerLostError) as raised:
        gang.result(HANG_S)
    assert raised.value.saved_step is None
