"""Every record of every rank and every file handed over is in the bucket, whatever ended the
ranks."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from distributed import Client

from prefect_torch_ddp import (
    InvalidParamsError,
    RankFailedError,
    read_metrics,
    read_result,
    run_gang,
)
from prefect_torch_ddp.params import CheckpointParams
from prefect_torch_ddp.protocol.events import CheckpointCommitted, GangEvent, Progress
from prefect_torch_ddp.rank.config import RankConfig
from prefect_torch_ddp.storage.s3.storage import S3Storage
from prefect_torch_ddp.tasks.run import RunAttemptLog
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

    attempt_log = RunAttemptLog(storage, "run", knows_steps=True)
    run_gang(
        client,
        RUN_WITH_CONTEXT,
        args=arguments,
        world_size=2,
        attempt_log=attempt_log,
        on_event=on_event,
        **gang,
    )


def each_step_of_each_rank(num_steps: int) -> list[tuple[int, int]]:
    """Return what a whole run has: step and rank."""
    return [(step, rank) for step in range(1, num_steps + 1) for rank in range(2)]


def test_all_records_are_in_the_bucket_and_read_while_it_trains(
    chain_s3_server: S3Server,
    dask_client: Client,
) -> None:
    """2 ranks x 1,500 steps: 3,000 records in few objects; read by the URI with the AWS chain
    while they are written."""
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
    assert list(zip(frame["step"], frame["rank"], strict=True)) == each_step_of_each_rank(NUM_STEPS)
    assert (frame["twice_step_plus_rank"] == 2 * frame["step"] + frame["rank"]).all()
    assert list(frame.columns)[:6] == ["step", "epoch", "rank", "attempt", "time", "num_samples"]
    assert frame.groupby("epoch")["num_samples"].sum().tolist() == [2 * NUM_STEPS, 2 * NUM_STEPS]
    duration_s = frame["time"].max() - frame["time"].min()
    num_checkpoints = 3
    num_parts = len(
        [found for found in storage.list("runs/run/metrics/") if found.key.endswith(".jsonl")]
    )
    assert num_parts <= 2 * (num_checkpoints + 2 + math.log2(duration_s + 1) + duration_s / 30)


def test_a_killed_rank_takes_no_record_along(s3_server: S3Server, dask_client: Client) -> None:
    """Neither its own nor those of the other, which is killed with it and had its newest
    records nowhere else."""
    storage = s3_server.storage()
    options = {"num_steps": NUM_STEPS, "kill": {1: [1, 700]}}
    train(dask_client, storage, options, max_restarts=1)
    every = read_metrics(storage, "run", all_attempts=True)
    first = every[every["attempt"] == 1]
    assert list(zip(first["step"], first["rank"], strict=True))[
        : 2 * 699
    ] == each_step_of_each_rank(699)
    assert first["step"].max() <= 701
    assert not first.duplicated(["step", "rank"]).any()
    frame = read_metrics(storage, "run")
    assert list(zip(frame["step"], frame["rank"], strict=True)) == each_step_of_each_rank(NUM_STEPS)
    resumed_at = every[every["attempt"] == 2]["step"].min()
    assert resumed_at in (1, 601), "the commit of step 600 may have been under way"
    assert set(frame[frame["step"] < resumed_at]["attempt"]) <= {1}
    assert set(frame[frame["step"] >= resumed_at]["attempt"]) == {2}


@pytest.mark.parametrize("how", ["kill", "raise"])
def test_what_was_handed_over_outlives_a_failure(
    s3_server: S3Server,
    dask_client: Client,
    how: str,
) -> None:
    """A file of ctx.save is in the bucket when the run fails later, and so is every
    record; there is no restart."""
    storage = s3_server.storage()
    fault = {"kill": {1: [0, 40]}} if how == "kill" else {"fail_at": 40}
    with pytest.raises(
        RankFailedError, match="SIGKILL" if how == "kill" else "told to fail at step 40"
    ):
        train(dask_client, storage, {"num_steps": 100, **fault})
    assert read_result(storage, "run", "notes/first-step.txt").decode() == "of attempt 1: é"
    frame = read_metrics(storage, "run")
    found = list(zip(frame["step"], frame["rank"], strict=True))
    assert found[: 2 * 39] == each_step_of_each_rank(39)
    assert set(found[2 * 39 :]) <= {(40, 0), (40, 1)}


def test_a_run_that_is_not_there_is_named(s3_server: S3Server) -> None:
    """With the place that was looked at."""
    storage = s3_server.storage()
    with pytest.raises(InvalidParamsError, match=f"{storage.uri} holds no run 'nobody'"):
        read_metrics(storage, "nobody")
