"""The bucket has every record and every saved file of every rank, however the ranks ended."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from distributed import Client

from prefect_torch_ddp import RankFailedError, read_metrics, read_result, run_gang
from prefect_torch_ddp.params import CheckpointParams
from prefect_torch_ddp.protocol.events import CheckpointCommitted, GangEvent, Progress
from prefect_torch_ddp.rank.config import RankConfig
from prefect_torch_ddp.storage.s3.storage import S3Storage
from prefect_torch_ddp.tracking.attempt_log import RunAttemptLog
from tests.support.gangs import RUN_WITH_CONTEXT
from tests.support.s3_server import S3Server
from tests.workloads import stored

NUM_STEPS = 1500
SELDOM = CheckpointParams(every_steps=600, every_s=None)


def train(
    client: Client,
    storage: S3Storage,
    options: dict[str, Any],
    *,
    on_event: Callable[[GangEvent], None] = lambda _: None,
    **gang: Any,
) -> None:
    """Train on two ranks of the cluster, as a ddp_task does."""

    def arguments(attempt: int) -> tuple[Any, ...]:
        config = RankConfig("run", attempt, "task", storage, options=options, checkpoint=SELDOM)
        return config, "tests.workloads.stored:report_steps"

    log = RunAttemptLog(storage, "run", knows_steps=True)
    about = {"args": arguments, "attempt_log": log, "on_event": on_event, **gang}
    run_gang(client, RUN_WITH_CONTEXT, world_size=2, **about)


def each_step_of_each_rank(num_steps: int) -> list[tuple[int, int]]:
    """Return what a whole run has: step and rank."""
    return [(step, rank) for step in range(1, num_steps + 1) for rank in range(2)]


def steps_and_ranks(frame: Any) -> list[tuple[int, int]]:
    """Return what a frame has."""
    return list(zip(frame["step"], frame["rank"], strict=True))


@pytest.mark.extended
def test_all_records_are_in_the_bucket_and_read_while_it_trains(
    chain_s3_server: S3Server, dask_client: Client
) -> None:
    """3,000 records of 2 ranks are in few objects, and are read while they are written."""
    storage = chain_s3_server.storage()
    seen: list[int] = []

    def read_on(event: GangEvent) -> None:
        if isinstance(event, Progress | CheckpointCommitted):
            seen.append(len(read_metrics(storage.uri, "run")))
            if seen[-1] and not any(storage.list(stored.GO_ON)):
                storage.write(stored.GO_ON, b"!")

    with_wait = {"num_steps": NUM_STEPS, "wait_at": 1000}
    storage.write("runs/run/began", b"")  # so that it is a run before its first record
    train(dask_client, storage, with_wait, on_event=read_on)
    assert seen == sorted(seen)
    assert any(0 < num < 2 * NUM_STEPS for num in seen), "nothing was seen while it trained"
    frame = read_metrics(storage.uri, "run")
    assert steps_and_ranks(frame) == each_step_of_each_rank(NUM_STEPS)
    assert (frame["twice_step_plus_rank"] == 2 * frame["step"] + frame["rank"]).all()
    assert list(frame.columns)[:6] == ["step", "epoch", "rank", "attempt", "time", "num_samples"]
    assert frame.groupby("epoch")["num_samples"].sum().tolist() == [2 * NUM_STEPS, 2 * NUM_STEPS]
    duration_s = (frame["time"].max() - frame["time"].min()).total_seconds()
    num_checkpoints = 3
    keys = [found.key for found in storage.list("runs/run/metrics/")]
    num_parts = sum(key.endswith(".jsonl") for key in keys)
    assert num_parts <= 2 * (num_checkpoints + 2 + math.log2(duration_s + 1) + duration_s / 30)


@pytest.mark.extended
def test_killed_ranks_take_no_record_and_no_file_along(
    s3_server: S3Server, dask_client: Client
) -> None:
    """No record and no file of killed ranks is lost, in the last attempt or an earlier one."""
    storage = s3_server.storage()
    options = {"num_steps": NUM_STEPS, "kill": {1: [1, 700], 2: [0, 1250]}}
    with pytest.raises(RankFailedError, match="SIGKILL"):
        train(dask_client, storage, options, max_restarts=1)
    every = read_metrics(storage, "run", all_attempts=True)
    first = every[every["attempt"] == 1]
    assert steps_and_ranks(first)[: 2 * 699] == each_step_of_each_rank(699)
    assert first["step"].max() <= 701
    assert not every.duplicated(["attempt", "step", "rank"]).any()
    frame = read_metrics(storage, "run")
    found = steps_and_ranks(frame)
    assert found[: 2 * 1249] == each_step_of_each_rank(1249)
    assert set(found[2 * 1249 :]) <= {(1250, 0), (1250, 1)}
    resumed_at = every[every["attempt"] == 2]["step"].min()
    assert resumed_at in (1, 601), "the commit of step 600 may have been under way"
    assert set(frame[frame["step"] < resumed_at]["attempt"]) <= {1}
    assert set(frame[frame["step"] >= resumed_at]["attempt"]) == {2}
    saved_by = 1 if resumed_at > 1 else 2
    file = read_result(storage, "run", "notes/first-step.txt").decode()
    assert file == f"of attempt {saved_by}: é"
