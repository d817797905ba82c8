"""Trainings that stop moving, ones that only look so, and one that continues forever."""

import ctypes
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset, TensorDataset

from prefect_torch_ddp import RankContext, report_progress
from prefect_torch_ddp.checkpoint.attempts import claim_attempt
from prefect_torch_ddp.params import CheckpointParams
from prefect_torch_ddp.rank.config import RankConfig
from prefect_torch_ddp.storage.directory import DirectoryStorage
from tests.workloads import descend, write_pid

LONG_S = 300.0
NUM_STEPS = 4


class Numbers(Dataset[torch.Tensor]):
    """Samples, the first of which may be slow, or stop the process that reads it."""

    def __init__(
        self, size: int, *, sleeps_s: float = 0.0, works_s: float = 0.0, stops_at: int | None = None
    ) -> None:
        self._size = size
        self._sleeps_s = sleeps_s
        self._works_s = works_s
        self._stops_at = stops_at

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> torch.Tensor:
        sleeps_s, self._sleeps_s = self._sleeps_s, 0.0
        works_s, self._works_s = self._works_s, 0.0
        time.sleep(sleeps_s)
        work(works_s)
        if index == self._stops_at:
            os.kill(os.getpid(), signal.SIGSTOP)
        return torch.tensor(float(index))


def work(for_s: float) -> None:
    """Use the CPU."""
    end = time.monotonic() + for_s
    while time.monotonic() < end:
        sum(range(1000))


def train(ctx: RankContext, how: str, culprit: int) -> int:
    """Make four steps with an all-reduce in each; one rank hangs in the third, in the way
    named."""
    stops_at = (
        2 * ctx.world_size + ctx.rank if how == "data_worker" and ctx.rank == culprit else None
    )
    dataset = Numbers(NUM_STEPS * ctx.world_size, stops_at=stops_at)
    workers = {"num_workers": 1} if how == "data_worker" else {}
    loader = ctx.loader(dataset, global_batch_size=ctx.world_size, shuffle=False, **workers)
    for _ in ctx.steps(loader, epochs=1):
        if ctx.rank == culprit and ctx.step == 3:
            hang(how)
        dist.all_reduce(torch.ones(1))
        ctx.report(loss=1.0)
    return ctx.step


def hang(how: str) -> None:
    """Stop moving; the line that the error has to name is in here."""
    match how:
        case "sleep":
            time.sleep(LONG_S)
        case "busy":
            work(LONG_S)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "hold_the_lock":
            # read(2) on an empty pipe, by a call that keeps the interpreter's lock; a signal
            # does not end it.
            ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)
        case "one_collective_more":
            dist.all_reduce(torch.ones(1))


