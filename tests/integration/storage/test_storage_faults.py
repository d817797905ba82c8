"""Storages fail while ranks train: a full or read-only disk, a server that is down, one
rank's network."""

import os
import re
import subprocess
from collections.abc import Container, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from distributed import Client
from torch import nn

from prefect_torch_ddp import RankContext, RankFailedError, run_gang
from prefect_torch_ddp.checkpoint.attempts import claim_attempt
from prefect_torch_ddp.checkpoint.keys import checkpoints_prefix
from prefect_torch_ddp.checkpoint.manifest import list_manifests
from prefect_torch_ddp.errors import CheckpointError
from prefect_torch_ddp.params import CheckpointParams
from prefect_torch_ddp.protocol.events import LogLine, Progress
from prefect_torch_ddp.rank.config import RankConfig
from prefect_torch_ddp.rank.stages import run_with_context
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.storage.protocol import Storage
from tests.support.gangs import RUN_WITH_CONTEXT
from tests.support.ranks import run_ranks
from tests.support.s3_server import Wire, answer
from tests.unit.checkpoint.test_commit import FailingStorage
from tests.workloads import stored

pytestmark = pytest.mark.extended


EVERY_STEP = CheckpointParams(every_steps=1, every_s=None, keep_last=3)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of four megabytes."""
    if os.geteuid() != 0:
        pytest.skip("to mount a file system takes root")
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def config_for(storage: Storage, policy: CheckpointParams) -> RankConfig:
    """Describe the run's next attempt, and claim it."""
    attempt = claim_attempt(storage, "run")
    return RankConfig("run", attempt, "task", storage, checkpoint=policy)


def train(
    storage: Storage, place: Path | None = None, plan: dict[int, str] | None = None, **policy: Any
) -> list[dict[str, Any]]:
    """Train on two real ranks."""
    config = config_for(storage, EVERY_STEP.model_copy(update=policy))
    through = (stored.train_through, (str(place), plan or {}))
    return run_ranks(run_with_context, 2, config, *through)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the digest of the weights when nothing happens."""
    values = train(DirectoryStorage(tmp_path_factory.mktemp("undisturbed")))
    return str(values[0]["sha256"])


def steps_of(storage: Storage) -> list[int]:
    """Return the steps of the complete checkpoints; nothing else may lie about."""
    manifests = list_manifests(storage, "run")
    needed = {item.key for manifest in manifests for item in manifest.objects}
    found = {
        stored.key
        for stored in storage.list(checkpoints_prefix("run"))
        if not stored.key.endswith("manifest.json")
    }
    assert found == needed, "objects without a checkpoint, or a checkpoint with holes"
    return [manifest.step for manifest in manifests]


def check_told(values: list[dict[str, Any]], plan: dict[int, str], reason: str) -> None:
    """Check that all ranks continued, and that rank 0 said why and since when there was no
    checkpoint."""
    struck, repaired = plan
    for step, trouble in values[0]["troubles"].items():
        if struck < step <= repaired:
            assert trouble.startswith(f"no checkpoint since step {struck - 1}: "), (step, trouble)
            assert reason in trouble
        else:
            assert trouble == "", step
    for step in range(struck, repaired):
        (line,) = [line for line in values[0]["said"] if f"no checkpoint of step {step}," in line]
        assert reason in line


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        ({4: "fill", 7: "free"}, "the disk is full: free space there"),
        ({4: "ro", 7: "rw"}, "isn't mounted read-only"),
    ],
    ids=["full", "read-only"],
)
def test_a_training_outlives_a_disk_that_fails(
    undisturbed: str, small_disk: Path, plan: dict[int, str], reason: str
) -> None:
    """A full or read-only disk costs a warning with the object's name, and leaves no remains."""
    storage = DirectoryStorage(small_disk / "store")
    values = train(storage, small_disk, plan)
    check_told(values, plan, reason)
    assert any(
        f"runs/run/checkpoints/step-00000004/000001/model.pt: can't write {small_disk}" in s
        for s in values[0]["said"]
    )
    assert steps_of(storage) == [7, 8, 9]
    assert not list((small_disk / "store" / ".tmp").iterdir())
    assert {value["sha256"] for value in values} == {undisturbed}


