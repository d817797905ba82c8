"""The page in which a rank leaves its heartbeat: what it marks is what its agent reads."""

import faulthandler
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

from prefect_torch_ddp import RankContext
from prefect_torch_ddp.checkpoint.attempts import claim_attempt
from prefect_torch_ddp.gang.worker.rank_io import HeartbeatPage
from prefect_torch_ddp.protocol.heartbeat import LOOK_SIGNAL, PAGE_BYTES, Heartbeat, Phase
from prefect_torch_ddp.rank import link as link_module
from prefect_torch_ddp.rank.assembly import ContextAssembly
from prefect_torch_ddp.rank.config import RankConfig, RankInfo
from prefect_torch_ddp.rank.evaluation.classification import ClassificationMeter
from prefect_torch_ddp.rank.heartbeat_writer import HeartbeatWriter
from prefect_torch_ddp.rank.link import Link
from prefect_torch_ddp.storage.directory import DirectoryStorage


def test_the_agent_reads_what_the_loop_marks(tmp_path: Path) -> None:
    """The agent sees every phase, step and epoch of a small training in sequence."""
    page = bytearray(PAGE_BYTES)
    link = Link()
    link.heartbeat = HeartbeatWriter(page)
    seen: list[tuple[Phase, int, int, bool]] = []

    class Watched(TensorDataset):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
            note()
            return super().__getitem__(index)

    def note() -> None:
        now = Heartbeat.from_page(bytes(page))
        mark = (now.phase, now.step, now.epoch, now.listens)
        if not seen or seen[-1] != mark:
            seen.append(mark)

    class Slow(torch.nn.Linear):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            note()
            return super().state_dict(*args, **kwargs)

    storage = DirectoryStorage(tmp_path)
    config = RankConfig("watched", claim_attempt(storage, "watched"), "task", storage)
    with RankContext(ContextAssembly(config, RankInfo(), link)) as ctx:
        note()
        ctx.track(model=Slow(1, 1))
        steps = ctx.steps(ctx.loader(Watched(torch.zeros(4, 1)), global_batch_size=2), epochs=1)
        note()  # from here on a stop is obeyed, though no step has begun
        for _ in steps:
            note()
            ctx.checkpoint(force=True)
        note()
    assert seen == [
        (Phase.SETUP, 0, 0, False),
        (Phase.RESTORING, 0, 0, False),  # `track` looks whether the state can be kept
        (Phase.SETUP, 0, 0, True),
        (Phase.LOADING, 0, 0, True),
        (Phase.STEP, 1, 1, True),
        (Phase.SAVING, 1, 1, True),
        (Phase.LOADING, 1, 1, True),
        (Phase.EPOCH_END, 2, 1, True),
        (Phase.SAVING, 2, 1, True),
        (Phase.SETUP, 2, 1, True),
        (Phase.SAVING, 2, 1, True),  # has code after the loop changed anything?
    ]


def test_stacks_begin_where_the_agent_has_set_the_file() -> None:
    """A look finds its own answer only, however often was looked before."""
    page = HeartbeatPage()
    try:
        handler = faulthandler.unregister(LOOK_SIGNAL)
        assert not handler, "it belongs to ranks"
        writer = HeartbeatWriter.shared(os.dup(page.fileno()))
        for _ in range(2):
            page.clear_stacks()
            assert page.stacks() == ""
            writer.write_stacks()
            assert page.stacks().count("test_stacks_begin_where") == 1
            assert page.stacks_bytes() == len(page.stacks())
            assert page.read().phase is Phase.STARTING
    finally:
        faulthandler.unregister(LOOK_SIGNAL)
        page.close()


def test_counting_predictions_is_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only rank 0 may validate in mid-epoch, as long as its peers wait."""
    page = bytearray(PAGE_BYTES)
    link = Link()
    link.heartbeat = HeartbeatWriter(page)
    monkeypatch.setattr(link_module, "_link", link)
    ClassificationMeter(["a", "b"]).update(torch.tensor([0]), torch.tensor([1]))
    now = Heartbeat.from_page(bytes(page))
    assert (now.moved_ns > 0, now.armed) == (True, False)


def test_collectives_count_as_progress() -> None:
    """A beat notes the collectives begun; a beat without a new one moves nothing."""
    page = bytearray(PAGE_BYTES)
    writer = HeartbeatWriter(page)
    writer.beat()
    assert Heartbeat.from_page(bytes(page)) == Heartbeat()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dist.all_reduce(torch.ones(1))
        writer.beat()
        first = Heartbeat.from_page(bytes(page))
        assert (first.seq > 0, first.moved_ns > 0, first.armed) == (True, True, False)
        writer.beat()
        assert Heartbeat.from_page(bytes(page)) == first
        dist.barrier()
        writer.beat()
        assert Heartbeat.from_page(bytes(page)).seq > first.seq
    finally:
        dist.destroy_process_group()


def test_a_beat_while_torch_is_being_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread finds modules that have nothing in them yet, and beats on."""
    for name in ("torch.cuda", "torch.distributed", "torch._dynamo.callback"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    HeartbeatWriter(bytearray(PAGE_BYTES)).beat()
