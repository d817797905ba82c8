"""Accelerate's loop is killed on real ranks and ends with the undisturbed bits."""

import itertools
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from distributed import Client, LocalCluster
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from tqdm import tqdm

from prefect_torch_ddp import (
    InvalidParamsError,
    RankContext,
    RankFailedError,
    read_metrics,
    run_gang,
)
from prefect_torch_ddp.checkpoint.manifest import list_manifests
from prefect_torch_ddp.storage.directory import DirectoryStorage
from tests.support.gangs import RUN_WITH_CONTEXT
from tests.support.ranks import config_for
from tests.workloads import trainers

pytestmark = [pytest.mark.timeout(400), pytest.mark.long]
MORE = pytest.mark.more


@pytest.mark.parametrize(
    ("chosen", "die_at", "last"),
    [
        pytest.param({}, 9, 15, id="mid-epoch"),
        pytest.param({"seedable": True}, 9, 15, id="seedable sampler", marks=MORE),
        pytest.param({"numbered": True}, 9, 15, id="sampler with set_epoch", marks=MORE),
        pytest.param({"accumulate": 2}, 5, 9, id="accumulation", marks=MORE),
        pytest.param({}, 11, 15, id="first step of an epoch", marks=MORE),
        pytest.param({"calls": 3}, 9, 15, id="a call an epoch", marks=MORE),
    ],
)
def test_killed_and_stopped_it_ends_with_the_undisturbed_bits(
    tmp_path: Path,
    dask_cluster: LocalCluster,
    chosen: dict[str, object],
    die_at: int,
    last: int,
) -> None:
    """After a kill, and after a stop at a step, the next attempt ends as if neither had been."""
    with Client(dask_cluster) as client:

        def train(name: str, die_at: int | None = None, **more: object) -> list[str]:
            folder = tmp_path / name
            folder.mkdir(exist_ok=True)
            fn = partial(trainers.accelerate, **chosen, **more)
            call = config_for(folder, 2), fn, (str(folder), die_at)
            return run_gang(client, RUN_WITH_CONTEXT, args=call, world_size=2)

        undisturbed = train("straight")
        assert undisturbed[0] == undisturbed[1]
        assert undisturbed[0].startswith(f"{last} ")
        with pytest.raises(RankFailedError, match=r"rank 1 .* was killed by SIGKILL"):
            train("killed", die_at)
        assert train("killed") == undisturbed
        assert [value.split()[0] for value in train("stopped", stop_at=die_at)] == [str(die_at)] * 2
        assert train("stopped") == undisturbed
        call = config_for(tmp_path / "killed"), trainers.accelerate, (str(tmp_path), None)
        with pytest.raises(RankFailedError, match="the commit is of 2 ranks and this gang has 1"):
            run_gang(client, RUN_WITH_CONTEXT, args=call, world_size=1)
    storage = DirectoryStorage(tmp_path / "killed")
    names = {Path(item.path).name for item in list_manifests(storage, "run")[-1].objects}
    assert {"model.safetensors", "optimizer.bin", "loop-0.pt", "loop-1.pt"} <= names
    metrics, expected = (
        read_metrics(DirectoryStorage(tmp_path / name), "run")[["step", "epoch", "rank", "loss"]]
        for name in ("killed", "straight")
    )
    assert metrics.equals(expected)
    assert sorted(set(metrics["step"])) == [*range(1, last + 1)]
    assert len(metrics) == 15, "Accelerate logs each batch on rank 0 alone"
    logged = read_metrics(DirectoryStorage(tmp_path / "killed"), "run")
    assert logged["by/mse"].equals(logged["by/of/batch"])
    assert "phase" not in logged, "a text is for Accelerate's other trackers"


class Endless(IterableDataset[int]):
    """Has no length."""

    def __iter__(self) -> Iterator[int]:
        return itertools.count()


@pytest.mark.more
def test_what_cant_be_kept_right_is_refused() -> None:
    """The error names it, before the first batch."""
    from accelerate import Accelerator

    from prefect_torch_ddp.integrations.accelerate import attach

    accelerator = Accelerator(cpu=True)
    loader = DataLoader(TensorDataset(torch.arange(4)))
    assert [int(batch) for (batch,) in attach(accelerator).batches(loader, epochs=2)] == [
        *range(4),
        *range(4),
    ], "there is no RankContext yet"
    with RankContext.local():
        loop = attach(accelerator)
        with pytest.raises(InvalidParamsError, match="a DataLoader that it didn't prepare"):
            next(loop.batches(loader, epochs=1))
        with pytest.raises(InvalidParamsError, match="a DataLoader that it didn't prepare"):
            next(loop.batches(tqdm(accelerator.prepare(loader)), epochs=1))
        endless = accelerator.prepare(DataLoader(Endless()))
        with pytest.raises(InvalidParamsError, match="an IterableDataset"):
            next(loop.batches(endless, epochs=1))