@pytest.mark.parametrize("plan", [{4: "fill"}, {4: "ro"}], ids=["full", "read-only"])
def test_a_disk_that_fails_to_the_end_keeps_the_last_good_checkpoint(
    small_disk: Path, plan: dict[int, str]
) -> None:
    """The training ends with an error, and a new attempt resumes after the repair."""
    storage = DirectoryStorage(small_disk / "store")
    says = r"CheckpointError: the last checkpoint of run run could not be written: runs/run/"
    with pytest.raises(AssertionError, match=says):
        train(storage, small_disk, plan)
    assert steps_of(storage) == [1, 2, 3]
    stored.strike("free" if plan[4] == "fill" else "rw", small_disk)
    values = train(storage)
    assert steps_of(storage) == [7, 8, 9]
    assert sorted(values[0]["troubles"]) == [4, 5, 6, 7, 8, 9], "it resumed from step 3"


@pytest.mark.parametrize(
    "fault", [answer(503, "SlowDown"), answer(507, "XMinioStorageFull")], ids=["503", "507"]
)
def test_a_training_outlives_a_server_that_is_down(
    tmp_path: Path, undisturbed: str, open_s3_server: Any, fault: Any
) -> None:
    """Checkpoints continue after a server failed for two steps, without remains of the
    failed ones."""
    place, plan = tmp_path / "down", {4: "down", 6: "up"}
    with Wire(
        open_s3_server.endpoint_url, outage=lambda: fault if place.exists() else None
    ) as wire:
        storage = open_s3_server.storage(endpoint_url=wire.endpoint_url, max_attempts=2)
        values = train(storage, place, plan)
        is_busy = "503" in values[0]["troubles"][5]
        check_told(values, plan, "overloaded or down" if is_busy else "the store is full")
        assert steps_of(storage) == [7, 8, 9]
    assert {value["sha256"] for value in values} == {undisturbed}


def test_a_training_outlives_a_store_that_hangs(undisturbed: str, ceph_server: Any) -> None:
    """Each checkpoint is given up in bounded time while Ceph answers nothing."""
    plan = {4: "pause", 6: "unpause"}
    storage = ceph_server.storage(read_timeout_s=1.0, max_attempts=2)
    try:
        values = train(storage, ceph_server.home / "ceph.conf", plan)
    finally:
        ceph_server.ceph("osd", "unset", "pause")
    check_told(values, plan, "the endpoint didn't answer in time")
    assert steps_of(storage) == [7, 8, 9]
    assert {value["sha256"] for value in values} == {undisturbed}


def test_one_rank_that_cant_write_is_named(tmp_path: Path) -> None:
    """Rank 0 names the rank, and its own objects of that checkpoint are deleted."""
    storage = FailingStorage(tmp_path, "step-00000004/000001/rank-00001")
    values = train(storage)
    assert values[0]["troubles"][5] == (
        "no checkpoint since step 3: rank 1: "
        "runs/run/checkpoints/step-00000004/000001/rank-00001.pt: the disk is full"
    )
    assert values[0]["troubles"][6] == ""
    assert steps_of(DirectoryStorage(tmp_path)) == [7, 8, 9]


@pytest.mark.parametrize("refused", ["rank-00000", "rank-00001"])
def test_a_training_that_is_to_fail_with_its_checkpoint_fails(tmp_path: Path, refused: str) -> None:
    """`on_failure="fail"` raises a CheckpointError with object and reason in the next step."""
    storage = FailingStorage(tmp_path, f"step-00000004/000001/{refused}")
    key = rf"runs/run/checkpoints/step-00000004/000001/{refused}\.pt"
    says = rf"could not be written: (rank 1: )?{key}: the disk is full"
    with pytest.raises(
        AssertionError, match=f"CheckpointError: the last checkpoint of run run {says}"
    ):
        train(storage, on_failure="fail")
    values = train(DirectoryStorage(tmp_path))
    assert min(values[0]["troubles"]) == 4, "it resumed from step 3"
    assert steps_of(DirectoryStorage(tmp_path)) == [7, 8, 9]


