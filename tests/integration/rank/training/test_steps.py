"""Real ranks agree on stops and saves in the loop, and resume to the same bits."""

import functools
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from prefect_torch_ddp import RankContext, read_ledger
from prefect_torch_ddp.checkpoint import rank_store
from prefect_torch_ddp.checkpoint.manifest import list_manifests
from prefect_torch_ddp.params import CheckpointParams
from prefect_torch_ddp.protocol.events import RankEvent, RankStopped, Stopped
from prefect_torch_ddp.rank.config import RankConfig
from prefect_torch_ddp.rank.link import Link, set_link
from prefect_torch_ddp.rank.stages import run_stage
from prefect_torch_ddp.rank.training import agreement
from prefect_torch_ddp.storage.directory import DirectoryStorage
from tests.support.ranks import Died, config_for, run_ranks, train_on
from tests.support.records import read_records
from tests.support.tracked import Tracked, steps_over

HEALTHY = "tests.workloads.healthy"


def train(world_size: int, folder: Path, *, ledger: bool = False, **options: Any) -> list[Any]:
    """Run an attempt of the training there; return what its ranks do."""
    config = config_for(folder, options=options, ledger=ledger)
    return run_ranks(run_stage, world_size, config, HEALTHY)


# ---- Resuming.


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], tuple[Path, Any]]:
    """Return what trains on so many ranks undisturbed, once, and gives folder and outcome."""

    @functools.cache
    def train_once(world_size: int) -> tuple[Path, Any]:
        folder = tmp_path_factory.mktemp("whole")
        return folder, train(world_size, folder)[0]

    return train_once


@pytest.mark.parametrize(("world_size", "die_at", "die_on"), [(1, 5, 0), (2, 3, 1), (3, 7, 0)])
def test_a_killed_training_ends_with_the_same_weights(
    tmp_path: Path, whole: Any, world_size: int, die_at: int, die_on: int
) -> None:
    """After a kill within or at the end of an epoch every bit is the uninterrupted run's."""
    folder, expected = whole(world_size)
    resumed_from = (die_at - 1) // 2 * 2
    death = {"die_at": die_at, "die_on": die_on, "die_after": resumed_from}
    assert Died(-9) in train(world_size, tmp_path, ledger=True, **death)
    assert expected["resumed_from_step"] is None

    found, *_ = train(world_size, tmp_path, ledger=True)

    assert found["resumed_from_step"] == resumed_from
    assert found["value"] == expected["value"]
    assert (found["num_steps"], found["last_checkpoint"]["step"]) == (12, 12)
    weights, resumed = (
        torch.load(_newest_model(where), weights_only=True) for where in (folder, tmp_path)
    )
    assert weights.keys() == resumed.keys()
    assert all(torch.equal(value, resumed[name]) for name, value in weights.items())
    records = [(each.step, each.rank) for each in read_records(DirectoryStorage(tmp_path), "run")]
    assert records == [(s, r) for s in range(1, 13) for r in range(world_size)]
    assert read_ledger(tmp_path, "run").is_clean
    assert not (folder / "runs/run/ledger").exists()
    assert "has no ledger" in str(read_ledger(folder, "run"))


def _newest_model(folder: Path) -> Path:
    manifests = list_manifests(DirectoryStorage(folder), "run")
    return folder / max(manifests, key=lambda manifest: manifest.step).find("model").key


def test_a_training_killed_twice_and_resumed_at_other_sizes_is_clean(tmp_path: Path) -> None:
    """The ledger of 2, 3 and 1 ranks has each sample once an epoch, and misses a lost part."""
    assert Died(-9) in train(2, tmp_path, ledger=True, die_at=5, die_on=1, die_after=4)
    assert Died(-9) in train(3, tmp_path, ledger=True, die_at=9, die_on=0, die_after=8)
    under_way = read_ledger(tmp_path, "run")
    assert under_way.is_clean, str(under_way)
    assert not under_way.epochs[-1].is_finished
    assert under_way.epochs[1].is_finished
    train(1, tmp_path, ledger=True)

    report = read_ledger(str(tmp_path), "run")
    assert str(report).splitlines() == [f"epoch {n}: 33 samples, each once" for n in range(1, 5)]
    assert report.is_clean
    assert report.attempts == {1: 2, 2: 3, 3: 1}

    parts = sorted((tmp_path / "runs/run/ledger/rank-00001").iterdir())
    next(part for part in parts if part.name.startswith("000001")).unlink()
    assert not read_ledger(tmp_path, "run").is_clean


