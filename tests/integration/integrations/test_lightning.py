"""Lightning's Trainer is killed on real ranks and ends with the undisturbed bits."""

import random
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from distributed import Client, LocalCluster
from prefect import flow
from prefect_dask import DaskTaskRunner
from torch.utils.data import DataLoader, RandomSampler, Sampler

from prefect_torch_ddp import (
    CheckpointParams,
    InvalidParamsError,
    RankContext,
    RankFailedError,
    ddp_task,
    list_runs,
    read_metrics,
    run_gang,
)
from prefect_torch_ddp.checkpoint.manifest import list_manifests
from prefect_torch_ddp.storage.directory import DirectoryStorage
from tests.support.gangs import RUN_WITH_CONTEXT
from tests.support.ranks import config_for
from tests.workloads import trainers

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.long,
    pytest.mark.usefixtures("prefect_api"),
]
MORE = pytest.mark.more
_MAX_STEPS: dict[str, object] = {"stop_at": 3, "accumulate": 2, "max_steps": 8}


def test_a_killed_lightning_trainer_ends_with_the_undisturbed_bits(
    tmp_path: Path, dask_cluster: LocalCluster
) -> None:
    """A Trainer with dropout resumes in mid-epoch, and shows steps, metrics and checkpoints."""
    policy = CheckpointParams(every_s=None, every_steps=3)
    straight, killed = tmp_path / "straight", tmp_path / "killed"

    def train(folder: Path, die_at: int | None) -> object:
        folder.mkdir()
        task = ddp_task(
            world_size=2, max_restarts=1, storage=str(folder / "storage"), checkpoint=policy
        )(trainers.lightning)
        return task.submit(str(folder), die_at)

    @flow(task_runner=DaskTaskRunner(address=dask_cluster.scheduler_address))
    def nightly() -> list[object]:
        # One after the other: the cluster has two workers.
        return [train(straight, None).result(), train(killed, 9).result()]

    undisturbed, resumed = nightly()
    assert resumed == undisturbed
    assert (killed / "killed-at-9").exists()
    storage = DirectoryStorage(killed / "storage")
    runs = list_runs(storage)
    assert (runs["state"].tolist(), runs["attempts"].tolist()) == (["completed"], [2])
    run_id = runs["run_id"][0]
    assert [each.step for each in list_manifests(storage, run_id)] == [12, 15]
    metrics = read_metrics(storage, run_id)
    assert metrics["step"].max() == 15
    assert metrics["loss"].notna().sum() >= 7
    assert metrics["val_loss"].notna().sum() >= 3


@MORE
def test_a_rank_that_is_killed_after_a_commit_and_before_the_next_step(
    tmp_path: Path, dask_cluster: LocalCluster
) -> None:
    """The next attempt continues from that commit, with the undisturbed bits."""
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    with Client(dask_cluster) as client:

        def train(folder: Path, die_at: trainers.DieAt) -> list[str]:
            folder.mkdir(exist_ok=True)
            call = config_for(folder, 4), trainers.lightning, (str(folder), die_at)
            return run_gang(client, RUN_WITH_CONTEXT, args=call, world_size=2)

        die = partial(trainers.die_once_saved, killed, 9, saved=8)
        with pytest.raises(RankFailedError, match=r"rank 1 .* was killed by SIGKILL"):
            train(killed, die)
        assert list_manifests(DirectoryStorage(killed), "run")[-1].step == 8
        assert train(killed, None) == train(straight, None)


@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param({"stop_at": 5}, id="at an epoch's end", marks=MORE),
        pytest.param(
            {"stop_at": 7, "max_epochs": -1, "max_steps": 15, "each": "step"},
            id="by steps",
            marks=MORE,
        ),
        # An epoch has three steps. Lightning by itself counts the first epoch twice.
        pytest.param(_MAX_STEPS, id="by steps, at an epoch's end"),
        pytest.param(_MAX_STEPS | {"val_batches": 0}, id="not validated", marks=MORE),
    ],
)
def test_a_lightning_trainer_stops_at_a_step_and_continues(
    tmp_path: Path, dask_cluster: LocalCluster, chosen: dict[str, object]
) -> None:
    """A Trainer stops after the step of the request; the next attempt ends as if it hadn't."""
    plain = {name: value for name, value in chosen.items() if name != "stop_at"}
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"

    with Client(dask_cluster) as client:

        def train(folder: Path, options: dict[str, object]) -> list[str]:
            fn = partial(trainers.lightning, **options)
            call = config_for(folder, 4), fn, (str(folder), None)
            return run_gang(client, RUN_WITH_CONTEXT, args=call, world_size=2)

        values = train(stopped, chosen)
        assert [int(value.split()[0]) for value in values] == [chosen["stop_at"]] * 2
        newest = list_manifests(DirectoryStorage(stopped), "run")[-1]
        assert newest.step == chosen["stop_at"]
        names = {Path(item.path).name for item in newest.objects}
        assert {"trainer.ckpt", "generators-0.pt", "generators-1.pt"} <= names
        assert train(stopped, plain) == train(straight, plain)


