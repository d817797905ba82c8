"""What real ranks do together in the loop: agreed stops and saves, bit-identical resumes."""

import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from prefect_torch_ddp import RankContext
from prefect_torch_ddp.checkpoint import rank_store
from prefect_torch_ddp.checkpoint.manifest import list_manifests
from prefect_torch_ddp.params import CheckpointParams
from prefect_torch_ddp.protocol.events import RankEvent, RankStopped, Stopped
from prefect_torch_ddp.rank.config import RankConfig
from prefect_torch_ddp.rank.link import Link, set_link
from prefect_torch_ddp.rank.loop import agreement
from prefect_torch_ddp.rank.stages import run_stage
from prefect_torch_ddp.storage.directory import DirectoryStorage
from tests.support.ranks import Died, config_for, run_ranks, train_on
from tests.support.records import read_records

HEALTHY = "tests.workloads.healthy"

# ---- Resuming.


@pytest.fixture(scope="module")
def dataset_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepare the dataset once, through the stage's own entry."""
    folder = tmp_path_factory.mktemp("prepared")
    config = replace(config_for(folder), stage="prepare", dataset_id="points")
    (report,) = run_ranks(run_stage, 1, config, HEALTHY)
    assert report.num_files == 1
    return folder


def train_config(folder: Path, dataset_folder: Path, **options: Any) -> RankConfig:
    """Describe a training on a copy of the dataset."""
    shutil.copytree(dataset_folder / "datasets", folder / "datasets", dirs_exist_ok=True)
    return config_for(folder, options=options, dataset_id="points")


@pytest.mark.parametrize(("world_size", "die_at", "die_on"), [(1, 5, 0), (2, 3, 1), (3, 7, 0)])
def test_a_killed_training_ends_with_the_same_weights(
    tmp_path: Path, dataset_folder: Path, world_size: int, die_at: int, die_on: int
) -> None:
    """SIGKILL of a rank within or at the end of an epoch, then a resume: every bit is that of
    the uninterrupted run."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    expected = run_ranks(run_stage, world_size, train_config(whole, dataset_folder), HEALTHY)
    resumed_from = (die_at - 1) // 2 * 2
    death = {"die_at": die_at, "die_on": die_on, "die_after": resumed_from}
    killed = train_config(broken, dataset_folder, **death)
    assert Died(-9) in run_ranks(run_stage, world_size, killed, HEALTHY)
    assert expected[0]["resumed_from_step"] is None

    found = run_ranks(run_stage, world_size, train_config(broken, dataset_folder), HEALTHY)

    assert found[0]["resumed_from_step"] == resumed_from
    assert found[0]["value"] == expected[0]["value"]
    assert (found[0]["num_steps"], found[0]["last_checkpoint"]["step"]) == (12, 12)
    weights, resumed = (
        torch.load(_newest_model(folder), weights_only=True) for folder in (whole, broken)
    )
    assert weights.keys() == resumed.keys()
    assert all(torch.equal(value, resumed[name]) for name, value in weights.items())
    records = [(each.step, each.rank) for each in read_records(DirectoryStorage(broken), "run")]
    assert records == [(s, r) for s in range(1, 13) for r in range(world_size)]


def _newest_model(folder: Path) -> Path:
    manifests = list_manifests(DirectoryStorage(folder), "run")
    return folder / max(manifests, key=lambda manifest: manifest.step).find("model").key


def test_a_finished_training_adds_nothing_when_it_is_run_again(
    tmp_path: Path, dataset_folder: Path
) -> None:
    """A retry after the end finds everything done; evaluate restores the step it is told, not the
    newest."""
    first, again = (
        run_ranks(run_stage, 2, train_config(tmp_path, dataset_folder), HEALTHY)[0]
        for _ in range(2)
    )
    assert again["resumed_from_step"] == 12
    assert again["value"] == first["value"]
    assert again["last_checkpoint"] == first["last_checkpoint"]
    config = replace(train_config(tmp_path, dataset_folder), stage="evaluate", restore_step=10)
    reports = run_ranks(run_stage, 2, config, HEALTHY)
    assert [report.metrics["step"] for report in reports] == [10, 10]


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
    tmp_path: Path, dataset_folder: Path, world_size: int, ranks: tuple[int, ...], after_step: int
) -> None:
    """Told to stop, also before the first step: one step for all, its checkpoint, and a resume
    that ends with the same bits."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    expected = run_ranks(run_stage, world_size, train_config(whole, dataset_folder), HEALTHY)
    config = train_config(broken, dataset_folder)
    answers = run_ranks(train_watched, world_size, config, ranks, after_step)
    (step,) = {value["num_steps"] for value, _ in answers}
    assert step == after_step if len(ranks) == world_size else step in (after_step, after_step + 1)
    assert answers[0][0]["last_checkpoint"]["step"] == step
    for rank, (_, told) in enumerate(answers):
        by = "order" if rank in ranks else "peer"
        saved = Stopped(step, by, checkpoint_step=step if rank == 0 else None)
        assert told == [Stopped(step, by), saved]

    found = run_ranks(run_stage, world_size, train_config(broken, dataset_folder), HEALTHY)

    assert (found[0]["resumed_from_step"], found[0]["num_steps"]) == (step, 12)
    digests = [[value["value"]["sha256"] for value in values] for values in (found, expected)]
    assert digests[0] == digests[1]