def test_a_finished_training_adds_nothing_when_it_is_run_again(whole: Any) -> None:
    """A retry after the end makes no step."""
    folder, first = whole(2)
    again = train(2, folder)[0]
    assert again["resumed_from_step"] == 12
    assert again["value"] == first["value"]
    assert again["last_checkpoint"] == first["last_checkpoint"]


# ---- Stopping.


def train_watched(
    config: RankConfig, ranks: tuple[int, ...], after_step: int
) -> tuple[dict[str, Any], list[Stopped]]:
    """Train under a supervisor; return the outcome and what the rank told it."""
    link = Supervisor(ranks, after_step)
    set_link(link)
    if config.checkpoint.every_s is not None:
        agreement.POLL_S = 0.05
    return run_stage(config, HEALTHY), link.told


class Supervisor(Link):
    """A link whose supervisor wants ranks to stop, some from the beginning, or all within one
    step."""

    def __init__(self, ranks: tuple[int, ...], after_step: int = 0) -> None:
        super().__init__()
        self.ranks, self.after_step = ranks, after_step
        self.told: list[Stopped] = []
        self.num_asked = 0

    def stop_requested(self) -> bool:
        """Tell; the loop asks once before its first step and once at each step's end."""
        self.num_asked += 1
        return int(os.environ["RANK"]) in self.ranks and self.num_asked > self.after_step

    def send(self, event: RankEvent) -> None:
        if isinstance(event, RankStopped):
            self.told.append(event.stopped)


@pytest.mark.parametrize(
    ("world_size", "ranks", "after_step"), [(1, (0,), 0), (2, (1,), 5), (3, (0, 1, 2), 4)]
)
def test_a_stopped_training_resumes_to_the_same_weights(
    tmp_path: Path, whole: Any, world_size: int, ranks: tuple[int, ...], after_step: int
) -> None:
    """All ranks stop after one step with its checkpoint, and a resume ends with the same bits."""
    answers = run_ranks(train_watched, world_size, config_for(tmp_path), ranks, after_step)
    (step,) = {value["num_steps"] for value, _ in answers}
    assert step == after_step if len(ranks) == world_size else step in (after_step, after_step + 1)
    assert answers[0][0]["last_checkpoint"]["step"] == step
    for rank, (_, told) in enumerate(answers):
        by = "order" if rank in ranks else "peer"
        saved = Stopped(step, by, step, is_saved=True) if rank == 0 else Stopped(step, by)
        assert told == [Stopped(step, by), saved]

    found = train(world_size, tmp_path)

    assert (found[0]["resumed_from_step"], found[0]["num_steps"]) == (step, 12)
    sha256 = whole(world_size)[1]["value"]["sha256"]
    assert [value["value"]["sha256"] for value in found] == [sha256] * world_size


def test_a_stop_while_saves_by_time_are_under_way(tmp_path: Path) -> None:
    """Checkpoints by time are complete, and delay no stop that all ranks request."""
    config = config_for(tmp_path, options={"epochs": 100})
    often = replace(config, checkpoint=CheckpointParams(every_steps=None, every_s=0.001))
    answers = run_ranks(train_watched, 3, often, (0, 1, 2), 200)
    assert [value["num_steps"] for value, _ in answers] == [200] * 3
    assert answers[0][0]["last_checkpoint"]["step"] == 200
    kept = [manifest.step for manifest in list_manifests(config.storage, "run")]
    assert len(kept) == 2
    assert 0 < min(kept) < 200


def train_until_saved(ctx: RankContext, folder: str) -> int:
    """Train until there is a checkpoint, at most for fifteen seconds; return the last step."""
    ctx.track(counter=Tracked())
    for _ in steps_over(ctx, NEVER * 2, size=2):
        time.sleep(0.003)
        if any(Path(folder).rglob("manifest.json")):
            ctx.request_stop("there is a checkpoint")
    return ctx.step


