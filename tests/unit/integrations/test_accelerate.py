"""Accelerate's loop in every form that people write: what is a step, and what a resume continues.

In one process; `tests/integration/integrations/test_accelerate.py` kills ranks.
"""

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.state import AcceleratorState, GradientState
from torch.utils.data import DataLoader, TensorDataset

from prefect_torch_ddp import CheckpointParams, InvalidParamsError, RankContext, read_metrics
from prefect_torch_ddp.checkpoint.manifest import list_manifests
from prefect_torch_ddp.integrations import accelerate
from prefect_torch_ddp.integrations.accelerate import attach
from prefect_torch_ddp.storage.directory import DirectoryStorage
from tests.workloads.trainers import Drawn, Numbered

pytestmark = pytest.mark.timeout(120)
NUM_BATCHES = 6


@pytest.fixture(autouse=True)
def _own_accelerator() -> Iterator[None]:
    """Have each Accelerator begin without the options of the one before."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class KilledError(Exception):
    """Ends an attempt."""


class Held:
    """Has one thing as its state."""

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def state_dict(self) -> dict[str, Any]:
        """Return it by a name."""
        return {"thing": self.thing}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it."""
        self.thing = state["thing"]


class Bomb:
    """Makes a folder when somebody unpickles it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._folder),)


class Training:
    """A net, its loaders and its loop; a form of loop calls `step` with each batch."""

    def __init__(self, ctx: RankContext | None, die_at: int | None = None, **chosen: Any) -> None:
        torch.manual_seed(0)
        self.ctx, self.die_at = ctx, die_at
        self.accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=chosen.get("accumulate", 1),
            dataloader_config=DataLoaderConfiguration(
                use_seedable_sampler=chosen.get("seedable", False)
            ),
        )
        if "scales" in chosen:
            self.accelerator.scaler = torch.amp.GradScaler("cpu")
        net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Dropout(0.3))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        num_rows = chosen.get("num_rows", 2 * NUM_BATCHES)
        rows = TensorDataset(torch.arange(float(num_rows)), torch.randn(num_rows, 2))
        size = chosen.get("batch_size", 2)
        of: dict[str, Any] = {"shuffle": True}
        if chosen.get("draws_by_numpy"):
            own = [np.random.default_rng(4)]
            of = {"sampler": Drawn(own, lambda each: each[0].integers(12), len(rows))}
        if chosen.get("draws_by_epoch"):
            of, size = {"batch_sampler": Numbered(num_rows, size)}, 1
        loaders = [DataLoader(rows, batch_size=size, **of) for _ in range(2)]
        self.net, self.optimizer = self.accelerator.prepare(net, optimizer)
        self.loaders = [self.accelerator.prepare(loader) for loader in loaders]
        self.schedule = self.accelerator.prepare(schedule)
        if "registered" in chosen:
            self.accelerator.register_for_checkpointing(chosen["registered"])
        self.loop = attach(self.accelerator)
        self.first_step = self.loop.step
        self.orders: list[list[float]] = []
        self.num_batches = 0

    def train_on(self, batch: Any) -> None:
        """Sum up the gradients of a batch, whose first loss is the number of its step."""
        self.num_batches += 1
        numbers, rows = batch
        self.orders.append(numbers.tolist())
        if self.loop.step + 1 == self.die_at:
            raise KilledError
        self.accelerator.backward(self.net(rows).square().mean())
        self.accelerator.log({"number": self.loop.step + 1})

    def step(self) -> None:
        """Make a step."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def validate(self) -> None:
        """Draw random numbers, go through a loader, change the rate and log."""
        self.schedule.step()
        for _, rows in self.loaders[1]:
            loss = self.net(rows).mean()
        self.accelerator.log({"val_loss": loss.item()})

    @property
    def weights(self) -> list[float]:
        """All weights."""
        return torch.cat([each.flatten() for each in self.net.parameters()]).tolist()


Form = Callable[[Training], None]


def in_the_body(it: Training) -> None:
    """Validate within the loop's body."""
    for batch in it.loop.batches(it.loaders[0], epochs=3):
        it.train_on(batch)
        it.step()
        if it.loop.epoch_ended:
            it.validate()


def a_call_an_epoch(it: Training, *, stop_at: int = 0, dies_validating: int = 0) -> None:
    """Validate between calls of one epoch."""
    for epoch in range(1, 4):
        for batch in it.loop.batches(it.loaders[0], epochs=1):
            it.train_on(batch)
            it.step()
            if it.ctx is not None and it.loop.step + 1 == stop_at:
                it.ctx.request_stop("the test asks for it")
        if epoch == dies_validating:
            raise KilledError
        it.validate()