def test_the_caller_of_a_gang_hears_of_it(dask_client: Client, tmp_path: Path) -> None:
    """Progress and log have the failure, and with `on_failure="fail"` it is the error's cause."""
    events: list[Any] = []

    def fail(storage: Storage, policy: CheckpointParams) -> RankFailedError:
        config = config_for(storage, policy)
        arguments = (config, stored.train_through, ("", {}))
        with pytest.raises(RankFailedError, match="could not be written") as caught:
            run_gang(
                dask_client, RUN_WITH_CONTEXT, args=arguments, world_size=2, on_event=events.append
            )
        return caught.value

    storage = FailingStorage(tmp_path, "step-00000007/")
    error = fail(storage, EVERY_STEP.model_copy(update={"on_failure": "fail"}))
    assert isinstance(error.__cause__, CheckpointError)
    assert "step-00000007/000001/" in str(error)
    assert "the disk is full" in str(error)
    lines = [event.text for event in events if isinstance(event, LogLine)]
    assert any("no checkpoint of step 7, " in line for line in lines)
    error = fail(FailingStorage(tmp_path / "never", "rank-00000"), EVERY_STEP)
    assert "the last checkpoint of run run could not be written" in str(error)
    troubles = {event.trouble for event in events if isinstance(event, Progress)}
    says = "no checkpoint yet: runs/run/checkpoints/step-"
    assert any(trouble.startswith(says) for trouble in troubles), troubles


def train_on_a_small_disk(
    disk: Path, num_steps: int, forced: Container[int] = (), *, fails: bool = False
) -> list[int]:
    """Train a model of 600 kB, with a checkpoint in each of the forced steps and at the end,
    unless it fails there; return the steps of the checkpoints that are left."""
    policy = {"keep_last": 1}
    with (
        suppress(InterruptedError),
        RankContext.local(storage=disk / "store", run_id="run", checkpoint=policy) as ctx,
    ):
        ctx.track(model=nn.Linear(150_000, 1))
        for _ in ctx.steps(total=num_steps):
            ctx.checkpoint(force=ctx.step in forced)
        if fails:
            raise InterruptedError
    return steps_of(DirectoryStorage(disk / "store"))


def test_checkpoints_that_only_their_age_keeps_make_room(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A disk that holds `keep_last`, but not all those that are kept for 30 s besides, costs
    single checkpoints, and not the last one."""
    assert train_on_a_small_disk(small_disk, 12, range(1, 13)) == [12]
    failed = re.findall(r"no checkpoint of step (\d+),", caplog.text)
    assert failed == ["7"]


def test_the_last_checkpoint_finds_room(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is written even if the disk is full of those that only their age keeps."""
    assert train_on_a_small_disk(small_disk, 7, range(1, 7)) == [7]
    assert "no checkpoint of step" not in caplog.text


def test_what_an_earlier_attempt_left_makes_room(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An attempt whose first checkpoint finds the disk full deletes those of the one before,
    except the one from which it has resumed."""
    filled = [1, 2, 3, 4, 5, 6]
    assert train_on_a_small_disk(small_disk, 6, range(1, 7), fails=True) == filled
    (newest,) = (small_disk / "store/runs/run/checkpoints/step-00000006").rglob("model.pt")
    newest.write_bytes(newest.read_bytes()[::-1])
    assert train_on_a_small_disk(small_disk, 7, [7], fails=True) == [5]
    assert train_on_a_small_disk(small_disk, 9, range(7, 9)) == [9]
    assert re.findall(r"no checkpoint of step (\d+),", caplog.text) == ["7"]