def test_by_default_ranks_save_soon_without_being_asked(tmp_path: Path) -> None:
    """Ranks save at one step after seconds, and keep training."""
    config = replace(config_for(tmp_path), checkpoint=CheckpointParams())
    steps = train_on(2, config, train_until_saved, str(tmp_path))
    first, last = (manifest.step for manifest in list_manifests(config.storage, "run"))
    assert 0 < first < last < NEVER
    assert steps == [last, last]


# By rank: the seconds after which it asks to stop, the step in which it does, its steps' seconds.
NEVER = 5000
CLOCKS = {
    "by clocks of two": ([0.7, 0.3], [NEVER] * 2, [0.0005, 0.005]),
    "by clocks of three": ([0.9, 0.4, 0.6], [NEVER] * 3, [0.002, 0.005, 0.0005]),
    "in steps of their own": ([60.0] * 3, [17, 3, 55], [0.001] * 3),
    "in other steps": ([60.0] * 3, [40, 41, 9], [0.001] * 3),
    "in the first step": ([60.0] * 2, [1, 1], [0.0] * 2),
    "in the last one, where none is left to hear of it": ([60.0] * 2, [NEVER] * 2, [0.0] * 2),
}


def train_until(
    ctx: RankContext, budgets_s: list[float], ask_at: list[int], paces_s: list[float]
) -> tuple[int, int]:
    """Train until a rank's time is up or its step has come; ranks talk about nothing else.

    Returns:
        The step after which this rank stopped, and how far the weights say that it came.
    """
    counter, num_ranks = Tracked(), len(paces_s)
    ctx.track(counter=counter)
    began_s = time.monotonic()
    for _ in steps_over(ctx, NEVER * num_ranks, size=num_ranks):
        time.sleep(paces_s[ctx.rank])
        counter.value += 1
        if time.monotonic() - began_s > budgets_s[ctx.rank] or ctx.step >= ask_at[ctx.rank]:
            ctx.request_stop("it is time")
    return ctx.step, counter.value


@pytest.mark.parametrize("clocks", CLOCKS.values(), ids=CLOCKS)
def test_ranks_that_ask_by_themselves_stop_after_the_same_step(
    tmp_path: Path, clocks: tuple[list[float], list[int], list[float]]
) -> None:
    """Early stopping by values or clocks that differ stops all ranks after the same step."""
    _, ask_at, paces_s = clocks
    num_ranks = len(ask_at)
    found = train_on(num_ranks, config_for(tmp_path, None), train_until, *clocks)
    (step,) = {step for step, _ in found}
    assert found == [(step, step)] * num_ranks
    if any(paces_s):
        assert (min(ask_at) if ask_at[0] < NEVER else 1) <= step < NEVER
    else:
        assert step == ask_at[0]
    with RankContext.local(storage=tmp_path, run_id="run") as ctx:
        again = train_until(ctx, [9.0] * num_ranks, [NEVER] * num_ranks, [0.0] * num_ranks)
    assert again == (step, step), "a training that asked to stop was taken up again"


def leave_by_break(ctx: RankContext) -> tuple[int, int]:
    """Break out of a loop with a stop asked for in that step; return the steps before and after
    the next loop."""
    loader = ctx.loader(TensorDataset(torch.zeros(40)), global_batch_size=2)
    for _ in ctx.steps(loader, epochs=1):
        if ctx.step == 4:
            ctx.request_stop("enough")
            break
    broke_at = ctx.step
    for _ in ctx.steps(loader, epochs=1):
        pass
    return broke_at, ctx.step


def test_a_stop_asked_for_on_leaving_a_loop_comes_before_the_next(tmp_path: Path) -> None:
    """All ranks stop before the first step of the next loop."""
    assert train_on(2, config_for(tmp_path), leave_by_break) == [(4, 4), (4, 4)]