@pytest.mark.parametrize(
    ("options", "last"),
    [({"patience": 1}, 10), ({"patience": 2, "val_check_interval": 3}, 13)],
    ids=["at an epoch's end", "in mid-epoch"],
)
def test_a_lightning_trainer_that_has_ended_adds_no_step(
    tmp_path: Path, dask_cluster: LocalCluster, options: dict[str, object], last: int
) -> None:
    """EarlyStopping ends it at the same step after a stop at it, and after its last commit."""
    with Client(dask_cluster) as client:

        def train(name: str, **more: object) -> list[str]:
            folder = tmp_path / name
            fn = partial(trainers.lightning, **options, **more)
            call = config_for(folder, 4), fn, (str(folder), None)
            return run_gang(client, RUN_WITH_CONTEXT, args=call, world_size=2)

        undisturbed = train("straight")
        assert [int(value.split()[0]) for value in undisturbed] == [last] * 2
        assert train("straight") == undisturbed
        assert train("stopped", stop_at=last) == undisturbed
        assert train("stopped") == undisturbed


@pytest.mark.parametrize(
    "options",
    [{"two_optimizers": True}, {"val_check_interval": 2}],
    ids=["two optimizers", "validated in the epoch"],
)
def test_a_lightning_trainer_continues_from_where_its_optimizers_have_stepped(
    tmp_path: Path, dask_cluster: LocalCluster, options: dict[str, object]
) -> None:
    """A step is a batch, however many optimizers there are; its validation isn't lost."""
    fn = partial(trainers.lightning, **options)
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    storage = DirectoryStorage(killed)
    with Client(dask_cluster) as client:

        def train(folder: Path, die_at: int | None = None) -> list[str]:
            call = config_for(folder, 4), fn, (str(folder), die_at)
            return run_gang(client, RUN_WITH_CONTEXT, args=call, world_size=2)

        with pytest.raises(RankFailedError, match="was killed by SIGKILL"):
            train(killed, 7)
        assert [each.step for each in list_manifests(storage, "run")] == [4]
        assert train(killed) == train(straight)
    assert [each.step for each in list_manifests(storage, "run")] == [12, 15]


def test_what_lightning_validates_is_committed_with_its_value(
    tmp_path: Path, dask_cluster: LocalCluster
) -> None:
    """With a best metric every validation has a checkpoint. The last step has one too.

    Another number of ranks would get other batches, and is refused.
    """
    policy = CheckpointParams(every_s=None, keep_last=9, best_metric="val_loss", best_mode="min")
    config = replace(config_for(tmp_path), checkpoint=policy)
    fn = partial(trainers.lightning, val_check_interval=2)
    with Client(dask_cluster) as client:
        call = config, fn, (str(tmp_path), None)
        run_gang(client, RUN_WITH_CONTEXT, args=call, world_size=2)
        with pytest.raises(RankFailedError, match="the commit is of 2 ranks and this gang has 1"):
            run_gang(client, RUN_WITH_CONTEXT, args=call, world_size=1)
    storage = DirectoryStorage(tmp_path)
    losses = read_metrics(storage, "run").set_index("step")["val_loss"].dropna()
    committed = {each.step: each.metrics["val_loss"] for each in list_manifests(storage, "run")}
    assert list(committed) == [2, 4, 7, 9, 12, 14, 15]
    assert committed == losses.to_dict() | {15: committed[14]}


