"""The example workloads, resumed for more epochs: each has a schedule of a fixed length."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import TensorDataset

from flows import cifar10, land_use, pet_names
from flows.cifar10 import Options
from prefect_torch_ddp import InvalidParamsError, RankContext, read_metrics
from prefect_torch_ddp.examples import digits
from prefect_torch_ddp.examples.schedules import num_steps, one_cycle, renew_options
from prefect_torch_ddp.storage.directory import DirectoryStorage
from tests.integration.data.image_files import write_cifar10, write_images


def put_images(source: Path) -> None:
    """Write five images of each of two classes."""
    write_images(DirectoryStorage(source), ["field", "forest"], num_each=5)


def put_names(source: Path) -> None:
    """Write a list of names."""
    source.mkdir()
    (source / "names.txt").write_text("\n".join(f"Bello {number}" for number in range(20)))


CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "digits": (digits, Path.mkdir, {"held_out": 0.8, "global_batch_size": 128}),
    "cifar10": (cifar10, lambda source: write_cifar10(source, 2), {"global_batch_size": 5}),
    "land_use": (
        land_use,
        put_images,
        {"size": 32, "model": "squeezenet1_1", "global_batch_size": 4},
    ),
    "pet_names": (pet_names, put_names, {"file": "names.txt", "global_batch_size": 8}),
}


class Groups(NamedTuple):
    """What an optimizer stepped with: options of its group, and a weight before each step."""

    options: list[dict[str, Any]]
    weights: list[Tensor]

    @property
    def rates(self) -> list[float]:
        """The learning rate of each step."""
        return [each["lr"] for each in self.options]


@dataclass
class Workload:
    """A workload with a small prepared dataset."""

    module: Any
    folder: Path
    options: dict[str, Any]

    @classmethod
    def prepared(cls, name: str, folder: Path) -> Self:
        """Put the raw data of a workload, and prepare them."""
        module, put, options = CASES[name]
        (folder / "data").mkdir()
        put(folder / "source")
        with RankContext.local(
            data=folder / "data", source=folder / "source", options=options, stage="prepare"
        ) as ctx:
            module.prepare(ctx)
        return cls(module, folder, options)

    def train(
        self,
        run_id: str,
        epochs: int,
        resume_from: str | None = None,
        *,
        fails_at: int | None = None,
        **changes: Any,
    ) -> Groups:
        """Train in this process; return what each step was made with.

        Raises:
            ZeroDivisionError: so many steps were made as `fails_at` has.
        """
        found = Groups([], [])

        def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if len(found.options) == fails_at:
                raise ZeroDivisionError
            (group,) = optimizer.param_groups
            found.options.append({name: group[name] for name in group.keys() - {"params"}})
            found.weights.append(group["params"][-1].detach().clone())

        noting = register_optimizer_step_pre_hook(note)
        try:
            with RankContext.local(
                data=self.folder / "data",
                source=self.folder / "source",
                options={**self.options, "epochs": epochs, **changes},
                storage=self.folder / "storage",
                checkpoint=None if fails_at is None else {"every_steps": 1, "every_s": None},
                run_id=run_id,
                resume_from=resume_from,
            ) as ctx:
                self.module.train(ctx)
        finally:
            noting.remove()
        return found


@pytest.mark.parametrize("name", CASES)
def test_more_epochs_go_on_with_the_schedule_of_all_of_them(name: str, tmp_path: Path) -> None:
    """Their steps have the rates of a run that was asked for all epochs at its start; the first one
    may have the rate that was saved."""
    workload = Workload.prepared(name, tmp_path)
    num_short = len(workload.train("short", 1).rates)
    later = workload.train("longer", 2, "short").rates
    whole = workload.train("whole", 2).rates
    assert len(later) == len(whole) - num_short > 1
    assert later[1:] == pytest.approx(whole[num_short + 1 :], rel=1e-6)
    assert workload.train("no more", 1, "longer").rates == []
    larger = {"global_batch_size": 2 * workload.options["global_batch_size"]}
    learnt = workload.train("larger batches", 3, "longer", **larger)
    assert 0 < len(learnt.rates) < num_short
    assert min(learnt.rates) > 0, "or the new epochs learn nothing"


OTHER_OPTIONS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "digits": ("digits", {}, {"lr": 0.002, "weight_decay": 0.2}),
    "cifar10, constant after a cycle": (
        "cifar10",
        {},
        {"schedule": "constant", "lr": 0.002, "weight_decay": 0.01},
    ),
    "land_use": ("land_use", {}, {"lr": 0.002, "weight_decay": 0.2}),
    "land_use by sgd": (
        "land_use",
        {"optimizer": "sgd"},
        {"optimizer": "sgd", "lr": 0.002, "weight_decay": 0.2, "momentum": 0.5},
    ),
    "pet_names": ("pet_names", {}, {"lr": 0.002}),
}
"""A workload, the options of a run, and those of the run that continues it."""


@pytest.mark.parametrize("case", OTHER_OPTIONS)
def test_options_given_on_a_resume_are_those_of_the_new_steps(case: str, tmp_path: Path) -> None:
    """They are made with what a run has that was begun with these options, and not with the old
    run's that the checkpoint has."""
    name, before, now = OTHER_OPTIONS[case]
    workload = Workload.prepared(name, tmp_path)
    num_short = len(workload.train("short", 1, **before).rates)
    later = workload.train("later", 2, "short", **now)
    whole = workload.train("whole", 2, **now)
    own = [{key: each[key] for key in whole.options[0]} for each in later.options]
    assert own == whole.options[num_short:]
    assert len({weights.sum().item() for weights in later.weights}) == len(later.weights) > 1
    if "lr" in (metrics := read_metrics(tmp_path / "storage", "later")):
        of_whole = read_metrics(tmp_path / "storage", "whole")
        assert list(metrics["lr"]) == list(of_whole["lr"])[num_short:]


