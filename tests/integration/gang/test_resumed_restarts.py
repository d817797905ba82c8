"""Restarts of functions with a RankContext: each attempt is claimed and resumes."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from distributed import Client

from prefect_torch_ddp import RankFailedError, read_ledger, run_gang
from prefect_torch_ddp.checkpoint.attempts import newest_attempt, read_failures
from prefect_torch_ddp.errors import SupersededError
from prefect_torch_ddp.gang.caller.workers import until_gone
from prefect_torch_ddp.params import CheckpointParams
from prefect_torch_ddp.protocol.events import AttemptBegan, GangEvent
from prefect_torch_ddp.rank.config import RankConfig
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.tracking.attempt_log import RunAttemptLog
from tests.integration.gang.test_leaving import worker_of
from tests.support.gangs import RUN_WITH_CONTEXT, attempts_in, extra_worker, own_cluster
from tests.support.waiting import HANG_S, wait_until
from tests.workloads import failing, healthy

pytestmark = pytest.mark.extended


def train(
    client: Client, folder: Path, plan: dict[int, dict[str, Any]], **options: Any
) -> list[dict[str, Any]]:
    """Run a training of four virtual ranks as the tasks do."""
    storage = DirectoryStorage(folder / "store")
    policy = CheckpointParams(every_steps=2, every_s=None)
    kind: dict[str, Any] = {"determinism": "elastic", "virtual_ranks": 4, "ledger": True}

    def arguments(attempt: int) -> tuple[Any, ...]:
        config = RankConfig("run", attempt, "task", storage, checkpoint=policy, **kind)
        return config, healthy.fit_elastic, (str(folder), plan)

    log = RunAttemptLog(storage, "run", knows_steps=True)
    options |= {"attempt_log": log, "world_size_divides": 4}
    return run_gang(client, RUN_WITH_CONTEXT, args=arguments, **options)


@pytest.mark.long
def test_a_gang_that_began_small_grows_at_a_checkpoint(tmp_path: Path) -> None:
    """A gang of one rank adds a worker without a restart, and keeps batches and weights."""
    events: list[GangEvent] = []
    plan = {1: {"step": 5, "how": "grow"}}
    (tmp_path / "undisturbed").mkdir()
    with own_cluster(1) as (cluster, client), ThreadPoolExecutor(1) as pool:
        options = {"world_size": 1, "max_world_size": 2, "on_event": events.append}
        gang = pool.submit(train, client, tmp_path, plan, **options)
        wait_until((tmp_path / "waits-1-0").exists)
        with extra_worker(cluster, 2):
            (tmp_path / "joined").touch()
            values = gang.result(HANG_S)
        calm = train(client, tmp_path / "undisturbed", {}, world_size=1)
    assert attempts_in(events) == [(1, 1), (2, 2)]
    assert values == calm * 2
    report = read_ledger(tmp_path / "store", "run")
    assert report.is_clean, str(report)
    assert [epoch.num_samples for epoch in report.epochs] == [healthy.NUM_SAMPLES] * healthy.EPOCHS
    (record,) = read_failures(DirectoryStorage(tmp_path / "store"), "run")
    assert record.is_move
    assert "workers for 2 ranks instead of 1; all ranks stopped after step 5" in record.summary


def test_the_next_attempt_waits_for_a_gang_on_a_retired_worker_alone(tmp_path: Path) -> None:
    """The next attempt waits for a retired worker whose rank still saves, and says so."""
    said: list[str] = []
    plan = {1: {"step": 9, "how": "grow"}}  # which it never takes
    with own_cluster(2) as (_, client), ThreadPoolExecutor(2) as pool:
        gang = pool.submit(train, client, tmp_path, plan, world_size=1, name="run")
        wait_until((tmp_path / "waits-1-0").exists)
        worker = worker_of(client, int((tmp_path / "waits-1-0").read_text()))
        client.retire_workers([worker])
        waits = pool.submit(client.sync, until_gone, client, "run", {}, HANG_S, said.append)
        wait_until(lambda: said or waits.done())
        assert said == [
            f"an attempt still trains or stops, on {worker}: waiting up to {HANG_S:g} s"
        ]
        assert not waits.done()
        (tmp_path / "joined").touch()
        assert gang.result(HANG_S)
        waits.result(HANG_S)


def test_what_may_pass_is_tried_again(dask_client: Client, tmp_path: Path) -> None:
    """An OSError, an error at another step, and alternating errors are tried again."""
    hows = "ValueError", "OSError", "OSError", "ValueError", "SIGKILL", "ValueError"
    plan = {attempt: {"step": 4, "how": how} for attempt, how in enumerate(hows, 1)}
    plan[7] = {"step": 3, "how": "ValueError"}
    train(dask_client, tmp_path, plan, world_size=2, max_restarts=7)
    assert newest_attempt(DirectoryStorage(tmp_path / "store"), "run") == 8


def test_a_record_that_cannot_be_written_hides_no_failure(
    dask_client: Client, tmp_path: Path
) -> None:
    """The rank's failure is raised, and the log says that it wasn't recorded."""
    (tmp_path / "store" / "runs" / "run").mkdir(parents=True)
    (tmp_path / "store" / "runs" / "run" / "failures").write_text("not a folder")
    events: list[GangEvent] = []
    plan = {1: {"step": 4, "how": "ValueError"}}
    with pytest.raises(RankFailedError, match="ValueError: told to fail"):
        train(dask_client, tmp_path, plan, world_size=2, on_event=events.append)
    assert any("could not be recorded" in getattr(event, "text", "") for event in events)


def test_a_restart_does_not_supersede_a_successor(dask_client: Client, tmp_path: Path) -> None:
    """An attempt 2 that somebody began while attempt 1 still ran continues."""
    storage = DirectoryStorage(tmp_path / "store")
    attempt_log = RunAttemptLog(storage, "run", knows_steps=False)

    def succeed(event: GangEvent) -> None:
        if isinstance(event, AttemptBegan):
            RunAttemptLog(storage, "run", knows_steps=False).begin()

    options = {"max_restarts": 3, "attempt_log": attempt_log, "on_event": succeed}
    args = ([1], "SIGKILL", str(tmp_path))
    says = "attempt 1 of run run has been superseded by attempt 2"
    with pytest.raises(SupersededError, match=says) as caught:
        run_gang(dask_client, failing.fail_in, args=args, world_size=2, **options)
    assert isinstance(caught.value.__cause__, RankFailedError)
    assert newest_attempt(storage, "run") == 2