@pytest.mark.more
@pytest.mark.filterwarnings("ignore")  # what Lightning says of the machine
@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"min_epochs": 2}, "min_epochs or min_steps"),
        ({"devices": 2}, "rank 0 of 2 where it is 0 of 1"),
    ],
    ids=["min_epochs", "devices"],
)
def test_what_a_lightning_trainer_cant_keep_right_is_refused(
    option: dict[str, int], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the option, before the first step."""
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # as Lightning does, for good
    import pytorch_lightning as pl

    from prefect_torch_ddp.integrations.lightning import attach

    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, **option)
    assert attach(trainer) is None, "there is no RankContext yet"
    with RankContext.local(), pytest.raises(InvalidParamsError, match=said):
        attach(trainer)


@pytest.mark.filterwarnings("ignore")  # what Lightning says of the machine
def test_a_trainer_without_a_logger_keeps_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`trainer.log_dir`, where programs write pictures, was None with our logger alone."""
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # as Lightning does, for good
    import pytorch_lightning as pl

    from prefect_torch_ddp.integrations.lightning import attach

    trainer = pl.Trainer(accelerator="cpu", devices=1, logger=False, default_root_dir=tmp_path)
    before = trainer.log_dir
    with RankContext.local():
        attach(trainer)
    assert trainer.log_dir == before == str(tmp_path)


def _sampler(of: str) -> Sampler[int]:
    """Return a sampler with generators of a library or in a list, from their seed."""
    own = torch.Generator().manual_seed(4)
    samplers = {
        "sampler": RandomSampler(range(40), replacement=True, num_samples=40, generator=own),
        "numpy": trainers.Drawn(np.random.default_rng(4), lambda each: each.integers(40)),
        "old numpy": trainers.Drawn(np.random.RandomState(4), lambda each: each.randint(40)),
        "python": trainers.Drawn(random.Random(4), lambda each: each.randrange(40)),
        "a list": trainers.Drawn([own], lambda each: torch.randint(40, (), generator=each[0])),
    }
    return samplers[of]


@pytest.mark.filterwarnings("ignore")  # what Lightning says of the machine
@pytest.mark.parametrize("of", ["loader", "sampler", "numpy", "old numpy", "python", "a list"])
@pytest.mark.parametrize("die_at", [5, 11, 15, 28], ids=lambda step: f"killed at {step}")
def test_a_lightning_trainer_keeps_the_generators_of_its_own_loader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of: str, die_at: int
) -> None:
    """A DataLoader or sampler with its own generators, of any library, repeats the order."""
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # as Lightning does, for good
    undisturbed = _with_own_generator(tmp_path / "straight", of, None)
    with pytest.raises(ChildProcessError):
        _with_own_generator(tmp_path / "killed", of, die_at)
    assert _with_own_generator(tmp_path / "killed", of, None) == undisturbed


@pytest.mark.filterwarnings("ignore")  # what Lightning says of the machine
@pytest.mark.parametrize(
    ("die_at", "num_texts", "has"),
    [
        (15, 36, "36 samples in 9 batches of 4"),
        (15, 12, "12 samples in 3 batches of 4"),
        (10, 36, None),
        (15, 40, None),
    ],
    ids=["fewer", "fewer than are done", "between epochs", "as many"],
)
def test_a_lightning_trainer_finishes_an_epoch_with_the_data_of_its_beginning_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, die_at: int, num_texts: int, has: str | None
) -> None:
    """The error names both numbers; before, some samples were used twice or never."""
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # as Lightning does, for good
    with pytest.raises(ChildProcessError):
        _with_own_generator(tmp_path, "loader", die_at)
    if has is None:
        assert _with_own_generator(tmp_path, "loader", None, num_texts)
        return
    said = f"the middle of an epoch of 40 samples in 10 batches of 4, and here it has {has}: "
    with pytest.raises(InvalidParamsError, match=said):
        _with_own_generator(tmp_path, "loader", None, num_texts)


@pytest.mark.filterwarnings("ignore")  # what Lightning says of the machine
def test_a_lightning_trainer_finishes_an_epoch_in_batches_of_the_same_size_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if there are as many: what was done of the epoch is other samples."""
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # as Lightning does, for good
    with pytest.raises(ChildProcessError):
        _with_own_generator(tmp_path, "loader", 5, num_texts=9)
    said = "of 9 samples in 3 batches of 4, and here it has 9 samples in 3 batches of 3: "
    with pytest.raises(InvalidParamsError, match=said):
        _with_own_generator(tmp_path, "loader", None, num_texts=9, batch_size=3)


def _with_own_generator(
    storage: Path, of: str, die_at: int | None, num_texts: int = 40, batch_size: int = 4
) -> str:
    """Train three epochs of ten steps in this process; return the digest of the weights."""
    import pytorch_lightning as pl

    from prefect_torch_ddp.integrations.lightning import attach

    class Net(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 1)

        def training_step(self, batch: dict[str, torch.Tensor], _index: int) -> torch.Tensor:
            if self.global_step == die_at:
                raise ChildProcessError
            return self.layer(batch["input_ids"] / 50).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), 0.01)

    data = trainers.Texts(num_texts)
    if of == "loader":
        own = torch.Generator().manual_seed(4)
        loader = DataLoader(data, batch_size, shuffle=True, generator=own)
    else:
        loader = DataLoader(data, batch_size, sampler=_sampler(of))
    torch.manual_seed(3)
    model = Net()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=storage,
    )
    policy = CheckpointParams(every_s=None, every_steps=2)
    with RankContext.local(storage=storage, run_id="run", checkpoint=policy):
        trainer.fit(model, loader, ckpt_path=attach(trainer))
    return trainers.digest_of(model)
