"""Which files a Trainer of Transformers commits."""

import signal
from functools import partial
from pathlib import Path

import pytest

from prefect_torch_ddp import CheckpointParams, RankContext
from prefect_torch_ddp.checkpoint.manifest import list_manifests
from prefect_torch_ddp.storage.directory import DirectoryStorage
from tests.support.ranks import Died, config_for, train_on
from tests.workloads import trainers

pytestmark = [pytest.mark.timeout(600), pytest.mark.long]

KEPT = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6}
"""A Trainer that itself saves in its output_dir."""
LEFT = {
    *("rng_state.pth", "rng_state_0.pth", "rng_state_5.pth", "data_5.pth"),
    *("epoch-ended-early", "ended-run", "ended-other"),
}
"""What trainings on one rank and on six leave in a checkpoint of their output_dir."""


def _leave(folder: Path) -> None:
    for step in (2, 4, 6):
        checkpoint = folder / "out" / f"checkpoint-{step}"
        checkpoint.mkdir(parents=True)
        for name in LEFT:
            (checkpoint / name).write_bytes(b"of another training")


def _committed(folder: Path) -> set[str]:
    newest = list_manifests(DirectoryStorage(folder), "run")[-1]
    assert newest.step == 6
    return {Path(item.path).name for item in newest.objects}


def _train_here(folder: Path, die_at: trainers.DieAt = None) -> str:
    policy = CheckpointParams(every_s=None, every_steps=2)
    with RankContext.local(storage=folder, run_id="run", checkpoint=policy) as ctx:
        return trainers.transformers(ctx, str(folder), die_at, **KEPT)


def test_what_other_trainings_left_in_the_output_dir_is_not_committed(tmp_path: Path) -> None:
    """Before, no resume was possible: the commits seemed to be of more ranks."""
    folders = [tmp_path / "straight", tmp_path / "killed"]
    for folder in folders:
        folder.mkdir()
    straight, killed = folders
    train = partial(trainers.transformers, **KEPT)
    undisturbed = train_on(2, config_for(straight), train, str(straight), None)
    _leave(killed)
    die_at = partial(trainers.die_once_saved, killed, 3, saved=2)
    first = train_on(2, config_for(killed), train, str(killed), die_at)
    assert Died(-signal.SIGKILL) in first
    assert train_on(2, config_for(killed), train, str(killed), None) == undisturbed
    own = {"rng_state_0.pth", "rng_state_1.pth", "data_0.pth", "data_1.pth"}
    assert own <= _committed(killed)
    assert not (LEFT - own) & _committed(killed)


def test_what_gangs_left_in_the_output_dir_is_not_committed_on_one_rank(tmp_path: Path) -> None:
    """Which has a file of its own for its generators."""

    def die(step: int) -> None:
        if step == 3:
            raise ChildProcessError

    undisturbed = _train_here(tmp_path / "straight")
    _leave(tmp_path / "killed")
    with pytest.raises(ChildProcessError):
        _train_here(tmp_path / "killed", die)
    assert _train_here(tmp_path / "killed") == undisturbed
    own = {"rng_state.pth", "data_0.pth"}
    assert own <= _committed(tmp_path / "killed")
    assert not (LEFT - own) & _committed(tmp_path / "killed")
