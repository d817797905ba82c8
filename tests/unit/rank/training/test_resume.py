"""A training that is resumed in one of several loops, or with another order; checkpoints
that are asked for oddly."""

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import TensorDataset

from prefect_torch_ddp import RankContext
from prefect_torch_ddp.checkpoint.manifest import list_manifests
from prefect_torch_ddp.checkpoint.resume_point import ResumePoint
from prefect_torch_ddp.checkpoint.state.objects import read_states
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.params import CheckpointParams
from prefect_torch_ddp.rank.generators import seed_rank
from prefect_torch_ddp.rank.training import training_state
from prefect_torch_ddp.storage.directory import DirectoryStorage
from tests.support.tracked import Tracked, steps_over

EVERY_STEP = CheckpointParams(every_steps=1, every_s=None)
ON_DEMAND = CheckpointParams(every_s=None)


def in_loops(
    folder: Path, dies_at: int | None = None, dies_behind: int | None = None, *, saves: bool = False
) -> tuple[torch.Tensor, float, int]:
    """Train four epochs as four loops, with dropout, draws and a scheduler's step between them,
    and perhaps a checkpoint of it; return the weights, the learning rate and the loops counted."""
    with RankContext.local(storage=folder, checkpoint=EVERY_STEP) as ctx:
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        count = Tracked()
        ctx.track(model=model, optimizer=optimizer, scheduler=scheduler, count=count)
        ctx.checkpoint(force=saves)
        loader = ctx.loader(TensorDataset(torch.ones(12, 4)), global_batch_size=4)
        optimizer.step()  # or torch warns of schedulers that step first in a resumed training
        for number in range(1, 5):
            for (x,) in ctx.steps(loader, epochs=1):
                if ctx.step == dies_at:
                    raise InterruptedError
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()
            torch.rand(7)  # as a validation with a plain DataLoader does
            scheduler.step()
            count.value = max(count.value, number)
            ctx.checkpoint(force=saves)
            if number == dies_behind:
                raise InterruptedError
        weights = [parameter.detach().flatten() for parameter in model.parameters()]
        return torch.cat(weights), optimizer.param_groups[0]["lr"], count.value


SCHEDULERS = {
    "LambdaLR": lambda made: lr_scheduler.LambdaLR(made, lambda step: min(1.0, step / 4)),
    "LinearLR": lambda made: lr_scheduler.LinearLR(made, 0.1, total_iters=6),
    "OneCycleLR": lambda made: lr_scheduler.OneCycleLR(made, 0.5, total_steps=20),
    "SequentialLR": lambda made: lr_scheduler.SequentialLR(
        made,
        [
            lr_scheduler.LinearLR(made, 0.1, total_iters=2),
            lr_scheduler.CosineAnnealingLR(made, 10),
        ],
        [2],
    ),
    "StepLR": lambda made: lr_scheduler.StepLR(made, 2, gamma=0.5),
}


def rates(
    folder: Path, make: Any, dies_at: int | None = None, *, as_tensor: bool = False
) -> list[tuple[float, float]]:
    """Train with a scheduler that is made after its optimizer was restored; return the learning
    rate and the momentum of each step of this attempt."""
    seen = []
    with RankContext.local(storage=folder, checkpoint=EVERY_STEP) as ctx:
        model = nn.Linear(1, 1)
        lr: Any = torch.tensor(0.5) if as_tensor else 0.5
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        ctx.track(model=model, optimizer=optimizer)
        scheduler = make(optimizer)
        ctx.track(scheduler=scheduler)
        optimizer.step()  # or torch warns of schedulers that step first in a resumed training
        loader = ctx.loader(TensorDataset(torch.ones(12, 1)), global_batch_size=1)
        for (x,) in ctx.steps(loader, epochs=1):
            if ctx.step == dies_at:
                raise InterruptedError
            optimizer.zero_grad()
            model(x).sum().backward()
            group = optimizer.param_groups[0]
            seen.append((float(group["lr"]), group["momentum"]))
            optimizer.step()
            scheduler.step()
    return seen