def test_land_use_continues_in_another_precision(tmp_path: Path) -> None:
    """A run in float32 has no scale of the loss; in float16 the scaler begins with its own, and a
    run that continues that one has its scale."""
    workload = Workload.prepared("land_use", tmp_path)
    workload.train("float32", 1)
    scales = []
    for run_id, epochs, before in (("first", 2, "float32"), ("second", 3, "first")):
        workload.train(run_id, epochs, before, precision="float16")
        scales += list(read_metrics(tmp_path / "storage", run_id)["loss_scale"])
    assert len(scales) == 4
    assert scales == sorted(scales, reverse=True), "it only falls, since it grows after 2000 steps"
    assert 1 < scales[0] <= 65536
    workload.train("float32 again", 4, "second")


@pytest.mark.parametrize("name", ["digits", "land_use", "pet_names"])
def test_a_training_that_fails_ends_with_the_rates_and_weights_of_one_that_did_not(
    name: str, tmp_path: Path
) -> None:
    """It is resumed within an epoch, after it continued a run of another batch size and rate."""
    workload = Workload.prepared(name, tmp_path)
    workload.train("short", 1)
    smaller = {"global_batch_size": workload.options["global_batch_size"] // 2, "lr": 0.002}
    whole = workload.train("whole", 2, "short", **smaller)
    with pytest.raises(ZeroDivisionError):
        workload.train("fails", 2, "short", fails_at=1, **smaller)
    later = workload.train("fails", 2, "short", **smaller)
    num = len(later.rates)
    assert 0 < num < len(whole.rates), "it resumes"
    assert later.options == whole.options[-num:]
    pairs = zip(later.weights, whole.weights[-num:], strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


def test_another_schedule_is_followed_from_the_checkpoints_step(tmp_path: Path) -> None:
    """A constant rate leaves no options of a cycle in the checkpoint."""
    model = nn.Linear(1, 1)
    options = Options(epochs=2, lr=0.1)
    for run_id, schedule in (("constant", "constant"), ("cycle", "one_cycle")):
        with RankContext.local(
            storage=tmp_path, run_id=run_id, resume_from="constant" if run_id == "cycle" else None
        ) as ctx:
            optimizer = torch.optim.SGD(model.parameters(), options.lr, momentum=0.9)
            ctx.track(model=model, optimizer=optimizer)
            chosen = options.model_copy(update={"schedule": schedule})
            scheduler = cifar10.make_schedule(ctx, optimizer, chosen, num_batches=4)
            loader = ctx.loader(TensorDataset(torch.ones(8, 1)), global_batch_size=2)
            for (x,) in ctx.steps(loader, epochs=1 if run_id == "constant" else 2):
                model(x).sum().backward()
                (rate,) = scheduler.get_last_lr()
                optimizer.step()
                scheduler.step()
    assert rate == pytest.approx(0.1 / 25e4)


LENGTH, EPOCHS = 100, 3
"""Of the dataset and the training of `rates_of`."""


def rates_of(
    folder: Path,
    run_id: str,
    global_batch_size: int,
    resume_from: str | None = None,
    *,
    fails_at: int | None = None,
    drop_last: bool = False,
) -> tuple[list[float], int]:
    """Train on a cycle, with a checkpoint in each step; return the rates, and the planned length.

    Raises:
        ZeroDivisionError: it is at the step `fails_at`.
    """
    model, rates = nn.Linear(1, 1), []
    with RankContext.local(
        storage=folder,
        run_id=run_id,
        resume_from=resume_from,
        checkpoint={"every_steps": 1, "every_s": None},
    ) as ctx:
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        ctx.track(model=model, optimizer=optimizer)
        renew_options(optimizer)
        loader = ctx.loader(
            TensorDataset(torch.ones(LENGTH, 1)),
            global_batch_size=global_batch_size,
            drop_last=drop_last,
        )
        scheduler = one_cycle(ctx, optimizer, 0.1, epochs=EPOCHS, num_batches=len(loader))
        for (x,) in ctx.steps(loader, epochs=EPOCHS):
            if ctx.step == fails_at:
                raise ZeroDivisionError
            optimizer.zero_grad()
            model(x).sum().backward()
            rates += scheduler.get_last_lr()
            optimizer.step()
            scheduler.step()
        assert (ctx.epoch, ctx.epoch_ended) == (EPOCHS, True)
    return rates, scheduler.total_steps


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(
    ("before", "now", "num_done"), [(3, 5, 17), (5, 3, 10), (4, 33, 19), (33, 2, 2)]
)
def test_another_batch_size_within_an_epoch_makes_no_schedule_too_short(
    before: int, now: int, num_done: int, tmp_path: Path, *, drop_last: bool
) -> None:
    """The epoch goes on at about the same sample. The schedule lasts for all steps, is
    longer by at most about a batch of the larger size, and is the same one after a failure."""
    with pytest.raises(ZeroDivisionError):
        rates_of(tmp_path, "stopped", before, fails_at=num_done + 1, drop_last=drop_last)
    whole, total = rates_of(tmp_path, "whole", now, "stopped", drop_last=drop_last)
    assert 0 <= total - num_done - len(whole) <= 1 + max(before, now) // now
    for fails_at in (num_done + 2, num_done + len(whole)):
        run_id = f"fails {fails_at}"
        with pytest.raises(ZeroDivisionError):
            rates_of(tmp_path, run_id, now, "stopped", fails_at=fails_at, drop_last=drop_last)
        later, again = rates_of(tmp_path, run_id, now, "stopped", drop_last=drop_last)
        assert (later, again) == (whole[fails_at - 1 - num_done :], total)


def test_a_run_without_a_plan_keeps_its_length(tmp_path: Path) -> None:
    """The optimizer of an older checkpoint has none; its batch size is taken for the same one."""
    with RankContext.local(storage=tmp_path) as ctx:
        optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1)
        loader = ctx.loader(TensorDataset(torch.ones(8, 1)), global_batch_size=2)
        for _ in ctx.steps(loader, epochs=2):
            assert num_steps(ctx, optimizer, epochs=2, num_batches=4) == 8
            del optimizer.param_groups[0]["planned"]
            if ctx.epoch_ended:
                total = num_steps(ctx, optimizer, epochs=2, num_batches=2)
                assert total == ctx.step + 2 * (2 - ctx.epoch)
                del optimizer.param_groups[0]["planned"]


def test_options_of_single_groups_are_not_replaced() -> None:
    """It is refused, with what differs, and no group is changed."""
    net = nn.Linear(1, 1)
    groups = [{"params": [net.weight]}, {"params": [net.bias], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, 0.1, weight_decay=0.2)
    with pytest.raises(InvalidParamsError, match=r"weight_decay.*set the options of each group"):
        renew_options(optimizer)
    assert [each["weight_decay"] for each in optimizer.param_groups] == [0.2, 0.0]


def test_the_options_of_an_optimizer_without_defaults_are_not_renewed() -> None:
    """It is refused: nobody knows what options the run has given."""
    optimizer = torch.optim.Optimizer([{"params": [*nn.Linear(1, 1).parameters()], "lr": 0.1}], {})
    with pytest.raises(InvalidParamsError, match=r"has no default lr.*set the options of each"):
        renew_options(optimizer)


def test_a_rate_that_is_a_tensor_has_a_copy_in_each_place() -> None:
    """A schedule writes into the tensor of its group."""
    named = list(nn.Linear(1, 1).named_parameters())
    groups = [{"params": [each]} for each in named]
    optimizer = torch.optim.AdamW(groups, torch.tensor(0.1))
    renew_options(optimizer)
    first, second = optimizer.param_groups
    first["lr"].fill_(0.5)
    others = [first["initial_lr"], second["lr"], second["initial_lr"], optimizer.defaults["lr"]]
    assert others == [torch.tensor(0.1)] * 4
