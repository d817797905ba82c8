"""A training that is taken up again in one of several loops, or with another order; checkpoints that are asked for oddly."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from prefect_torch_ddp import RankContext
from prefect_torch_ddp.checkpoint.attempts import claim_attempt
from prefect_torch_ddp.checkpoint.manifest import list_manifests
from prefect_torch_ddp.rank.config import CheckpointPolicy, RankConfig
from prefect_torch_ddp.rank.entry import run_with_context
from prefect_torch_ddp.storage.directory import DirectoryStorage
from tests.workloads.healthy import run_ranks

pytestmark = pytest.mark.timeout(110)

EVERY_STEP = CheckpointPolicy(every_steps=1, every_s=None)
ON_DEMAND = CheckpointPolicy(every_s=None)


def in_loops(folder: Path, dies_at: int | None = None) -> torch.Tensor:
    """Train three epochs as three loops, with dropout and draws between them; return the weights."""
    with RankContext.local(storage=folder, checkpoint=EVERY_STEP) as rank:
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rank.track(model=model, optimizer=optimizer)
        loader = rank.loader(TensorDataset(torch.ones(12, 4)), global_batch_size=4)
        for _ in range(3):
            for (x,) in rank.steps(loader, epochs=1):
                if rank.step == dies_at:
                    raise InterruptedError
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()
            torch.rand(7)  # as a validation with a plain DataLoader does
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_a_training_of_several_loops_resumes_to_the_same_bits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The code between the loops draws again; the loop that goes on has its own generators all the same, and it is said."""
    with pytest.raises(InterruptedError):
        in_loops(tmp_path / "killed", dies_at=8)
    with caplog.at_level(logging.WARNING):
        resumed = in_loops(tmp_path / "killed")
    assert torch.equal(resumed, in_loops(tmp_path / "whole"))
    assert [
        record.getMessage().split(" was over")[0] for record in caplog.records if "was over before" in record.getMessage()
    ] == [
        "call 1 of rank.steps",
        "call 2 of rank.steps",
    ]


def samples_of(folder: Path, seed: int, num_samples: int, dies_at: int | None = None) -> list[tuple[int, list[int]]]:
    """Train two epochs; return epoch and samples of each step of this attempt."""
    seen = []
    with RankContext.local(storage=folder, checkpoint=EVERY_STEP, seed=seed) as rank:
        rank.track(model=nn.Linear(1, 1))
        loader = rank.loader(TensorDataset(torch.arange(num_samples)), global_batch_size=4)
        for (numbers,) in rank.steps(loader, epochs=2):
            if rank.step == dies_at:
                raise InterruptedError
            seen.append((rank.epoch, numbers.tolist()))
    return seen


@pytest.mark.parametrize(("seed", "num_samples"), [(1, 12), (0, 8)])
def test_an_epoch_of_another_order_is_not_finished(
    tmp_path: Path, seed: int, num_samples: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Another seed or dataset in mid-epoch: the rest of that epoch would repeat some samples and lose others."""
    with pytest.raises(InterruptedError):
        samples_of(tmp_path, 0, 12, dies_at=3)
    seen = samples_of(tmp_path, seed, num_samples)
    assert {epoch for epoch, _ in seen} == {2}
    assert sorted(sample for _, samples in seen for sample in samples) == list(range(num_samples))
    assert (
        f"of 12 samples in the order of seed 0, and the loader's are of {num_samples} samples in the order of seed {seed}"
        in caplog.text
    )


def on_rank_0_alone(rank: RankContext) -> int:
    """Ask for a checkpoint as scripts for torchrun do; all ranks wait for each other in each step."""
    model = rank.wrap(nn.Linear(1, 1))
    rank.track(model=model)
    for (x,) in rank.steps(rank.loader(TensorDataset(torch.ones(12, 1)), global_batch_size=4), epochs=1):
        model(x).sum().backward()
        if rank.rank == 0 and rank.epoch_ended:
            rank.checkpoint(force=True)
    return rank.step


def test_a_checkpoint_that_one_rank_asks_for_alone_hangs_nobody(tmp_path: Path) -> None:
    """It can't be complete, and the training's own last one is."""
    storage = DirectoryStorage(tmp_path)
    config = RankConfig("run", claim_attempt(storage, "run"), "task", storage, checkpoint=ON_DEMAND)
    assert run_ranks(run_with_context, 2, config, on_rank_0_alone, ()) == [3, 3]
    assert [manifest.step for manifest in list_manifests(storage, "run")] == [3]


def test_a_second_checkpoint_of_a_step_is_not_left_out_silently(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without rank.steps every call is of step 0; what comes after the first is said not to be saved."""
    model = nn.Linear(1, 1)
    with RankContext.local(storage=tmp_path, checkpoint=ON_DEMAND) as rank:
        rank.track(model=model)
        rank.checkpoint(force=True)
        assert "has its checkpoint already" not in caplog.text
        rank.checkpoint(force=True)
    assert "step 0 has its checkpoint already: what has changed since its end is not saved" in caplog.text


def draws_after(rank: RankContext, max_samples: int | None) -> Any:
    """Return what the step draws behind its micro-batches."""
    model = rank.wrap(nn.Sequential(nn.Linear(1, 2), nn.Dropout(0.5), nn.Linear(2, 1)))
    drawn = []
    loader = rank.loader(TensorDataset(torch.ones(8, 1)), global_batch_size=4)
    for batch in rank.steps(loader, epochs=1):
        for (x,), weight in rank.micro_batches(batch, max_samples=max_samples):
            (model(x).mean() * weight).backward()
        drawn.append(torch.rand(1).item())
    return drawn


def test_all_ranks_draw_alike_behind_elastic_micro_batches(tmp_path: Path) -> None:
    """Noise that an optimizer adds must not set the replicas apart, nor depend on their number."""

    def config(name: str) -> RankConfig:
        storage = DirectoryStorage(tmp_path / name)
        return RankConfig("run", claim_attempt(storage, "run"), "task", storage, determinism="elastic", virtual_ranks=2)

    on_two = run_ranks(run_with_context, 2, config("two"), draws_after, (1,))
    (on_one,) = run_ranks(run_with_context, 1, config("one"), draws_after, (None,))
    assert on_two == [on_one, on_one]
