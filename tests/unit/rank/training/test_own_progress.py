"""Loops that aren't `ctx.steps`, and say how far they are: what people see, and what is kept."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from prefect_torch_ddp import CheckpointParams, InvalidParamsError, RankContext, read_metrics
from prefect_torch_ddp.protocol import heartbeat as layout
from prefect_torch_ddp.protocol.events import Progress, RankEvent
from prefect_torch_ddp.protocol.heartbeat import PAGE_BYTES, Heartbeat
from prefect_torch_ddp.rank.assembly import ContextAssembly
from prefect_torch_ddp.rank.config import RankInfo
from prefect_torch_ddp.rank.heartbeat_writer import HeartbeatWriter
from prefect_torch_ddp.rank.link import Link
from prefect_torch_ddp.rank.training.reporting import reporter
from prefect_torch_ddp.storage.directory import DirectoryStorage
from tests.support.ranks import config_for
from tests.support.records import read_records
from tests.support.tracked import Tracked


class Listening(Link):
    """A link that keeps what it receives, and the heartbeat's page."""

    def __init__(self) -> None:
        super().__init__()
        self.page = bytearray(PAGE_BYTES)
        self.heartbeat = HeartbeatWriter(self.page)
        self.told: list[Progress] = []

    def send(self, event: RankEvent) -> None:
        if isinstance(event, Progress):
            self.told.append(event)


def test_people_and_watches_see_a_loop_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its steps, how many there are, its epochs; the outcome has them too."""
    monkeypatch.setattr(reporter, "PROGRESS_INTERVAL_S", 0.0)
    link = Listening()
    parts = ContextAssembly(config_for(tmp_path), RankInfo(), link, device=torch.device("cpu"))
    with RankContext(parts) as ctx:
        for step in (1, 2, np.int64(3)):
            ctx.progress(step, 3, epoch=1 + (step == 3))
            beat = Heartbeat.from_page(bytes(link.page[: layout.PAGE_BYTES]))
            assert (beat.step, beat.epoch, beat.armed) == (step, 1 + (step == 3), True)
            ctx.report(loss=1.0 / step)
    seen = {(each.step, each.epoch, each.total_steps, each.total_epochs) for each in link.told}
    assert seen == {(1, 1, 3, None), (2, 1, 3, None), (3, 2, 3, None)}
    outcome = parts.outcome()
    assert (outcome["num_steps"], outcome["num_epochs"]) == (3, 2)


@pytest.mark.parametrize("says_steps", [False, True])
def test_a_loop_that_does_not_say_its_steps_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, says_steps: bool
) -> None:
    """All its reports are of one step, so that its curve has one point: a warning says so, once."""
    with RankContext.local(storage=tmp_path) as ctx:
        for step in (1, 2, 3):
            if says_steps:
                ctx.progress(step)
            ctx.report(loss=1.0 / step)
            ctx.report(accuracy=0.5)
    found = read_metrics(tmp_path, "local", by="step")
    assert found.step.tolist() == ([1, 2, 3] if says_steps else [0])
    again = [each for each in caplog.messages if "loss was reported again in step 0" in each]
    assert len(again) == len([each for each in caplog.messages if "again" in each])
    assert [("ctx.progress(step)" in each) for each in again] == ([] if says_steps else [True])


def loop(folder: Path, dies_at: int | None = None) -> list[tuple[int, int, float]]:
    """Train in an own loop, with a checkpoint each other step and a report before the first;
    return what is on record."""
    with RankContext.local(storage=folder, checkpoint=CheckpointParams(every_s=None)) as ctx:
        done = Tracked()
        ctx.track(model=nn.Linear(1, 1), done=done)
        ctx.report(num_parameters=2)
        for step in range(done.value + 1, 7):
            ctx.progress(step, 6, epoch=(step + 2) // 3)
            if step == dies_at:
                raise InterruptedError
            ctx.report(drawn=torch.rand(()).item())
            done.value = step
            if step % 2 == 0:
                ctx.checkpoint(force=True)
    found = read_records(DirectoryStorage(folder), "local")
    return [
        (each.step, each.epoch, each.metrics["drawn"]) for each in found if "drawn" in each.metrics
    ]


@pytest.mark.parametrize("dies_at", [1, 2, 4, 5, 6])
def test_a_resumed_loop_takes_back_the_records_of_the_steps_that_it_repeats(
    tmp_path: Path, dies_at: int
) -> None:
    """And no others, though what it reports before its first step bears an earlier number."""
    whole = loop(tmp_path / "whole")
    assert [(step, epoch) for step, epoch, _ in whole] == [
        (step, (step + 2) // 3) for step in range(1, 7)
    ]
    with pytest.raises(InterruptedError):
        loop(tmp_path / "killed", dies_at)
    assert loop(tmp_path / "killed") == whole


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((1.5,), r"step is 1\.5; give a whole number, at least 0"),
        ((1, -1), "total is -1"),
        (("3",), "step is '3'"),
    ],
)
def test_what_is_no_number_of_steps_is_refused(arguments: Any, says: str) -> None:
    """At the call."""
    with RankContext.local() as ctx, pytest.raises(InvalidParamsError, match=says):
        ctx.progress(*arguments)


def test_steps_that_are_counted_are_not_told(tmp_path: Path) -> None:
    """`ctx.progress` is refused within `ctx.steps` and after it, and superseded by it."""
    with RankContext.local(storage=tmp_path) as ctx:
        ctx.progress(70)
        loader = ctx.loader(TensorDataset(torch.arange(2)), global_batch_size=1)
        for _ in ctx.steps(loader, epochs=1):
            ctx.report(loss=0.5)
            with pytest.raises(InvalidParamsError, match=r"this training has begun ctx\.steps"):
                ctx.progress(ctx.step)
        with pytest.raises(InvalidParamsError, match="leave it out"):
            ctx.progress(3)
    found = read_records(DirectoryStorage(tmp_path), "local")
    assert [each.step for each in found] == [1, 2]
    assert ctx._assembly.outcome()["num_steps"] == 2