def alternating(it: Training) -> None:
    """Train on two loaders in turn."""
    for number in range(3):
        for batch in it.loop.batches(it.loaders[number % 2], epochs=1):
            it.train_on(batch)
            it.step()


def accumulating(it: Training) -> None:
    """Accumulate as Accelerate does, which ends each epoch with a step."""
    for batch in it.loop.batches(it.loaders[0], epochs=3):
        with it.accelerator.accumulate(it.net):
            it.train_on(batch)
            it.step()


def by_hand(it: Training) -> None:
    """Accumulate over five batches without `accelerator.accumulate`, over the ends of epochs."""
    for number, batch in enumerate(it.loop.batches(it.loaders[0], epochs=6), 1):
        it.train_on(batch)
        if number % 5 == 0:
            it.step()


def run(folder: Path, form: Form, die_at: int | None = None, **chosen: Any) -> Training:
    """Run an attempt of a training, whose checkpoints come every four steps."""
    policy = CheckpointParams(every_steps=4, every_s=None)
    with RankContext.local(storage=folder, run_id="run", checkpoint=policy) as ctx:
        training = Training(ctx, die_at, **chosen)
        form(training)
    return training


def records_of(folder: Path) -> list[tuple[Any, ...]]:
    """Return the step, the epoch and the values of each record."""
    frame = read_metrics(DirectoryStorage(folder), "run").drop(columns=["attempt", "time"])
    return sorted(map(tuple, frame.fillna(-1.0).to_numpy().tolist()))


@pytest.mark.parametrize(
    ("form", "die_at", "seedable"),
    [
        (in_the_body, 6, False),
        (in_the_body, 14, True),
        (a_call_an_epoch, 6, True),
        (a_call_an_epoch, 14, False),
        (a_call_an_epoch, 18, False),
        (alternating, 10, False),
        (by_hand, 6, False),
    ],
)
@pytest.mark.filterwarnings("ignore:Detected call of:UserWarning")  # as a finished call is passed
def test_a_killed_loop_ends_with_the_undisturbed_bits_and_records(
    tmp_path: Path, form: Form, die_at: int, seedable: bool
) -> None:
    """In mid-epoch, and between the checkpoint of an epoch's end and the next one."""
    undisturbed = run(tmp_path / "straight", form, seedable=seedable)
    with pytest.raises(KilledError):
        run(tmp_path / "killed", form, die_at, seedable=seedable)
    resumed = run(tmp_path / "killed", form, seedable=seedable)
    assert resumed.first_step == (die_at - 1) // 4 * 4
    assert resumed.weights == undisturbed.weights
    assert resumed.orders == undisturbed.orders[-len(resumed.orders) :]
    assert resumed.loop.step == undisturbed.loop.step == (7 if form is by_hand else 18)
    assert resumed.loop.epoch == undisturbed.loop.epoch == (6 if form is by_hand else 3)
    expected = records_of(tmp_path / "straight")
    if form is a_call_an_epoch and die_at == 14:  # the next validation made the step's record anew
        expected = [each for each in expected if each[0] != 12 or each[-1] != -1]
    assert records_of(tmp_path / "killed") == expected


@pytest.mark.parametrize("die_at", [6, 10, 14])
def test_a_sampler_with_generators_of_numpy_repeats_the_order(tmp_path: Path, die_at: int) -> None:
    """In any epoch: its generator is put back to where the epoch began."""
    undisturbed = run(tmp_path / "straight", in_the_body, draws_by_numpy=True)
    with pytest.raises(KilledError):
        run(tmp_path / "killed", in_the_body, die_at, draws_by_numpy=True)
    resumed = run(tmp_path / "killed", in_the_body, draws_by_numpy=True)
    assert resumed.orders == undisturbed.orders[-len(resumed.orders) :]
    assert resumed.weights == undisturbed.weights


@pytest.mark.parametrize("die_at", [6, 10, 14])
def test_a_batch_sampler_that_draws_by_the_epoch_repeats_the_order(
    tmp_path: Path, die_at: int
) -> None:
    """In any epoch: it is told the epoch's number, which the skipping loader wouldn't do."""
    undisturbed = run(tmp_path / "straight", in_the_body, draws_by_epoch=True)
    with pytest.raises(KilledError):
        run(tmp_path / "killed", in_the_body, die_at, draws_by_epoch=True)
    resumed = run(tmp_path / "killed", in_the_body, draws_by_epoch=True)
    assert resumed.orders == undisturbed.orders[-len(resumed.orders) :]
    assert resumed.weights == undisturbed.weights


