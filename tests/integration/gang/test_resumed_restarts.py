"""Restarts of functions with a RankContext: each attempt is claimed in the storage and resumes;
the data stay what they were."""

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from distributed import Client

from prefect_torch_ddp import RankFailedError, read_ledger, run_gang
from prefect_torch_ddp.checkpoint.attempts import newest_attempt
from prefect_torch_ddp.checkpoint.run_files import read_failures
from prefect_torch_ddp.errors import SupersededError
from prefect_torch_ddp.gang import run as launch
from prefect_torch_ddp.params import CheckpointParams
from prefect_torch_ddp.protocol.events import AttemptBegan
from prefect_torch_ddp.rank.config import RankConfig
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.tasks.run import RunAttemptLog
from tests.integration.gang.dying_workers import Workers, dying_workers
from tests.integration.gang.test_restarts import attempts_in
from tests.workloads import restarting

if TYPE_CHECKING:
    from prefect_torch_ddp.protocol.events import GangEvent

pytestmark = pytest.mark.timeout(180)

NUM_SAMPLES, BATCH, EPOCHS = 24, 4, 3
RUN_WITH_CONTEXT = "prefect_torch_ddp.rank.workload:run_with_context"


def train(
    client: Client, folder: Path, plan: dict[int, dict[str, Any]], **options: Any
) -> list[dict[str, Any]]:
    """Run the ledger's training with checkpoints every two steps, as the tasks do."""
    storage = DirectoryStorage(folder / "store")

    def arguments(attempt: int) -> tuple[Any, ...]:
        policy = CheckpointParams(every_steps=2, every_s=None)
        config = RankConfig("run", attempt, "task", storage, checkpoint=policy, ledger=True)
        return config, restarting.train_with_ledger, (str(folder), plan, EPOCHS)

    attempt_log = RunAttemptLog(storage, "run", knows_steps=True)
    return run_gang(client, RUN_WITH_CONTEXT, args=arguments, attempt_log=attempt_log, **options)


