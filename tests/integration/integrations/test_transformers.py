"""Transformers' Trainer is killed on real ranks and ends with the undisturbed bits."""

import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from distributed import LocalCluster
from prefect import flow
from prefect_dask import DaskTaskRunner

from prefect_torch_ddp import CheckpointParams, RankContext, ddp_task, list_runs, read_metrics
from prefect_torch_ddp.checkpoint.manifest import list_manifests
from prefect_torch_ddp.storage.directory import DirectoryStorage
from tests.support.ranks import Died, config_for, train_on
from tests.workloads import trainers

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.long,
    pytest.mark.usefixtures("prefect_api"),
]


def test_a_killed_trainer_ends_with_the_undisturbed_bits(
    tmp_path: Path, dask_cluster: LocalCluster
) -> None:
    """A Trainer with dropout resumes in mid-epoch, and shows steps, metrics and checkpoints."""
    policy = CheckpointParams(every_s=None, every_steps=4)
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    for folder in (straight, killed):
        folder.mkdir()
    undisturbed, _ = train_on(2, config_for(straight, 4), trainers.transformers, straight, None)
    train = ddp_task(
        world_size=2, max_restarts=1, storage=str(killed / "storage"), checkpoint=policy
    )(trainers.transformers)

    @flow(task_runner=DaskTaskRunner(address=dask_cluster.scheduler_address))
    def nightly() -> object:
        return train.submit(str(killed), partial(trainers.die_once_saved, killed, 7)).result()

    assert nightly() == undisturbed
    assert (killed / "killed-at-7").exists()
    storage = DirectoryStorage(killed / "storage")
    runs = list_runs(storage)
    assert (runs["state"].tolist(), runs["attempts"].tolist()) == (["completed"], [2])
    run_id = runs["run_id"][0]
    assert [each.step for each in list_manifests(storage, run_id)] == [12, 15]
    metrics = read_metrics(storage, run_id)
    assert metrics["step"].max() == 15
    assert metrics["loss"].notna().sum() >= 7
    assert not list((killed / "out").iterdir()), "the Trainer itself saves nothing"


@pytest.mark.more
def test_a_trainer_stops_with_a_checkpoint_at_a_step(tmp_path: Path) -> None:
    """A Trainer stops after the step of the request, with a checkpoint."""
    values = train_on(2, config_for(tmp_path, 4), trainers.stopped_transformers, str(tmp_path))
    assert [int(value.split()[0]) for value in values] == [6, 6]
    newest = list_manifests(DirectoryStorage(tmp_path), "run")[-1]
    assert newest.step == 6
    paths = {item.path for item in newest.objects}
    own = {f"checkpoint-6/rng_state_{rank}.pth" for rank in range(2)}
    rest = ("model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json")
    assert own | {f"checkpoint-6/{name}" for name in rest} <= paths


@pytest.mark.parametrize(
    ("every_steps", "options", "expected"),
    [
        (None, {"save_strategy": "epoch", "stop_at": 5}, [5, 6]),
        (4, {"save_strategy": "epoch", "max_steps": 8}, [5, 8]),
        (None, {"patience": 1, "eval_strategy": "epoch"}, [10]),
        pytest.param(5, {"max_steps": 13}, [10, 13], marks=pytest.mark.more),
        pytest.param(None, {"save_strategy": "steps"}, [15], marks=pytest.mark.more),
    ],
    ids=["stopped", "due at the last step", "stopped early", "the last step", "the Trainer's own"],
)
def test_each_step_is_committed_once_and_the_last_one_too(
    tmp_path: Path, every_steps: int | None, options: dict[str, Any], expected: list[int]
) -> None:
    """Also if an epoch, of five steps, ends early, after which the Trainer saves again."""
    fn = partial(trainers.transformers, **options)
    train_on(2, config_for(tmp_path, every_steps), fn, str(tmp_path), None)
    storage = DirectoryStorage(tmp_path)
    assert [each.step for each in list_manifests(storage, "run")] == expected


@pytest.mark.parametrize(
    ("options", "last"),
    [({"max_steps": 7}, 7), ({"patience": 2, "eval_steps": 3}, 9), ({"ends_epoch_at": 8}, 8)],
    ids=["max_steps", "early stopping", "a callback that ends an epoch, whose last step is saved"],
)
def test_a_trainer_that_has_ended_adds_no_step(
    tmp_path: Path, options: dict[str, Any], last: int
) -> None:
    """After a kill or a stop it ends at the same step; after its last commit, at once.

    Another number of ranks would get other batches, and is refused.
    """

    def train(name: str, die_at: int | None = None, **more: Any) -> list[Any]:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        fn = partial(trainers.transformers, **options, **more)
        return train_on(2, config_for(folder, 4), fn, str(folder), die_at)

    undisturbed = train("straight")
    assert [value.split()[0] for value in undisturbed] == [str(last)] * 2
    assert Died(-signal.SIGKILL) in train("killed", last)
    assert train("killed") == undisturbed
    assert train("killed") == undisturbed
    assert [value.split()[0] for value in train("stopped", stop_at=5)] == ["6"] * 2
    assert train("stopped") == undisturbed
    losses = read_metrics(DirectoryStorage(tmp_path / "killed"), "run")["train_loss"].dropna()
    assert (losses > 0).all()
    config = config_for(tmp_path / "killed")
    with pytest.raises(AssertionError, match="the commit is of 2 ranks and this gang has 3"):
        train_on(3, config, trainers.transformers, str(tmp_path), None)


