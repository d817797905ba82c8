"""Saves on slow storages and after a break, and the ledger."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from prefect_torch_ddp import CheckpointParams, RankContext, read_ledger
from prefect_torch_ddp.checkpoint import checkpointer
from prefect_torch_ddp.checkpoint.manifest import list_manifests
from prefect_torch_ddp.errors import InvalidParamsError, StorageError
from prefect_torch_ddp.storage.directory import DirectoryStorage
from tests.support.forwarding import ForwardingStorage, WatchedStorage
from tests.support.tracked import Tracked, steps_over
from tests.support.waiting import wait_until


class Slow(ForwardingStorage):
    """A directory that takes no object of a checkpoint before something is so."""

    def __init__(self, root: Path, so: Callable[[], object]) -> None:
        super().__init__(root)
        self._so = so

    def write(self, key: str, data: bytes | memoryview) -> None:
        if "/checkpoints/" in key:
            wait_until(self._so)
        super().write(key, data)


def test_saves_wait_for_a_slow_storage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One save is written while the next one waits in its step, and the log says so once."""
    monkeypatch.setattr(checkpointer, "QUIET_S", 0.1)
    used = []

    def is_said() -> bool:
        used.append(len(ctx._assembly.saver._checkpointer._staging._used))
        return "the training waits in step 2 until" in caplog.text

    storage = Slow(tmp_path, is_said)
    policy = CheckpointParams(every_steps=1, every_s=None, keep_last=9)
    with RankContext.local(storage=storage, checkpoint=policy) as ctx:
        model = nn.Linear(4, 1)
        ctx.track(model=model)
        loader = ctx.loader(TensorDataset(torch.ones(24, 4)), global_batch_size=4)
        for (x,) in ctx.steps(loader, epochs=1):
            model(x).sum().backward()
    assert set(used) == {2}  # weight and bias
    assert caplog.text.count("ask for fewer, by checkpoint.every_steps or every_s") == 1
    steps = [manifest.step for manifest in list_manifests(storage.inner, "local")]
    assert steps == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("asks", ["holding the steps", "holding their iterator", "in the body"])