def ledger_of(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of all ranks in all attempts."""
    return [
        json.loads(line)
        for path in folder.glob("ledger-*")
        for line in path.read_text().splitlines()
    ]


def batches_that_count(folder: Path) -> dict[int, tuple[int, list[int]]]:
    """Return epoch and samples of each step, as the last attempt made it."""
    lines = ledger_of(folder)
    last = {
        step: max(line["attempt"] for line in lines if line["step"] == step)
        for step in {line["step"] for line in lines}
    }
    batches: dict[int, tuple[int, list[int]]] = {}
    for line in lines:
        if line["attempt"] == last[line["step"]]:
            epoch, samples = batches.setdefault(line["step"], (line["epoch"], []))
            assert epoch == line["epoch"]
            samples += line["samples"]
    return {step: (epoch, sorted(samples)) for step, (epoch, samples) in sorted(batches.items())}


def test_four_then_two_then_one_then_four_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers die and come: as many ranks as there is room for, each sample once an epoch, the
    same batches."""
    monkeypatch.setattr(launch, "FULL_SIZE_S", 3.0)
    plan = {
        1: {"step": 4, "how": "wait"},
        2: {"step": 8, "how": "wait"},
        3: {"step": 14, "how": "wait"},
    }
    events: list[GangEvent] = []

    def script(workers: Workers) -> None:
        workers.waiting(1, 4)
        for worker in workers.extra[1:]:
            worker.kill()
        workers.waiting(2, 2)
        workers.extra[0].kill()
        workers.come_again_to_the_last(3)

    with dying_workers(tmp_path, script) as (client, over):
        values = train(
            client,
            tmp_path,
            plan,
            world_size=4,
            min_world_size=1,
            max_restarts=3,
            on_event=events.append,
        )
        over()
        assert attempts_in(events) == [(1, 4), (2, 2), (3, 1), (4, 4)]
        assert [value["world_size"] for value in values] == [4] * 4
        undisturbed = tmp_path / "undisturbed"
        undisturbed.mkdir()
        train(client, undisturbed, {}, world_size=1)
    batches = batches_that_count(tmp_path)
    assert batches == batches_that_count(undisturbed)
    for epoch in range(1, EPOCHS + 1):
        seen = Counter(
            sample for e, samples in batches.values() if e == epoch for sample in samples
        )
        assert seen == Counter(range(NUM_SAMPLES))
    proof = read_ledger(tmp_path / "store", "run")
    assert proof.is_clean
    assert str(proof).splitlines() == [
        f"epoch {epoch}: {NUM_SAMPLES} samples, each once" for epoch in range(1, EPOCHS + 1)
    ]
    assert proof.attempts == {1: 4, 2: 2, 3: 1, 4: 4}
    records = read_failures(DirectoryStorage(tmp_path / "store"), "run")
    assert [(record.attempt, record.world_size) for record in records] == [(1, 4), (2, 2), (3, 1)]


def test_the_same_error_at_the_same_step_twice_ends_it(dask_client: Client, tmp_path: Path) -> None:
    """Attempt 2 is the last one though three restarts are left; the error says why, keeps its
    cause, and the record is kept."""
    plan = {attempt: {"step": 4, "how": "ValueError"} for attempt in range(1, 9)}
    says = "not tried again: the same ValueError at step 4 ended attempt 1 too"
    with pytest.raises(RankFailedError, match=says) as caught:
        train(dask_client, tmp_path, plan, world_size=2, max_restarts=3)
    assert (caught.value.attempt, type(caught.value.__cause__)) == (2, ValueError)
    storage = DirectoryStorage(tmp_path / "store")
    first, second = read_failures(storage, "run")
    assert (
        (first.step, first.fingerprint)
        == (second.step, second.fingerprint)
        == (4, "builtins.ValueError: ValueError: told to fail")
    )
    with pytest.raises(
        RankFailedError, match="at step 4 ended attempt 2 too"
    ):  # a later call, e.g. a retry, remembers
        train(dask_client, tmp_path, plan, world_size=2, max_restarts=3)
    assert newest_attempt(storage, "run") == 3


@pytest.mark.parametrize(
    "faults",
    [
        [(4, "ValueError"), (3, "ValueError"), (4, "ValueError")],
        [(4, "OSError"), (4, "OSError"), (4, "OSError")],
        [(4, "ValueError"), (4, "SIGKILL"), (4, "ValueError")],
    ],
    ids=["another step", "OSError", "a kill between"],
)
def test_what_may_pass_is_tried_again(
    dask_client: Client, tmp_path: Path, faults: list[tuple[int, str]]
) -> None:
    """The same error at another step, an OSError at the same one, and errors with something
    else between them."""
    plan = {
        attempt: {"step": step, "how": how} for attempt, (step, how) in enumerate(faults, start=1)
    }
    values = train(dask_client, tmp_path, plan, world_size=2, max_restarts=3)
    assert [value["attempt"] for value in values] == [4, 4]


def test_a_record_that_cannot_be_written_hides_no_failure(
    dask_client: Client, tmp_path: Path
) -> None:
    """The failure of the rank is what is raised; that it isn't on record is said."""
    (tmp_path / "store" / "runs" / "run").mkdir(parents=True)
    (tmp_path / "store" / "runs" / "run" / "failures").write_text("not a folder")
    events: list[GangEvent] = []
    plan = {1: {"step": 4, "how": "ValueError"}}
    with pytest.raises(RankFailedError, match="ValueError: told to fail"):
        train(dask_client, tmp_path, plan, world_size=2, on_event=events.append)
    assert any("could not be put on record" in getattr(event, "text", "") for event in events)


def test_a_restart_does_not_supersede_a_successor(dask_client: Client, tmp_path: Path) -> None:
    """While attempt 1 ran, somebody who took it for lost began attempt 2: no restart fences
    that one off."""
    storage = DirectoryStorage(tmp_path / "store")
    attempt_log = RunAttemptLog(storage, "run", knows_steps=False)
    args = ([1], "SIGKILL", str(tmp_path))

    def succeed(event: "GangEvent") -> None:
        if isinstance(event, AttemptBegan):
            RunAttemptLog(storage, "run", knows_steps=False).begin()

    with pytest.raises(
        SupersededError, match="attempt 1 of run run has been superseded by attempt 2"
    ) as caught:
        run_gang(
            dask_client,
            restarting.fail_in,
            args=args,
            world_size=2,
            max_restarts=3,
            attempt_log=attempt_log,
            on_event=succeed,
        )
    assert isinstance(caught.value.__cause__, RankFailedError)
    assert newest_attempt(storage, "run") == 2