@pytest.mark.parametrize(
    ("when", "expected"),
    [({"eval_strategy": "epoch"}, [5, 7]), ({"eval_steps": 3}, [3, 6, 7])],
    ids=["epochs", "steps"],
)
def test_what_a_trainer_evaluates_is_committed_with_its_value(
    tmp_path: Path, when: dict[str, Any], expected: list[int]
) -> None:
    """With a best metric every evaluation has a checkpoint, the one in the last step too."""
    policy = CheckpointParams(every_s=None, keep_last=9, best_metric="eval_loss", best_mode="min")
    config = replace(config_for(tmp_path), checkpoint=policy)
    options = {"eval_strategy": "steps", "save_strategy": "steps", "max_steps": 7, **when}
    train_on(2, config, partial(trainers.transformers, **options), str(tmp_path), None)
    storage = DirectoryStorage(tmp_path)
    losses = read_metrics(storage, "run").set_index("step")["eval_loss"].dropna()
    committed = {each.step: each.metrics["eval_loss"] for each in list_manifests(storage, "run")}
    assert committed == losses.to_dict()
    assert list(committed) == expected


@pytest.mark.parametrize("cuts_at", [None, 3])
def test_a_trainer_that_resumes_after_an_epoch_was_cut_short_warns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, cuts_at: int | None
) -> None:
    """Transformers computes other batches then; without such an epoch nothing is said."""

    def die(step: int) -> None:
        if step == 6:
            raise ChildProcessError

    def train(die_at: trainers.DieAt) -> None:
        policy = CheckpointParams(every_s=None, every_steps=2)
        with RankContext.local(storage=tmp_path, run_id="run", checkpoint=policy) as ctx:
            options = {"cuts_epoch_at": cuts_at, "num_train_epochs": 2}
            trainers.transformers(ctx, str(tmp_path), die_at, **options)

    with pytest.raises(ChildProcessError):
        train(die)
    assert "ended early" not in caplog.text
    train(None)
    assert ("an epoch ended early" in caplog.text) is (cuts_at is not None)


@pytest.mark.more
def test_what_a_trainer_cant_keep_right_is_refused(tmp_path: Path) -> None:
    """The error names each option that is set, on every rank, before the first step."""
    best: dict[str, object] = {"load_best_model_at_end": True, "save_strategy": "no"}
    only_model: dict[str, object] = {"save_only_model": True}
    skip: dict[str, object] = {"ignore_data_skip": True}
    only_best = {"save_strategy": "best", "metric_for_best_model": "eval_loss"}
    # Without use_cpu, a Trainer that finds no GPU takes itself for the only process. FSDP isn't
    # here: on CPUs Accelerate ignores it.
    early: dict[str, object] = {"stops_early": True}
    kept = early | {"restore_callback_states_from_checkpoint": True}
    asked = [best, only_model, best | only_model, only_best, early, kept, {}, {"use_cpu": False}]
    asked.append(skip)
    options = [{"use_cpu": True, **option} for option in asked]
    folder = str(tmp_path / "out")
    values = train_on(2, config_for(tmp_path), trainers.refused_transformers, folder, options)
    beginning = "attach can't keep this training right: it uses "
    why_best = "load_best_model_at_end, whose checkpoint may be on another host"
    why_only_model = "save_only_model, without which there is no optimizer to resume"
    why_only_best = (
        "save_strategy='best', which skips checkpoints that are due; set it to 'no', and "
        "CheckpointParams(best_metric=...)"
    )
    why_early = (
        "a callback that has a state, such as EarlyStoppingCallback, without "
        "restore_callback_states_from_checkpoint=True"
    )
    for rank, said in enumerate(values):
        assert said == [
            f"{beginning}{why_best}",
            f"{beginning}{why_only_model}",
            f"{beginning}{why_best}; {why_only_model}",
            f"{beginning}{why_only_best}",
            f"{beginning}{why_early}",
            "attached",
            "attached",
            f"{beginning}rank 0 of 1 where it is {rank} of 2; without GPUs set use_cpu=True",
            f"{beginning}ignore_data_skip, which begins an interrupted epoch again",
        ]
