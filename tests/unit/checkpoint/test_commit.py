"""Shows what holds when attempts overlap, objects are damaged and storages fail; one process,
real files."""

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from torch.utils.data import TensorDataset

from prefect_torch_ddp import RankContext
from prefect_torch_ddp.checkpoint.attempts import claim_attempt, had_ended
from prefect_torch_ddp.checkpoint.commit import Committer
from prefect_torch_ddp.checkpoint.keys import CheckpointId
from prefect_torch_ddp.checkpoint.manifest import list_manifests
from prefect_torch_ddp.errors import CheckpointError, StorageError, SupersededError
from prefect_torch_ddp.params import CheckpointParams
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.storage.protocol import Storage
from tests.support.tracked import Tracked

EVERY_STEP = CheckpointParams(every_steps=1, every_s=None, keep_last=100)


@dataclass(frozen=True)
class FailingStorage(DirectoryStorage):
    """A directory that refuses to write keys that contain a text."""

    refused: str = ""

    def write(self, key: str, data: bytes) -> None:
        if self.refused in key:
            msg = "the disk is full"
            raise StorageError(msg)
        super().write(key, data)


def count_to(
    storage: Storage | Path,
    num_steps: int,
    policy: CheckpointParams = EVERY_STEP,
    at_step: Callable[[RankContext], object] = lambda _: None,
    **settings: Any,
) -> tuple[RankContext, int]:
    """Train a counter that adds one a step, each checkpoint complete before the next step; return
    the context and the count."""
    with RankContext.local(storage=storage, checkpoint=policy, **settings) as ctx:
        counter = Tracked()
        ctx.track(counter=counter)
        loader = ctx.loader(TensorDataset(torch.zeros(1)), global_batch_size=1)
        for _ in ctx.steps(loader, epochs=num_steps):
            ctx._assembly.saver._checkpointer.wait()
            counter.value += 1
            at_step(ctx)
    return ctx, counter.value


def steps_of(storage: Storage) -> list[int]:
    """Return the steps of the complete checkpoints."""
    return [manifest.step for manifest in list_manifests(storage, "local")]


def test_a_superseded_attempt_cant_commit(tmp_path: Path) -> None:
    """Once a newer attempt is claimed, the older one ends, and what it wrote meanwhile isn't a
    checkpoint."""
    storage = DirectoryStorage(tmp_path)
    says = "attempt 1 of run local has been superseded by attempt 2"
    with pytest.raises(SupersededError, match=says):
        count_to(storage, 9, at_step=lambda ctx: ctx.step == 3 and claim_attempt(storage, "local"))
    assert steps_of(storage) == [1, 2]
    left = tmp_path / "runs/local/checkpoints/step-00000003/000001/counter.pt"
    assert left.exists()
    count_to(storage, 4)  # the attempt after it sweeps up
    assert steps_of(storage) == [1, 2, 3, 4]
    assert not left.exists()


def test_a_superseded_attempt_records_no_end(tmp_path: Path) -> None:
    """A newer attempt that has ended keeps its record when an older one wakes at its own end."""
    storage = DirectoryStorage(tmp_path)
    older = Committer(storage, "local", claim_attempt(storage, "local"), EVERY_STEP)
    count_to(storage, 2)
    assert had_ended(storage, "local", CheckpointId(2, 2))
    with pytest.raises(SupersededError, match="attempt 1 of run local has been superseded by"):
        older.write_end(3, None)
    assert had_ended(storage, "local", CheckpointId(2, 2))


def test_a_storage_that_fails_is_no_reason_to_fall_back(tmp_path: Path) -> None:
    """Else an outage of a minute would throw away an hour."""

    class Unreadable(DirectoryStorage):
        def open_file(self, key: str) -> BinaryIO:
            if not key.endswith(".pt"):
                return super().open_file(key)
            # Opens, and can't be read at its beginning, as a bad disk.
            return Path("/proc/self/mem").open("rb", buffering=0)

    count_to(tmp_path, 3)
    says = r"can't read .*runs/local/.*\.pt: Input/output error; check the disk"
    with pytest.raises(StorageError, match=says):
        count_to(Unreadable(tmp_path), 5)


def test_a_failed_write_is_warned_of_and_the_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The one before stays the newest, and the next one works."""
    assert count_to(FailingStorage(tmp_path, "step-00000002/"), 3)[1] == 3
    assert steps_of(DirectoryStorage(tmp_path)) == [1, 3]
    assert "no checkpoint of step 2" in caplog.text
    assert "step-00000002/000001/counter.pt: the disk is full" in caplog.text


def test_the_log_has_the_first_checkpoint_the_last_and_those_after_a_failure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With size and time; what lies in between is a detail."""
    caplog.set_level(logging.DEBUG, "prefect_torch_ddp.checkpoint")
    count_to(FailingStorage(tmp_path, "step-00000004/"), 8)
    said = re.compile(r"checkpoint at step (\d+) \([\d.]+ MB, [\d,]+ ms\)")
    found = [(r.levelname, m[1]) for r in caplog.records if (m := said.fullmatch(r.message))]
    levels = [*("INFO", "DEBUG", "DEBUG"), *("INFO", "DEBUG", "DEBUG", "DEBUG"), "INFO"]
    assert found == [*zip(levels, "12356788", strict=True)]