def test_a_stop_while_saves_by_time_are_under_way(tmp_path: Path, dataset_folder: Path) -> None:
    """Checkpoints by time at every turn delay no stop that all ranks ask for, and are
    themselves whole."""
    config = train_config(tmp_path, dataset_folder, epochs=100)
    often = replace(config, checkpoint=CheckpointParams(every_steps=None, every_s=0.001))
    answers = run_ranks(train_watched, 3, often, (0, 1, 2), 200)
    assert [value["num_steps"] for value, _ in answers] == [200] * 3
    assert answers[0][0]["last_checkpoint"]["step"] == 200
    kept = [manifest.step for manifest in list_manifests(config.storage, "run")]
    assert len(kept) == 2
    assert 0 < min(kept) < 200


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
    """The broken-off step has no end; all ranks stop before the next loop's first."""
    assert train_on(2, config_for(tmp_path), leave_by_break) == [(4, 4), (4, 4)]


def terminated(ctx: RankContext) -> tuple[int, bool, bool]:
    """Send this process SIGTERM in step 3, on rank 1; say where it stopped, and whether the
    default action is back."""
    loader = ctx.loader(TensorDataset(torch.zeros(400)), global_batch_size=2)
    before = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    for _ in ctx.steps(loader, epochs=1):
        torch.distributed.all_reduce(torch.ones(1))
        if (ctx.rank, ctx.step) == (1, 3):
            os.kill(os.getpid(), signal.SIGTERM)
    return ctx.step, before, signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_sigterm_of_one_rank_stops_all(tmp_path: Path) -> None:
    """Preemption: the rank that got the signal asks the others to stop; outside of the loop it
    dies as any process."""
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
    """Models begin equal, dropout isn't; and the same seed gives the same numbers again."""
    first, again = (train_on(2, config_for(tmp_path), draw) for _ in range(2))
    assert first == again
    assert first[0]["before"] == first[1]["before"]
    assert first[0]["inside"] != first[1]["inside"]


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


@pytest.mark.parametrize("where", ["in a step", "between loops", "ctx.track"])
def test_a_checkpoint_that_one_rank_asks_for_alone_is_an_error(tmp_path: Path, where: str) -> None:
    """Not a hang: it can't be complete, and none is put together of two steps; the error says
    that tracking belongs on every rank too."""
    config = config_for(tmp_path, None)
    with pytest.raises(
        AssertionError, match=r"InvalidParamsError: rank 1 took no part in .*; call ctx.track"
    ):
        train_on(2, config, on_rank_0_alone, where)
    assert list_manifests(config.storage, "run") == []
