"""What is tracked and saved: refusals, slow storages, the best one, saves behind a break."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from prefect_torch_ddp import CheckpointParams, RankContext
from prefect_torch_ddp.checkpoint import checkpointer
from prefect_torch_ddp.checkpoint.manifest import best, list_manifests
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.storage.directory import DirectoryStorage
from tests.support.forwarding import ForwardingStorage
from tests.support.tracked import Tracked
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
    """One is written and one waits, in its step: no third copy of the state is made, it is
    said, once, and none is lost."""
    monkeypatch.setattr(checkpointer, "QUIET_S", 0.1)
    used = []

    def is_said() -> bool:
        used.append(len(ctx._parts.tracker._checkpointer._staging._used))
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


def with_validation(folder: Path, *, saves_with_it: bool, dies_at: int | None = None) -> None:
    """Train five epochs of four steps, validated at each end; a checkpoint every three steps,
    the last and the best one kept."""
    policy = CheckpointParams(
        every_steps=3, every_s=None, keep_last=1, keep_best=1, best_metric="val_accuracy"
    )
    with RankContext.local(storage=folder, checkpoint=policy) as ctx:
        model = nn.Linear(4, 1)
        ctx.track(model=model)
        for (x,) in ctx.steps(
            ctx.loader(TensorDataset(torch.ones(16, 4)), global_batch_size=4), epochs=5
        ):
            if ctx.step == dies_at:
                raise InterruptedError
            model(x).sum().backward()
            ctx.report(loss=1.0)
            if ctx.epoch_ended:
                ctx.report(val_accuracy=(0.1, 0.9, 0.3, 0.2, 0.4)[ctx.epoch - 1])
            ctx.checkpoint(force=saves_with_it and ctx.epoch_ended)


@pytest.mark.parametrize(("saves_with_it", "expected"), [(False, 9), (True, 8)])
def test_the_best_by_a_metric_of_each_epoch(
    tmp_path: Path,
    saves_with_it: bool,
    expected: int,
) -> None:
    """The first checkpoint behind the best validation, or the one of that very step; also over
    a failure, long after it."""
    with pytest.raises(InterruptedError):
        with_validation(tmp_path, saves_with_it=saves_with_it, dies_at=14)
    with_validation(tmp_path, saves_with_it=saves_with_it)
    storage = DirectoryStorage(tmp_path)
    assert [manifest.step for manifest in list_manifests(storage, "local")] == [expected, 20]
    top = best(storage, "local", "val_accuracy")
    assert top is not None
    assert (top.step, top.metrics["val_accuracy"]) == (expected, 0.9)


@pytest.mark.parametrize("asks", ["holding the steps", "holding their iterator", "in the body"])
def test_a_checkpoint_behind_a_break_is_written_though_the_loop_is_held(
    tmp_path: Path, asks: str, caplog: pytest.LogCaptureFixture
) -> None:
    """At once, where a variable holds what `ctx.steps` returned; an iterator that is held can't
    be told from a step under way, which is said, and ends with the training. Nor does the end of
    the step come whose body asked and broke off, which no later step writes in its place."""
    storage = DirectoryStorage(tmp_path)
    with RankContext.local(storage=storage, checkpoint=CheckpointParams(every_s=None)) as ctx:
        ctx.track(model=nn.Linear(4, 1))
        loader = ctx.loader(TensorDataset(torch.ones(24, 4)), global_batch_size=4)
        steps = ctx.steps(loader, epochs=1)
        held = iter(steps) if asks == "holding their iterator" else steps
        for _ in held:
            ctx.checkpoint(force=asks == "in the body")
            break
        if asks == "in the body":
            for _ in ctx.steps(loader, epochs=1):
                assert not list_manifests(storage, "local")
        else:
            ctx.checkpoint(force=True)
            ctx._parts.tracker._checkpointer.wait()
            assert len(list_manifests(storage, "local")) == (asks == "holding the steps")
    (manifest,) = list_manifests(storage, "local")
    assert manifest.step == (7 if asks == "in the body" else 1)
    said = "asked for in step 1 has not been written: its loop was left"
    assert caplog.text.count(said) == (asks != "holding the steps")


class Unloadable:
    """What can be tracked by its methods, and not read back."""

    def state_dict(self) -> dict[str, Any]:
        return {"folder": Path()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take nothing."""


def test_an_object_that_was_refused_is_not_tracked(tmp_path: Path) -> None:
    """Nor are those of the same call: who catches the error may track them, and the training
    ends well."""
    with RankContext.local(storage=tmp_path) as ctx:
        model = nn.Linear(1, 1)
        with pytest.raises(InvalidParamsError, match="'other'"):
            ctx.track(model=model, other=Unloadable())
        ctx.track(model=model)
    (manifest,) = list_manifests(DirectoryStorage(tmp_path), "local")
    assert {item.name for item in manifest.objects} == {"model", "rank-00000"}


def test_a_state_that_turns_unreadable_ends_the_training(tmp_path: Path) -> None:
    """Before it is saved, so that the checkpoints before it stay the newest and are restored."""
    policy = CheckpointParams(every_steps=1, every_s=None)
    settings: dict[str, Any] = {"storage": tmp_path, "run_id": "run", "checkpoint": policy}
    best = Tracked()
    refused = r"'best' can't be read back .* state_dict\(\)\['value'\] is a numpy.ndarray"
    with pytest.raises(InvalidParamsError, match=refused), RankContext.local(**settings) as ctx:
        ctx.track(best=best)
        loader = ctx.loader(TensorDataset(torch.ones(6)), global_batch_size=1)
        for _ in ctx.steps(loader, epochs=1):
            best.value = ctx.step if ctx.step < 3 else np.ones(3)
    steps = [manifest.step for manifest in list_manifests(DirectoryStorage(tmp_path), "run")]
    assert steps[-1] == 2
    resumed = Tracked()
    with RankContext.local(**settings) as ctx:
        ctx.track(best=resumed)
        assert (ctx.step, resumed.value) == (2, 2)