def test_a_failed_last_checkpoint_is_an_error(tmp_path: Path) -> None:
    """Also after it has been tried twice, as a due one and as the last."""
    says = r"run local could not be written: .*counter.pt: the disk is full"
    with pytest.raises(CheckpointError, match=says):
        count_to(FailingStorage(tmp_path, "step-00000003/"), 3)
    assert steps_of(DirectoryStorage(tmp_path)) == [1, 2]


@dataclass(frozen=True)
class WithoutRights(DirectoryStorage):
    """A directory that refuses to drop what killed writers left."""

    def drop_unfinished(self, prefix: str, is_over: Callable[[str], bool]) -> None:
        msg = f"ListBucketMultipartUploads of {prefix} is denied"
        raise StorageError(msg)


def test_retention_keeps_the_last_and_the_best(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Objects of the others are gone too; a resumed attempt knows the best of the one before. A
    store that forbids to drop unfinished uploads leaves them, with one warning an attempt."""
    storage, accuracies = WithoutRights(tmp_path), (0.1, 0.9, 0.5, 0.5, 0.2, 0.2)
    policy = CheckpointParams(
        every_steps=1, every_s=None, keep_last=2, keep_best=1, best_metric="accuracy"
    )

    def report(ctx: RankContext) -> None:
        ctx.report(accuracy=accuracies[ctx.step - 1])

    for num_steps, expected in ((4, [2, 3, 4]), (6, [2, 5, 6])):
        count_to(storage, num_steps, policy, report)
        assert steps_of(storage) == expected
    objects = (tmp_path / "runs/local/checkpoints").rglob("*.pt")
    assert {path.parent.parent.name for path in objects} == {f"step-{n:08d}" for n in expected}
    assert caplog.text.count("ListBucketMultipartUploads") == 2


@pytest.mark.parametrize(
    ("asked_for", "most"),
    [({"every_steps": 1}, 3), ({"every_epochs": 1}, 3), ({}, 16)],
    ids=["by steps", "by epochs", "by the loop itself"],
)
def test_the_disk_has_to_hold_few_checkpoints(
    tmp_path: Path, asked_for: dict[str, int], most: int
) -> None:
    """With every_s="auto", however fast they come, only some more than keep_last stay."""
    storage, found = DirectoryStorage(tmp_path), []

    def look(ctx: RankContext) -> None:
        ctx.checkpoint(force=not asked_for)
        found.append(len(steps_of(storage)))

    policy = CheckpointParams(keep_last=1, **asked_for)
    count_to(storage, 24, policy, look)
    assert max(found) == most
    assert steps_of(storage) == [24]


def test_what_an_earlier_attempt_left_stays_long_enough_to_be_read(tmp_path: Path) -> None:
    """With every_s="auto" the first checkpoint after a restart deletes none that may be young."""
    count_to(tmp_path, 3)
    storage, found = DirectoryStorage(tmp_path), []

    def look(ctx: RankContext) -> None:
        found.append(steps_of(storage))
        ctx.checkpoint(force=True)

    count_to(storage, 6, CheckpointParams(keep_last=1), look)
    assert found[-1] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("refused", "left"), [("step-00000004/", [1, 2, 3, 5, 6]), ("step-0000000[45]/", [3, 6])]
)
def test_one_failed_write_deletes_no_young_checkpoints(
    tmp_path: Path, refused: str, left: list[int]
) -> None:
    """A server may be away for a moment; after a second one in a row there may be no room."""

    @dataclass(frozen=True)
    class Refusing(DirectoryStorage):
        def write(self, key: str, data: bytes | memoryview) -> None:
            if re.search(refused, key):
                msg = "the endpoint didn't answer in time"
                raise StorageError(msg)
            super().write(key, data)

    def save(ctx: RankContext) -> None:
        ctx.checkpoint(force=True)
        if ctx.step == 7:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        count_to(Refusing(tmp_path), 9, CheckpointParams(keep_last=1), save)
    assert steps_of(DirectoryStorage(tmp_path)) == left


def test_what_follows_the_last_commit_is_made_up_for(tmp_path: Path) -> None:
    """An attempt that was killed between its last commit and the clean-up: the next one adds no
    step, and cleans up."""
    count_to(tmp_path, 3)
    left = tmp_path / "runs/local/checkpoints/step-00000004/000001/counter.pt"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"a checkpoint that was never committed")
    count_to(tmp_path, 3, CheckpointParams(every_steps=1, every_s=None, keep_last=1))
    assert steps_of(DirectoryStorage(tmp_path)) == [3]
    assert not left.exists()
