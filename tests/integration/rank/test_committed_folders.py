"""Another attempt and world size find the folders that ranks commit, and never half of one."""

import os
import signal
from pathlib import Path

import pytest

from prefect_torch_ddp import RankContext
from prefect_torch_ddp.checkpoint.manifest import list_manifests
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.storage.protocol import Storage
from tests.support.ranks import Died, config_for, train_on
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(300)


def newest(storage: Storage) -> int:
    """Return the step of the newest commit; 0: there is none."""
    return max((each.step for each in list_manifests(storage, "run")), default=0)


def train(ctx: RankContext, steps: int, dies_at: int | None) -> tuple[list[str], int]:
    """Count in files, one of each rank; return what was found at the start, and the last step."""
    found = sorted(
        path.relative_to(ctx.checkpoint_folder).as_posix()
        for path in ctx.checkpoint_folder.rglob("*")
        if path.is_file()
    )
    first = int(ctx.committed.name) if ctx.committed else 0
    for step in range(first + 1, steps + 1):
        due = ctx.due(step)
        if due.save:
            folder = ctx.checkpoint_folder / str(step)
            folder.mkdir()
            (folder / f"of-{ctx.rank}").write_text(f"{step} of {ctx.world_size}")
            (folder / "same").write_text("the same on all ranks")
            if step == dies_at and ctx.rank == ctx.world_size - 1:
                storage = ctx.config.storage
                wait_until(lambda: newest(storage) == 4)  # noqa: B023
                os.kill(os.getpid(), signal.SIGKILL)
            ctx.commit(folder, step=step)
        if due.stop:
            break
    return found, step


def test_a_killed_commit_does_not_count_and_another_world_size_goes_on(tmp_path: Path) -> None:
    """All ranks find each rank's files of the last step that all had committed."""
    _, died = train_on(2, config_for(tmp_path), train, 8, 6)
    assert isinstance(died, Died)
    storage = DirectoryStorage(tmp_path)
    assert [each.step for each in list_manifests(storage, "run")] == [2, 4]
    for found, step in train_on(3, config_for(tmp_path), train, 8, None):
        assert (found, step) == (["4/of-0", "4/of-1", "4/same"], 8)
    last = list_manifests(storage, "run")[-1]
    assert (last.step, last.world_size, last.attempt) == (8, 3, 2)
    assert [item.path for item in last.objects] == ["8/of-0", "8/same", "8/of-1", "8/of-2"]
    kept = {item.key for each in list_manifests(storage, "run") for item in each.objects}
    prefix = "runs/run/checkpoints/"
    there = {each.key for each in storage.list(prefix) if "manifest" not in each.key}
    assert there == kept, "of the killed commit, and of doubles, nothing stays"