@pytest.mark.parametrize(
    ("die_at", "changed", "has"),
    [
        (6, {"num_rows": 11}, "11 samples in 6 batches of 2"),
        (10, {"num_rows": 14}, "14 samples in 7 batches of 2"),
        (6, {"num_rows": 6}, "6 samples in 3 batches of 2"),
        (6, {"batch_size": 3}, "12 samples in 4 batches of 3"),
        (14, {"num_rows": 11}, None),
        (14, {"batch_size": 3}, None),
    ],
    ids=[
        "as many batches",
        "more samples",
        "fewer than are done",
        "another batch size",
        "between epochs",
        "another batch size between epochs",
    ],
)
def test_an_epoch_is_finished_with_the_data_of_its_beginning_only(
    tmp_path: Path, die_at: int, changed: dict[str, int], has: str | None
) -> None:
    """The error names both sizes, before the first batch; some samples were used twice or never."""
    with pytest.raises(KilledError):
        run(tmp_path, in_the_body, die_at)
    if has is None:
        assert run(tmp_path, in_the_body, **changed).first_step == 12
        return
    said = f"the middle of an epoch of 12 samples in 6 batches of 2, and here it has {has}: "
    before = records_of(tmp_path)
    with pytest.raises(InvalidParamsError, match=said):
        run(tmp_path, in_the_body, **changed)
    assert records_of(tmp_path) == before


def test_an_epoch_is_finished_in_batches_of_the_same_size_only(tmp_path: Path) -> None:
    """Also if there are as many: what was done of the epoch is other samples."""
    with pytest.raises(KilledError):
        run(tmp_path, in_the_body, 6, num_rows=9, batch_size=4)
    said = "of 9 samples in 3 batches of 4, and here it has 9 samples in 3 batches of 3: "
    with pytest.raises(InvalidParamsError, match=said):
        run(tmp_path, in_the_body, num_rows=9, batch_size=3)


def test_a_validation_that_the_kill_ended_is_made_again(tmp_path: Path) -> None:
    """It is on record, once, at the step and epoch it belongs to; earlier ones aren't added."""
    with pytest.raises(KilledError):
        run(tmp_path, partial(a_call_an_epoch, dies_validating=2))
    assert run(tmp_path, a_call_an_epoch).first_step == 12
    frame = read_metrics(DirectoryStorage(tmp_path), "run")
    found = frame[frame["val_loss"].notna()][["step", "epoch"]]
    assert found.to_numpy().tolist() == [[6, 1], [12, 2], [18, 3]]


@pytest.mark.parametrize("form", [in_the_body, a_call_an_epoch])
def test_each_epoch_has_an_order_of_its_own(tmp_path: Path, form: Form) -> None:
    """Accelerate's own sampler too, which draws by the number of the epoch."""
    orders = run(tmp_path, form, seedable=True).orders
    assert len({str(orders[at : at + NUM_BATCHES]) for at in (0, 6, 12)}) == 3


def test_a_metric_belongs_to_the_step_and_the_epoch_of_its_body(tmp_path: Path) -> None:
    """From the first body on; with `accumulate` a step has several."""
    run(tmp_path, in_the_body)
    frame = read_metrics(DirectoryStorage(tmp_path), "run")
    frame = frame[frame["number"].notna()]
    assert frame["number"].tolist() == frame["step"].tolist() == [*range(1, 19)]
    assert frame["epoch"].tolist() == [1] * 6 + [2] * 6 + [3] * 6


def test_after_a_stop_later_calls_yield_nothing(tmp_path: Path) -> None:
    """The run continues from the step at which it stopped."""
    assert run(tmp_path, partial(a_call_an_epoch, stop_at=8)).num_batches == 8
    resumed = run(tmp_path, a_call_an_epoch)
    assert (resumed.first_step, resumed.num_batches) == (8, 10)


def test_a_step_is_a_body_in_which_an_optimizer_made_one(tmp_path: Path) -> None:
    """One of two optimizers is enough, and both are one step."""

    def form(it: Training) -> None:
        other = it.accelerator.prepare(torch.optim.SGD(it.net.parameters(), lr=0.1))
        loop = attach(it.accelerator)
        steps = []
        for number, batch in enumerate(loop.batches(it.loaders[0], epochs=1)):
            it.train_on(batch)
            if number in {1, 3}:
                other.step()
            if number in {3, 4}:
                it.optimizer.step()
            steps.append(loop.step)
        assert steps == [0, 0, 1, 1, 2, 3]

    run(tmp_path, form)