class SlowState:
    """Something tracked whose state takes its time to be saved and restored."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def state_dict(self) -> dict[str, int]:
        time.sleep(self._seconds)
        return {"value": 1}

    def load_state_dict(self, _state: dict[str, Any]) -> None:
        time.sleep(self._seconds)


def slow_but_fine(ctx: RankContext, what: str, seconds: float) -> int:
    """Take several times the limit for what may take long, with the other ranks waiting; return
    the steps."""
    mine = seconds if ctx.rank == 0 else 0.0
    dataset = Numbers(
        NUM_STEPS * ctx.world_size,
        sleeps_s=mine if what == "loading_asleep" else 0.0,
        works_s=mine if what == "loading_at_work" else 0.0,
    )
    if what in ("saving", "restoring"):
        ctx.track(slow=SlowState(mine))
    model = (
        torch.compile(torch.nn.Linear(1, 1), backend=slow_compiler(mine))
        if what == "compiling"
        else None
    )
    for batch in ctx.steps(ctx.loader(dataset, global_batch_size=ctx.world_size), epochs=1):
        if model is not None:
            model(batch.reshape(-1, 1))
        if ctx.rank == 0 and ctx.step == 2 and what == "validating_at_work":
            work(seconds)
        if ctx.epoch_ended and ctx.rank == 0 and what == "validating_asleep":
            time.sleep(seconds)
        dist.all_reduce(torch.ones(1))
        if ctx.step == 2 and what == "saving":
            ctx.checkpoint(force=True)
    return ctx.step


def slow_compiler(seconds: float) -> Any:
    """Return a backend of torch.compile that takes long and does nothing."""

    def compile_slowly(graph: torch.fx.GraphModule, _inputs: list[torch.Tensor]) -> Any:
        time.sleep(seconds)
        return graph.forward

    return compile_slowly


def plain_hang(culprit: int) -> None:
    """Meet once; then one rank falls asleep, while the others wait for it."""
    dist.all_reduce(torch.ones(1))
    if int(os.environ["RANK"]) == culprit:
        time.sleep(LONG_S)
    dist.all_reduce(torch.ones(1))


def plain_sleep(seconds: float, num_reports: int = 0) -> str:
    """Sleep, and say between that all is well."""
    for _ in range(num_reports):
        time.sleep(seconds / (num_reports + 1))
        report_progress()
    time.sleep(seconds / (num_reports + 1))
    return "slept"


def config_in(folder: Path) -> RankConfig:
    """Describe a training that writes no checkpoint unless asked, in its next attempt."""
    storage, policy = DirectoryStorage(folder / "store"), CheckpointParams(every_s=None)
    return RankConfig("run", claim_attempt(storage, "run"), "train", storage, checkpoint=policy)


def train_until_enough(ctx: RankContext, folder: str) -> int:
    """Take small steps until the folder has a file `enough`; leave this rank's pid in two others,
    one named by rank, one by attempt, rank and first step, in the third. Returns the last step."""
    model = ctx.wrap(torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ctx.track(model=model, optimizer=optimizer)
    loader = ctx.loader(TensorDataset(torch.ones(4000, 2)), global_batch_size=4)
    begun_at = None
    for (points,) in ctx.steps(loader, epochs=10_000):
        descend(ctx, optimizer, model(points).sum())
        time.sleep(0.02)
        begun_at = begun_at or ctx.step
        if ctx.step == begun_at + 2:
            write_pid(folder, ctx.rank)
            write_pid(folder, f"{ctx.attempt}-{ctx.rank}-from-{begun_at}")
        if Path(folder, "enough").exists():
            ctx.request_stop("told to")
    return ctx.step


def train_enough(ctx: RankContext, folder: str) -> int:
    """Train as `train_until_enough` does, and refuse a model of a training that was cut short."""
    step = train_until_enough(ctx, folder)
    if not Path(folder, "enough").exists():
        msg = "trained too little"
        raise ValueError(msg)
    return step


def train_or_hang(ctx: RankContext, folder: str) -> None:
    """Train as `train_until_enough` does; in a folder named so, hang in the first step."""
    if not folder.endswith("hangs"):
        train_until_enough(ctx, folder)
        return
    for _ in ctx.steps(total=2):
        write_pid(folder, ctx.rank)
        hang("sleep")


def count_until_enough(ctx: RankContext, folder: str, how: str) -> int:
    """Count steps as `train_until_enough` does, in one of these loops: "own", which asks
    `ctx.due`; "deaf", which doesn't save what `ctx.due` asks for; or "total", a call of
    `ctx.steps(total=)` after a checkpoint that took a number of its own."""
    state = ctx.state(step=0)
    if how == "total":
        for _ in ctx.steps(total=1):
            pass
        ctx.checkpoint(force=True)
        ctx.checkpoint(force=True)
    steps = ctx.steps(total=10**6) if how == "total" else range(state.step + 1, 10**6)
    begun_at = None
    for step in steps:
        state.step = step
        time.sleep(0.02)
        begun_at = begun_at or step
        if step == begun_at + 2:
            write_pid(folder, f"{ctx.attempt}-{ctx.rank}-from-{begun_at}")
        if Path(folder, "enough").exists():
            ctx.request_stop("told to")
        if how != "total":
            due = ctx.due(step)
            ctx.checkpoint(force=due.save and how == "own")
            if due.stop:
                break
    return state.step


def commit_until_enough(ctx: RankContext, folder: str) -> int:
    """Count steps as `count_until_enough` does, in a loop that commits a folder when it is due."""
    root = ctx.checkpoint_folder
    done = 0 if ctx.committed is None else int((ctx.committed / "step").read_text())
    for step in range(done + 1, 10**6):
        time.sleep(0.02)
        if step == done + 3:
            write_pid(folder, f"{ctx.attempt}-{ctx.rank}-from-{done + 1}")
        if Path(folder, "enough").exists():
            ctx.request_stop("told to")
        due = ctx.due(step)
        if due.save:
            made = root / f"step-{step}"
            made.mkdir()
            (made / "step").write_text(str(step))
            ctx.commit(made, step=step)
        if due.stop:
            break
    return step
