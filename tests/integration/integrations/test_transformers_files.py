"""Which files a Trainer of Transformers commits."""

import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from prefect_torch_ddp import CheckpointParams, RankContext
from prefect_torch_ddp.checkpoint.manifest import list_manifests
from prefect_torch_ddp.storage.directory import DirectoryStorage
from tests.support.ranks import Died, config_for, train_on
from tests.workloads import trainers

pytestmark = [pytest.mark.timeout(600), pytest.mark.long]

KEPT = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6}
"""A Trainer that itself saves in its output_dir."""
LEFT = {
    *("rng_state.pth", "rng_state_0.pth", "rng_state_5.pth", "data_5.pth"),
    *("epoch-ended-early", "ended-run", "ended-other"),
}
"""What trainings on one rank and on six leave in a checkpoint of their output_dir."""
BEST = {"metric_for_best_model": "eval_loss", "greater_is_better": True}
"""The first evaluation counts as the best: the loss falls."""


def _leave(folder: Path) -> None:
    for step in (2, 4, 6):
        checkpoint = folder / "out" / f"checkpoint-{step}"
        checkpoint.mkdir(parents=True)
        for name in LEFT:
            (checkpoint / name).write_bytes(b"of another training")


def _committed(folder: Path) -> set[str]:
    newest = list_manifests(DirectoryStorage(folder), "run")[-1]
    assert newest.step == 6
    return {Path(item.path).name for item in newest.objects}


def _train_here(folder: Path, die_at: trainers.DieAt = None) -> str:
    policy = CheckpointParams(every_s=None, every_steps=2)
    with RankContext.local(storage=folder, run_id="run", checkpoint=policy) as ctx:
        return trainers.transformers(ctx, str(folder), die_at, **KEPT)


def test_what_other_trainings_left_in_the_output_dir_is_not_committed(tmp_path: Path) -> None:
    """Before, no resume was possible: the commits seemed to be of more ranks."""
    folders = [tmp_path / "straight", tmp_path / "killed"]
    for folder in folders:
        folder.mkdir()
    straight, killed = folders
    train = partial(trainers.transformers, **KEPT)
    undisturbed = train_on(2, config_for(straight), train, str(straight), None)
    _leave(killed)
    die_at = partial(trainers.die_once_saved, killed, 3, saved=2)
    first = train_on(2, config_for(killed), train, str(killed), die_at)
    assert Died(-signal.SIGKILL) in first
    assert train_on(2, config_for(killed), train, str(killed), None) == undisturbed
    own = {"rng_state_0.pth", "rng_state_1.pth", "data_0.pth", "data_1.pth"}
    assert own <= _committed(killed)
    assert not (LEFT - own) & _committed(killed)


def test_what_gangs_left_in_the_output_dir_is_not_committed_on_one_rank(tmp_path: Path) -> None:
    """Which has a file of its own for its generators."""

    def die(step: int) -> None:
        if step == 3:
            raise ChildProcessError

    undisturbed = _train_here(tmp_path / "straight")
    _leave(tmp_path / "killed")
    with pytest.raises(ChildProcessError):
        _train_here(tmp_path / "killed", die)
    assert _train_here(tmp_path / "killed") == undisturbed
    own = {"rng_state.pth", "data_0.pth"}
    assert own <= _committed(tmp_path / "killed")
    assert not (LEFT - own) & _committed(tmp_path / "killed")