def test_a_step_that_the_scaler_skips_is_a_step(tmp_path: Path) -> None:
    """Else a training whose gradients overflow at first would count as one without steps."""

    def form(it: Training) -> None:
        for batch in it.loop.batches(it.loaders[0], epochs=1):
            it.train_on(batch)
            for weights in it.net.parameters():
                weights.grad.fill_(torch.inf)
            it.step()
            assert it.accelerator.optimizer_step_was_skipped

    assert run(tmp_path, form, scales=True).loop.step == NUM_BATCHES


def test_a_loop_without_steps_is_refused_after_its_first_epoch(tmp_path: Path) -> None:
    """The error says what doesn't count, such as a step that waits for `loop.step`."""

    def form(it: Training) -> None:
        for batch in it.loop.batches(it.loaders[0], epochs=3):
            it.train_on(batch)
            if (it.loop.step + 1) % 2 == 0:
                it.step()

    with pytest.raises(
        InvalidParamsError, match=r"no optimizer made a step in epoch 1: .*loop\.step"
    ):
        run(tmp_path, form)


def test_a_loop_without_a_prepared_optimizer_is_refused() -> None:
    """Before the first batch."""
    with RankContext.local():
        accelerator = Accelerator(cpu=True)
        loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(4))))
        with pytest.raises(InvalidParamsError, match="no optimizer that it prepared before attach"):
            attach(accelerator).batches(loader, epochs=1)


@pytest.mark.parametrize(
    ("form", "accumulate", "totals"),
    [(in_the_body, 1, {18}), (accumulating, 4, {6}), (by_hand, 1, {36, None})],
)
def test_the_total_is_that_of_the_steps_or_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: Form, accumulate: int, totals: set[int]
) -> None:
    """With accumulation by hand it is unknown once a body made no step."""
    said = []
    progress = RankContext.progress

    def noted(ctx: RankContext, step: int, total: int | None = None, *, epoch: int = 0) -> None:
        said.append(total)
        progress(ctx, step, total, epoch=epoch)

    monkeypatch.setattr(RankContext, "progress", noted)
    run(tmp_path, form, accumulate=accumulate)
    assert set(said) == totals
    assert said.count(36) <= 1


def test_the_plain_loop_counts_steps_and_epochs_too() -> None:
    """Without a RankContext, as under torchrun."""
    training = Training(None)
    in_the_body(training)
    assert (training.loop.step, training.loop.epoch, training.num_batches) == (18, 3, 18)
    assert training.schedule.get_last_lr() == [0.1 * 0.5**3]


def test_a_registered_object_keeps_its_data(tmp_path: Path) -> None:
    """What `register_for_checkpointing` is given, as far as it is data."""
    data = {"count": 3, "names": ["a", "b"], "mean": torch.ones(2)}
    run(tmp_path, in_the_body, registered=Held(data))
    held = Held(None)
    run(tmp_path, in_the_body, registered=held)
    assert str(held.thing) == str(data)


def test_a_state_that_is_more_than_data_is_refused_at_the_first_save(tmp_path: Path) -> None:
    """Not only by the attempt that would resume from it; the error says what it contains."""
    said = (
        r"custom_checkpoint_0\.pkl, the state of the Held given to register_for_checkpointing, "
        r"isn't only data \(Unsupported global: GLOBAL pathlib\.\w*PosixPath\), .*"
        r"its state_dict\(\) should return tensors"
    )
    with pytest.raises(InvalidParamsError, match=said):
        run(tmp_path, in_the_body, registered=Held(tmp_path))
    assert list_manifests(DirectoryStorage(tmp_path), "run") == []


def test_a_pickle_in_a_registered_objects_state_runs_no_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accelerate by itself would run it."""
    ran = tmp_path / "ran"

    def train(thing: Any, die_at: int | None = None) -> None:
        run(tmp_path / "runs", in_the_body, die_at, registered=Held(thing))

    with monkeypatch.context() as unchecked:
        unchecked.setattr(accelerate, "reason_against", lambda _: None, raising=False)
        with pytest.raises(KilledError):  # somebody else has put it into the storage
            train(Bomb(ran), 6)
    with pytest.raises(InvalidParamsError, match=r"GLOBAL \w+\.mkdir"):
        train(None)
    assert not ran.exists()
    with monkeypatch.context() as unchecked:
        unchecked.setattr(accelerate, "reason_against", lambda _: None)
        train(None)
    assert ran.exists(), "it would have"
