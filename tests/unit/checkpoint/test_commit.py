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

from prefect_torch_ddp import RankContext
from prefect_torch_ddp.checkpoint.attempts import claim_attempt
from prefect_torch_ddp.checkpoint.manifest import list_manifests
from prefect_torch_ddp.errors import CheckpointError, StorageError, SupersededError
from prefect_torch_ddp.params import CheckpointParams
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.storage.protocol import Storage

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


class Counter:
    """The least that can be tracked."""

    def __init__(self) -> None:
        self.value = torch.zeros(())

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"].clone()


def count_to(
    storage: Storage | Path,
    num_steps: int,
    policy: CheckpointParams = EVERY_STEP,
    metrics: dict[int, float] | None = None,
) -> Counter:
    """Train a counter that adds one a step; each checkpoint is complete before the next
    step."""
    with RankContext.local(storage=storage, checkpoint=policy) as ctx:
        counter = Counter()
        ctx.track(counter=counter)
        dataset = torch.utils.data.TensorDataset(torch.zeros(1))
        for _ in ctx.steps(ctx.loader(dataset, global_batch_size=1), epochs=num_steps):
            ctx._parts.tracker._checkpointer.wait()
            counter.value += 1
            if metrics is not None and ctx.step in metrics:
                ctx.report(accuracy=metrics[ctx.step])
    return counter


def steps_of(storage: Storage) -> list[int]:
    """Return the steps of the complete checkpoints."""
    return [manifest.step for manifest in list_manifests(storage, "local")]


def test_a_superseded_attempt_cant_commit(tmp_path: Path) -> None:
    """Once a newer attempt is claimed, the older one ends, and what it wrote meanwhile isn't a
    checkpoint."""
    storage = DirectoryStorage(tmp_path)
    with (
        pytest.raises(
            SupersededError, match="attempt 1 of run local has been superseded by attempt 2"
        ),
        RankContext.local(storage=storage, checkpoint=EVERY_STEP) as ctx,
    ):
        ctx.track(counter=Counter())
        for _ in ctx.steps(
            ctx.loader(torch.utils.data.TensorDataset(torch.zeros(1)), global_batch_size=1),
            epochs=9,
        ):
            ctx._parts.tracker._checkpointer.wait()
            if ctx.step == 3:
                claim_attempt(storage, "local")
    assert steps_of(storage) == [1, 2]
    assert (tmp_path / "runs/local/checkpoints/step-00000003/000001/counter.pt").exists()

    count_to(storage, 4)  # the attempt after it sweeps up
    assert steps_of(storage) == [1, 2, 3, 4]
    assert not (tmp_path / "runs/local/checkpoints/step-00000003/000001/counter.pt").exists()


def test_a_storage_that_fails_is_no_reason_to_fall_back(tmp_path: Path) -> None:
    """Else an outage of a minute would throw away an hour."""

    class Unreadable(DirectoryStorage):
        def open_file(self, key: str) -> BinaryIO:
            if not key.endswith(".pt"):
                return super().open_file(key)
            return Path("/proc/self/mem").open(
                "rb", buffering=0
            )  # opens, and can't be read at its beginning, as a bad disk

    count_to(tmp_path, 3)
    with pytest.raises(
        StorageError,
        match=r"can't read .*runs/local/.*\.pt: Input/output error; check the disk",
    ):
        count_to(Unreadable(tmp_path), 5)


def test_a_failed_write_is_warned_of_and_the_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The one before stays the newest, and the next one works."""
    counter = count_to(FailingStorage(tmp_path, "step-00000002/"), 3)
    assert counter.value.item() == 3
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
    levels = {int(step): level for level, step in found[:7]}
    assert levels == {
        1: "INFO",
        2: "DEBUG",
        3: "DEBUG",
        5: "INFO",
        6: "DEBUG",
        7: "DEBUG",
        8: "DEBUG",
    }
    assert found[7:] == [("INFO", "8")]


def test_a_failed_last_checkpoint_is_an_error(tmp_path: Path) -> None:
    """Also after it has been tried twice, as a due one and as the last."""
    with pytest.raises(
        CheckpointError, match=r"run local could not be written: .*counter.pt: the disk is full"
    ):
        count_to(FailingStorage(tmp_path, "step-00000003/"), 3)
    assert steps_of(DirectoryStorage(tmp_path)) == [1, 2]


def test_retention_keeps_the_last_and_the_best(tmp_path: Path) -> None:
    """Objects of the others are gone too; a resumed attempt knows the best of the one
    before."""
    policy = CheckpointParams(
        every_steps=1, every_s=None, keep_last=2, keep_best=1, best_metric="accuracy"
    )
    count_to(tmp_path, 4, policy, {1: 0.1, 2: 0.9, 3: 0.5, 4: 0.5})
    assert steps_of(DirectoryStorage(tmp_path)) == [2, 3, 4]
    count_to(tmp_path, 6, policy, {5: 0.2})
    assert steps_of(DirectoryStorage(tmp_path)) == [2, 5, 6]
    folders = {
        path.parent.parent.name for path in (tmp_path / "runs/local/checkpoints").rglob("*.pt")
    }
    assert folders == {"step-00000002", "step-00000005", "step-00000006"}


@dataclass(frozen=True)
class WithoutRights(DirectoryStorage):
    """A directory that refuses to drop what killed writers left."""

    def drop_unfinished(self, prefix: str, is_over: Callable[[str], bool]) -> None:
        msg = f"ListBucketMultipartUploads of {prefix} is denied"
        raise StorageError(msg)


def test_retention_needs_no_right_to_drop_uploads(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A store that forbids it leaves them, with one warning; old checkpoints are deleted all
    the same."""
    count_to(WithoutRights(tmp_path), 5, CheckpointParams(every_steps=1, every_s=None, keep_last=2))
    assert steps_of(DirectoryStorage(tmp_path)) == [4, 5]
    assert caplog.text.count("ListBucketMultipartUploads") == 1


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


def test_a_new_run_may_start_from_another(tmp_path: Path) -> None:
    """`resume_from` counts until the run has a checkpoint of its own; the other run's stays."""
    count_to(tmp_path, 3)
    for _ in range(2):
        with RankContext.local(storage=tmp_path, run_id="next", resume_from="local") as ctx:
            counter = Counter()
            ctx.track(counter=counter)
            assert counter.value.item() == 3
            assert ctx.step == 3
    assert [manifest.step for manifest in list_manifests(DirectoryStorage(tmp_path), "next")] == [3]
    assert steps_of(DirectoryStorage(tmp_path)) == [1, 2, 3]
    with (
        pytest.raises(CheckpointError, match="resume_from is 'nobody'"),
        RankContext.local(storage=tmp_path, run_id="third", resume_from="nobody") as ctx,
    ):
        ctx.track(counter=Counter())