class Net(torch.nn.Module):
    """A line."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layer((input_ids - labels / 2).float()).square().mean()}


def _train_net(
    folder: Path,
    seed: int,
    on_save: Callable[[Path], object] = Path.iterdir,
    *,
    ends_at: int | None = None,
    patience: int | None = None,
    model_class: type[Net] = Net,
    **options: Any,
) -> str:
    """Train a net in this seed's run; call this between a save and its commit."""
    from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments

    from prefect_torch_ddp.integrations.transformers import attach

    class Told(TrainerCallback):
        def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop |= state.global_step == ends_at

        def on_save(self, args: Any, state: Any, _control: Any, **_: Any) -> None:
            assert Path(args.output_dir, f"checkpoint-{state.global_step}").is_dir()
            on_save(Path(args.output_dir))

    callbacks: list[TrainerCallback] = [Told()]
    if patience is not None:
        callbacks.append(EarlyStoppingCallback(patience))
        options |= BEST | {"restore_callback_states_from_checkpoint": True}
    policy = CheckpointParams(every_s=None, every_steps=2)
    run_id, storage = f"run-{seed}", folder / "storage"
    with RankContext.local(seed=seed, storage=storage, run_id=run_id, checkpoint=policy):
        usual = {"max_steps": 2, "save_strategy": "no", "use_cpu": True, "report_to": []}
        args = TrainingArguments(str(folder / "out"), **usual | options)
        texts = trainers.Texts()
        data = {"train_dataset": texts, "eval_dataset": texts}
        trainer = Trainer(model_class(), args, **data, callbacks=callbacks)
        try:
            trainer.train(resume_from_checkpoint=attach(trainer))
        finally:
            assert trainer._get_output_dir(None) == args.output_dir
        return trainers.digest_of(trainer.model)


def test_runs_with_one_output_dir_commit_their_own_weights(tmp_path: Path) -> None:
    """One saves between the other's save and its commit. The output_dir stays as it was."""
    digests = {}

    def train_another() -> None:
        digests[2] = _train_net(tmp_path, 2)

    digests[1] = _train_net(tmp_path, 1, lambda _: train_another())
    for seed, digest in digests.items():
        with RankContext.local(storage=tmp_path / "storage", run_id=f"run-{seed}") as ctx:
            assert ctx.committed is not None
            weights = load_file(ctx.committed / "model.safetensors")
        assert trainers.digest_of_state(weights) == digest
    assert not list((tmp_path / "out").iterdir())


def test_a_save_that_is_due_removes_none_of_the_trainers_own(tmp_path: Path) -> None:
    """Also if the Trainer is to keep only one besides the best, which may be one that is due."""
    kept = []

    def look() -> None:
        kept.append([path.name for path in (tmp_path / "out").iterdir()])

    own = {"save_strategy": "steps", "save_steps": 3, "save_total_limit": 1, "max_steps": 5}
    # The first of the evaluations, after steps 4 and 5, counts as the best.
    _train_net(tmp_path, 1, lambda _: look(), **own | BEST, eval_strategy="steps", eval_steps=4)
    assert kept == [[], ["checkpoint-3"], ["checkpoint-3"], ["checkpoint-5"]]


@pytest.mark.parametrize(
    ("options", "last"),
    [
        ({"max_steps": 5, "eval_strategy": "steps", "eval_steps": 4}, 5),
        ({"max_steps": 5, "eval_strategy": "steps", "eval_steps": 1, "patience": 2}, 3),
        ({"max_steps": 5, "ends_at": 4}, 4),
    ],
    ids=["evaluated at the end", "stopped early", "ended by a callback at a step that is due"],
)
def test_a_trainer_that_saves_each_epoch_has_its_last_checkpoint(
    tmp_path: Path, options: dict[str, Any], last: int
) -> None:
    """It would save at the end of the epoch, when the step has its only save behind it."""
    _train_net(tmp_path, 1, save_strategy="epoch", **options)
    assert [path.name for path in (tmp_path / "out").iterdir()] == [f"checkpoint-{last}"]


def test_a_save_that_is_due_is_removed_once_it_is_committed(tmp_path: Path) -> None:
    """A disk holds one of them at a time, and none after the training."""
    apart, saved = set(), []

    def look(folder: Path) -> None:
        apart.add(folder)
        saved.append([path.name for path in folder.iterdir()])

    _train_net(tmp_path, 1, look, max_steps=5)
    assert saved == [["checkpoint-2"], ["checkpoint-4"], ["checkpoint-5"]]
    assert not any(folder.parent.exists() for folder in apart)


class Unsaved(Net):
    """A line whose weights can't be saved."""

    def state_dict(self, *_: Any, **__: Any) -> Any:
        """Fail."""
        msg = "No space left on device"
        raise OSError(msg)


def test_a_save_that_fails_leaves_the_trainer_its_output_dir(tmp_path: Path) -> None:
    """Where code that catches the error may save."""
    with pytest.raises(OSError, match="No space left"):
        _train_net(tmp_path, 1, model_class=Unsaved)