def test_a_checkpoint_behind_a_break_is_written_though_the_loop_is_held(
    tmp_path: Path, asks: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A checkpoint after a break is written at once, unless a held iterator hides the break."""
    storage = DirectoryStorage(tmp_path)
    with RankContext.local(storage=storage, checkpoint=CheckpointParams(every_s=None)) as ctx:
        ctx.track(model=nn.Linear(4, 1))
        steps = steps_over(ctx, 6)
        held = iter(steps) if asks == "holding their iterator" else steps
        for _ in held:
            ctx.checkpoint(force=asks == "in the body")
            break
        if asks == "in the body":
            for _ in steps_over(ctx, 6):
                assert not list_manifests(storage, "local")
        else:
            ctx.checkpoint(force=True)
            ctx._assembly.saver._checkpointer.wait()
            assert len(list_manifests(storage, "local")) == (asks == "holding the steps")
    (manifest,) = list_manifests(storage, "local")
    assert manifest.step == (7 if asks == "in the body" else 1)
    said = "asked for in step 1 has not been written: its loop was left"
    assert caplog.text.count(said) == (asks != "holding the steps")


def test_a_state_that_turns_unreadable_ends_the_training(tmp_path: Path) -> None:
    """Before it is saved, so that the checkpoints before it stay the newest and are restored."""
    policy = CheckpointParams(every_steps=1, every_s=None)
    settings: dict[str, Any] = {"storage": tmp_path, "run_id": "run", "checkpoint": policy}
    best = Tracked()
    refused = r"'best' can't be read back .* state_dict\(\)\['value'\] is a numpy.ndarray"
    with pytest.raises(InvalidParamsError, match=refused), RankContext.local(**settings) as ctx:
        ctx.track(best=best)
        for _ in steps_over(ctx, 6):
            best.value = ctx.step if ctx.step < 3 else np.ones(3)
    steps = [manifest.step for manifest in list_manifests(DirectoryStorage(tmp_path), "run")]
    assert steps[-1] == 2
    resumed = Tracked()
    with RankContext.local(**settings) as ctx:
        ctx.track(best=resumed)
        assert (ctx.step, resumed.value) == (2, 2)


@pytest.mark.parametrize("how", ["a group", "a parameter"])
def test_an_optimizer_that_got_another_group_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """Once, at the first save after that: a resume has to make all groups before it tracks."""
    policy = CheckpointParams(every_steps=1, every_s=None)
    with RankContext.local(storage=tmp_path, checkpoint=policy) as ctx:
        optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1)
        ctx.track(optimizer=optimizer)
        for _ in steps_over(ctx, 4):
            if ctx.step == 3:
                assert "parameter groups" not in caplog.text
                if how == "a group":
                    optimizer.add_param_group({"params": nn.Linear(1, 1).parameters()})
                else:
                    optimizer.param_groups[0]["params"].append(nn.Parameter(torch.ones(1)))
    now = "2 parameter groups of 2, 2" if how == "a group" else "1 parameter group of 3"
    said = f"'optimizer' has {now} parameters, and had 1 parameter group of 2 parameters when it"
    assert caplog.text.count(said) == 1


# ---- The ledger.


def test_loops_that_were_left_are_no_error(tmp_path: Path) -> None:
    """A break and an early stop leave epochs unfinished; the ledger says so, and is clean."""
    with RankContext.local(storage=tmp_path, ledger=True) as ctx:
        for _ in steps_over(ctx, 10, size=3, epochs=3, drop_last=True):
            if ctx.step == 5:
                break
        for _ in steps_over(ctx, 10, size=3, epochs=3, drop_last=True):
            if ctx.step == 9:
                ctx.request_stop("enough")
    assert str(read_ledger(tmp_path, "local")).splitlines() == [
        "epoch 1: 9 samples, each once; 1 left out by drop_last",
        "epoch 2: 6 samples of 10, each once; not finished",
        "epoch 3: 9 samples, each once; 1 left out by drop_last",
        "epoch 4: 3 samples of 10, each once; not finished",
    ]


def test_another_batch_size_in_the_middle_of_an_epoch_is_told(tmp_path: Path) -> None:
    """Samples that are seen twice by it are named, as the log's warning says."""
    for size in (3, 4):
        with RankContext.local(storage=tmp_path, ledger=True) as ctx:
            ctx.track(model=nn.Linear(1, 1))
            for _ in steps_over(ctx, 10, size, shuffle=False):
                if ctx.attempt == 1 and ctx.step == 3:
                    break
    assert str(read_ledger(tmp_path, "local")) == "epoch 1: 10 samples; 1 repeated (8 in step 4)"


def test_a_ledger_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    """A run that is to be proven doesn't end well without its proof; the metrics are written
    all the same."""
    (tmp_path / "runs/local").mkdir(parents=True)
    (tmp_path / "runs/local/ledger").write_text("not a folder")
    with (
        pytest.raises(StorageError, match="3 records of ledger could not be written"),
        RankContext.local(storage=tmp_path, ledger=True) as ctx,
    ):
        for _ in steps_over(ctx, size=4):
            ctx.report(loss=1.0)
    assert list((tmp_path / "runs/local/metrics/rank-00000").iterdir())


@pytest.mark.parametrize("error", [ValueError, KeyError])
def test_a_bug_is_not_taken_for_trouble_with_the_storage(
    tmp_path: Path, error: type[Exception]
) -> None:
    """It is raised as it is, unless the training's own error, a KeyError, is on its way; the
    metrics are written all the same."""

    def before(request: str) -> None:
        if re.match("write.* runs/local/ledger/", request):
            raise ValueError(request)

    storage = WatchedStorage(tmp_path, before)
    with pytest.raises(error), RankContext.local(storage=storage, ledger=True) as ctx:
        for _ in steps_over(ctx, size=4):
            ctx.report(loss=1.0)
        if error is KeyError:
            raise KeyError
    assert list((tmp_path / "runs/local/metrics/rank-00000").iterdir())