@pytest.mark.parametrize("as_tensor", [False, True], ids=["a number", "a tensor"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_made_after_a_restore_keeps_the_learning_rate(
    name: str, as_tensor: bool, tmp_path: Path
) -> None:
    """A scheduler sets the rate of its first step as it is made, over the restored one, and some
    compute each later rate from it."""
    make = SCHEDULERS[name]
    whole = rates(tmp_path / "whole", make, as_tensor=as_tensor)
    with pytest.raises(InterruptedError):
        rates(tmp_path, make, dies_at=5, as_tensor=as_tensor)
    assert rates(tmp_path, make, as_tensor=as_tensor) == whole[4:]


def test_a_schedules_own_length_is_the_checkpoints_which_the_log_says(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of another run, which may be asked for more epochs; a run resumes itself as it is."""

    def made(run_id: str, num_steps: int, **options: Any) -> int:
        with RankContext.local(storage=tmp_path, run_id=run_id, **options) as ctx:
            optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.5)
            schedule = lr_scheduler.CosineAnnealingLR(optimizer, num_steps, eta_min=0.1)
            ctx.track(optimizer=optimizer, schedule=schedule)
            ctx.checkpoint(force=True)
            return schedule.T_max

    assert [made("short", 10), made("short", 20)] == [10, 10]
    assert made("as long", 10, resume_from="short") == 10
    assert "isn't used" not in caplog.text
    assert made("longer", 20, resume_from="short") == 10
    says = "'schedule' continues with the checkpoint's T_max=10; T_max=20, which it was made with"
    assert says in caplog.text


def options_used(
    folder: Path,
    run_id: str,
    lrs: list[float],
    dies_at: int | None = None,
    *,
    as_tensor: bool = False,
    **options: Any,
) -> list[tuple[float, float]]:
    """Train three calls of two steps; set these rates, the first one after `track` and each other
    one after a call. Return the rate and the momentum of each step."""
    seen = []
    with RankContext.local(storage=folder, run_id=run_id, checkpoint=EVERY_STEP, **options) as ctx:
        model = nn.Linear(1, 1)
        first: Any = torch.tensor(0.5) if as_tensor else 0.5
        optimizer = torch.optim.SGD(model.parameters(), lr=first, momentum=0.9)
        ctx.track(model=model, optimizer=optimizer)
        (group,) = optimizer.param_groups
        for number in range(3):
            if number < len(lrs):
                group["lr"] = torch.tensor(lrs[number]) if as_tensor else lrs[number]
            for _ in steps_over(ctx, size=2):
                if ctx.step == dies_at:
                    raise InterruptedError
                seen.append((round(float(group["lr"]), 4), group["momentum"]))
    return seen


@pytest.mark.parametrize("as_tensor", [False, True], ids=["a number", "a tensor"])
def test_an_option_that_is_set_after_track_holds_in_each_of_several_calls(
    as_tensor: bool, tmp_path: Path
) -> None:
    """Tracked objects are restored once more at the checkpoint's call. What was set for another
    run since the first time is set again."""
    with pytest.raises(InterruptedError):
        options_used(tmp_path, "a", [], dies_at=4, as_tensor=as_tensor)
    found = options_used(tmp_path, "b", [0.25], as_tensor=as_tensor, resume_from="a")
    assert found == [(0.25, 0.9)] * 3
    assert options_used(tmp_path, "b", [0.25], as_tensor=as_tensor) == []


@pytest.mark.parametrize("resume_from", [None, "a"], ids=["the same run", "another run"])
def test_an_option_that_is_set_between_calls_is_the_checkpoints(
    resume_from: str | None, tmp_path: Path
) -> None:
    """Code after a call has set it later than that after `track`."""
    with pytest.raises(InterruptedError):
        options_used(tmp_path, "a", [0.25, 0.125], dies_at=4)
    run_id = "a" if resume_from is None else "b"
    found = options_used(tmp_path, run_id, [0.25, 0.125], resume_from=resume_from)
    assert found == [(0.125, 0.9)] * 3


def test_a_rank_is_seeded_before_its_generators_are_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint of a training on CPUs has no generator of CUDA's; that of the rank's own seed
    stays, where all ranks would draw from equal ones."""
    seeded = []

    def note(seed: int, step: int, rank: int) -> None:
        seeded.append(step)
        seed_rank(seed, step, rank)

    monkeypatch.setattr(training_state, "seed_rank", note)
    drawn = []
    for dies_at in (3, None):
        with (
            pytest.raises(InterruptedError) if dies_at else nullcontext(),
            RankContext.local(storage=tmp_path, checkpoint=EVERY_STEP) as ctx,
        ):
            ctx.track(total=Tracked())
            for _ in steps_over(ctx, num_samples=3):
                if ctx.step == dies_at:
                    raise InterruptedError
                drawn.append(torch.rand(()).item())
    assert seeded == [0, 2]
    assert len({*drawn}) == len(drawn) == 3


def test_what_no_scheduler_sets_is_as_it_was_given_between(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Only the rate is the checkpoint's again, which the log says; after the last call it stays."""
    caplog.set_level("INFO")
    for attempt in (1, 2):
        with RankContext.local(storage=tmp_path) as ctx:
            optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.5)
            ctx.track(optimizer=optimizer)
            (group,) = optimizer.param_groups
            if attempt == 2:
                group["lr"], group["weight_decay"] = 0.1, 0.01
            scheduler = lr_scheduler.StepLR(optimizer, 2)
            assert "has the checkpoint's" not in caplog.text
            ctx.track(scheduler=scheduler)
            assert (group["lr"], group["weight_decay"]) == (0.5, 0.01 if attempt == 2 else 0)
            if attempt == 1:
                ctx.checkpoint(force=True)
    assert "'optimizer' has the checkpoint's lr again: the scheduler 'scheduler'" in caplog.text


Ended = tuple[torch.Tensor, float, int]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[Ended]:
    """Train undisturbed, without checkpoints between the loops and with them."""
    return [in_loops(tmp_path_factory.mktemp("whole"), saves=saves) for saves in (False, True)]


def check_that_it_ends_as_a_whole_one(found: Ended, whole: Ended) -> None:
    """The weights have the same bits, and each loop counts once."""
    assert torch.equal(found[0], whole[0])
    assert found[1:] == whole[1:] == (1 / 16, 4)


@pytest.mark.parametrize("dies_at", [2, 4, 8, 12])
def test_a_training_of_several_loops_resumes_to_the_same_bits(
    tmp_path: Path, whole: list[Ended], dies_at: int
) -> None:
    """The code between the loops runs again, and what it changes counts once: draws, a
    scheduler's steps."""
    with pytest.raises(InterruptedError):
        in_loops(tmp_path, dies_at)
    check_that_it_ends_as_a_whole_one(in_loops(tmp_path), whole[0])


@pytest.mark.parametrize(
    ("dies_at", "dies_behind", "count"),
    [(1, None, 0), (5, None, 1), (8, None, 2), (None, 1, 1), (None, 3, 3)],
)
def test_checkpoints_between_loops_keep_what_changed_there(
    tmp_path: Path,
    whole: list[Ended],
    dies_at: int | None,
    dies_behind: int | None,
    count: int,
) -> None:
    """The newest one counts, also after a step that has its own."""
    with pytest.raises(InterruptedError):
        in_loops(tmp_path, dies_at, dies_behind, saves=True)
    storage = DirectoryStorage(tmp_path)
    (*_, newest) = list_manifests(storage, "local")
    assert read_states(storage, newest, newest.objects)["count"] == {"value": count}
    check_that_it_ends_as_a_whole_one(in_loops(tmp_path, saves=True), whole[1])


def samples_of(
    folder: Path, seed: int, num_samples: int, dies_at: int | None = None
) -> list[tuple[int, list[int]]]:
    """Train two epochs; return epoch and samples of each step of this attempt."""
    seen = []
    with RankContext.local(storage=folder, checkpoint=EVERY_STEP, seed=seed) as ctx:
        ctx.track(model=nn.Linear(1, 1))
        for (numbers,) in steps_over(ctx, num_samples, size=4, epochs=2):
            if ctx.step == dies_at:
                raise InterruptedError
            seen.append((ctx.epoch, numbers.tolist()))
    return seen


@pytest.mark.parametrize(("seed", "num_samples"), [(1, 12), (0, 8)])
def test_an_epoch_of_another_order_is_not_finished(
    tmp_path: Path, seed: int, num_samples: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Another seed or dataset in mid-epoch: the rest of that epoch would repeat some samples
    and lose others."""
    with pytest.raises(InterruptedError):
        samples_of(tmp_path, 0, 12, dies_at=3)
    seen = samples_of(tmp_path, seed, num_samples)
    assert {epoch for epoch, _ in seen} == {2}
    assert sorted(sample for _, samples in seen for sample in samples) == list(range(num_samples))
    now = f"{num_samples} samples in the order of seed {seed}"
    says = f"of 12 samples in the order of seed 0, but the loader has {now} now"
    assert says in caplog.text


def numbers_in(folder: Path) -> list[int]:
    """Return the numbers of the checkpoints there."""
    return [manifest.step for manifest in list_manifests(DirectoryStorage(folder), "local")]


def test_each_checkpoint_of_an_own_loop_counts(tmp_path: Path) -> None:
    """Without ctx.steps each call makes one; the newest is resumed from, the last two are kept,
    and the best one."""
    policy = CheckpointParams(every_s=None, best_metric="accuracy")
    with RankContext.local(storage=tmp_path, checkpoint=policy) as ctx:
        count = Tracked()
        ctx.track(count=count)
        for accuracy in (0.1, 0.9, 0.5, 0.6):
            count.value += 1
            ctx.report(accuracy=accuracy)
            ctx.checkpoint(force=True)
    assert numbers_in(tmp_path) == [1, 2, 3]
    with RankContext.local(storage=tmp_path, checkpoint=policy) as ctx:
        again = Tracked()
        ctx.track(count=again)
        assert again.value == 4
        assert ctx.step == 0


def test_what_an_own_loop_did_behind_its_last_checkpoint_is_saved_at_its_end(
    tmp_path: Path,
) -> None:
    """A changed state is saved at the end, even by a process without an earlier checkpoint."""
    for change, expected in ((1, [0, 1]), (0, [0, 1]), (5, [1, 2])):
        with RankContext.local(storage=tmp_path, checkpoint=ON_DEMAND) as ctx:
            count = Tracked()
            ctx.track(model=nn.Linear(2, 2), count=count)
            if not count.value:
                ctx.checkpoint(force=True)
            count.value += change
        assert numbers_in(tmp_path) == expected
    with RankContext.local(storage=tmp_path, checkpoint=ON_DEMAND) as ctx:
        ctx.track(model=nn.Linear(2, 2), count=count)
    assert count.value == 6


def drawn_in_an_own_loop(folder: Path, dies_at: int | None = None, *, ahead: bool) -> list[float]:
    """Draw six batches, with a checkpoint before each iteration; return those that were used."""
    with RankContext.local(storage=folder, checkpoint=ON_DEMAND) as ctx:
        used = Tracked([])
        ctx.track(used=used)
        batch = torch.rand(()).item() if ahead else math.nan
        while len(used.value) < 6:
            ctx.checkpoint(force=True)
            if len(used.value) == dies_at:
                raise InterruptedError
            batch = batch if ahead else torch.rand(()).item()
            used.value = [*used.value, batch]
            batch = torch.rand(()).item() if ahead else math.nan
        return used.value


@pytest.mark.parametrize("ahead", [False, True], ids=["where it is used", "ahead"])
def test_an_own_loop_resumes_exactly_where_it_draws_what_it_uses(
    tmp_path: Path, ahead: bool
) -> None:
    """A batch that was fetched for the next iteration is in no checkpoint, as docs/data.md says."""
    whole = drawn_in_an_own_loop(tmp_path / "whole", ahead=ahead)
    with pytest.raises(InterruptedError):
        drawn_in_an_own_loop(tmp_path / "killed", dies_at=3, ahead=ahead)
    resumed = drawn_in_an_own_loop(tmp_path / "killed", ahead=ahead)
    assert resumed[:3] == whole[:3]
    assert (resumed == whole) is not ahead


@pytest.mark.parametrize("only_weights", [False, True])
def test_a_run_that_takes_no_model_from_another_is_refused(
    tmp_path: Path, *, only_weights: bool
) -> None:
    """Under another name it would go on from random weights, and count the other's steps."""
    with RankContext.local(storage=tmp_path, checkpoint=EVERY_STEP) as ctx:
        model = nn.Linear(1, 1)
        ctx.track(model=model, optimizer=torch.optim.SGD(model.parameters()))
        list(steps_over(ctx, 4, size=4, epochs=1))
    first: Any = ResumePoint(DirectoryStorage(tmp_path), "local", only_weights=only_weights)
    says = r"nothing was restored of model, which its checkpoint has: .* tracks net"
    for has_steps in (True, False):
        with (
            pytest.raises(InvalidParamsError, match=says),
            RankContext.local(storage=tmp_path / "second", resume_from=first) as ctx,
        ):
            ctx.track(net=nn.Linear(1, 1))
            if has_steps:
                next(iter(steps_over(ctx, 4, size=4, epochs=2)))
                pytest.fail("it trains")
    with RankContext.local(storage=tmp_path / "third", resume_from=first) as ctx:
        ctx.track(model=nn.Linear(1, 1), head=nn.Linear(1, 1))  # its new head keeps its own weights


@pytest.mark.parametrize(("epochs", "warns"), [(2, True), (1, True), (3, False)])
def test_a_run_that_adds_no_step_to_another_one_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, epochs: int, warns: bool
) -> None:
    """It ends as if it had trained, and has the other run's weights; its own retry is as usual."""

    def train(epochs: int, **chosen: Any) -> None:
        with RankContext.local(storage=tmp_path, checkpoint=EVERY_STEP, **chosen) as ctx:
            ctx.track(model=nn.Linear(4, 1))
            loader = ctx.loader(TensorDataset(torch.ones(12, 4)), global_batch_size=4)
            for _ in ctx.steps(loader, epochs=epochs):
                pass

    train(2, run_id="first")
    train(epochs, run_id="second", resume_from="first")
    says = "the training made no step: the checkpoint of step 6 of run first"
    assert caplog.text.count(says) == warns
    train(epochs, run_id="second", resume_from="first")
    assert caplog.text.count(says) == warns