def terminated(ctx: RankContext) -> tuple[int, bool, bool]:
    """Send this process SIGTERM in step 3, on rank 1; return its last step, and whether the
    default action is back."""
    loader = ctx.loader(TensorDataset(torch.zeros(400)), global_batch_size=2)
    before = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    for _ in ctx.steps(loader, epochs=1):
        torch.distributed.all_reduce(torch.ones(1))
        if (ctx.rank, ctx.step) == (1, 3):
            os.kill(os.getpid(), signal.SIGTERM)
    return ctx.step, before, signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_sigterm_of_one_rank_stops_all(tmp_path: Path) -> None:
    """A rank that gets SIGTERM in the loop stops all ranks; outside of it the rank just dies."""
    first, second = train_on(2, config_for(tmp_path), terminated)
    assert first == second
    assert first[0] in (3, 4)
    assert first[1:] == (True, True)


# ---- Records, seeds, misuse.


def draw(ctx: RankContext) -> dict[str, Any]:
    """Say what the random generators give before the first step, and in it."""
    before = torch.rand(1).item()
    loader = ctx.loader(TensorDataset(torch.arange(8)), global_batch_size=4)
    return {"before": before, "inside": [torch.rand(1).item() for _ in ctx.steps(loader, epochs=1)]}


def test_ranks_draw_alike_before_the_first_step_and_differently_after(tmp_path: Path) -> None:
    """Models begin equal, dropout differs by rank, and the same seed gives the same numbers
    again."""
    first, second = train_on(2, config_for(tmp_path), draw)
    assert first["before"] == second["before"]
    assert first["inside"] != second["inside"]
    with RankContext.local() as ctx:
        assert draw(ctx) == first


def on_rank_0_alone(ctx: RankContext, where: str) -> None:
    """Ask for a checkpoint as scripts for torchrun do; all ranks wait for each other in each
    step."""
    rank_store.ABSENT_S = 0.5
    model = ctx.wrap(nn.Linear(1, 1))
    if ctx.rank == 0 or where != "ctx.track":
        ctx.track(model=model, other=nn.Linear(1, 1))
    for _ in range(2):
        for (x,) in ctx.steps(
            ctx.loader(TensorDataset(torch.ones(12, 1)), global_batch_size=4), epochs=1
        ):
            model(x).sum().backward()
            if ctx.rank == 0 and ctx.epoch_ended and where == "in a step":
                ctx.checkpoint(force=True)
        if ctx.rank == 0 and where == "between loops":
            ctx.checkpoint(force=True)


def late_on_rank_1(ctx: RankContext, where: str) -> int:
    """Work for a while on one rank only, after an epoch's last step or after the loop."""
    rank_store.ABSENT_S = 0.5
    model = ctx.wrap(nn.Linear(1, 1))
    ctx.track(model=model)
    loader = ctx.loader(TensorDataset(torch.ones(12, 1)), global_batch_size=4)
    for (x,) in ctx.steps(loader, epochs=2):
        model(x).sum().backward()
        if ctx.rank == 1 and ctx.epoch_ended and where == "in a step":
            time.sleep(2)
    if ctx.rank == 1 and where == "at the end":
        time.sleep(2)
    return ctx.step


@pytest.mark.parametrize("where", ["in a step", "at the end"])
def test_a_rank_that_comes_late_to_a_checkpoint_is_waited_for(tmp_path: Path, where: str) -> None:
    """Rank 0's training doesn't wait for the checkpoint, or has ended, so that nothing is stuck."""
    policy = CheckpointParams(every_epochs=1, every_s=None)
    config = replace(config_for(tmp_path), checkpoint=policy)
    assert train_on(2, config, late_on_rank_1, where) == [6, 6]
    assert [each.step for each in list_manifests(config.storage, "run")] == [3, 6]


@pytest.mark.parametrize("where", ["in a step", "between loops", "ctx.track"])
def test_a_checkpoint_that_one_rank_asks_for_alone_is_an_error(tmp_path: Path, where: str) -> None:
    """A checkpoint that only one rank requests is an error and no hang, and isn't committed."""
    config = config_for(tmp_path, None)
    with pytest.raises(
        AssertionError, match=r"InvalidParamsError: rank 1 took no part in .*; call ctx.track"
    ):
        train_on(2, config, on_rank_0_alone, where)
    assert list_manifests(config.storage, "run") == []
