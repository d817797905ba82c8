"""The example workloads, resumed for more epochs: each has a schedule of a fixed length."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import TensorDataset

from flows import cifar10, land_use, pet_names
from flows.cifar10 import Options
from prefect_torch_ddp import RankContext
from prefect_torch_ddp.examples import digits
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


@pytest.mark.parametrize("name", CASES)
def test_more_epochs_go_on_with_the_schedule_of_all_of_them(name: str, tmp_path: Path) -> None:
    """Their steps have the rates of a run that was asked for all epochs at its start; the first one
    may have the rate that was saved."""
    workload, put, options = CASES[name]
    source, data = tmp_path / "source", tmp_path / "data"
    data.mkdir()
    put(source)
    with RankContext.local(data=data, source=source, options=options, stage="prepare") as ctx:
        workload.prepare(ctx)

    def rates(
        run_id: str, epochs: int, resume_from: str | None = None, **changes: Any
    ) -> list[float]:
        found: list[float] = []

        def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            found.append(optimizer.param_groups[0]["lr"])

        noting = register_optimizer_step_pre_hook(note)
        with RankContext.local(
            data=data,
            source=source,
            options={**options, "epochs": epochs, **changes},
            storage=tmp_path / "storage",
            run_id=run_id,
            resume_from=resume_from,
        ) as ctx:
            workload.train(ctx)
        noting.remove()
        return found

    num_short = len(rates("short", 1))
    later = rates("longer", 2, "short")
    whole = rates("whole", 2)
    assert len(later) == len(whole) - num_short > 1
    assert later[1:] == pytest.approx(whole[num_short + 1 :], rel=1e-6)
    assert rates("no more", 1, "longer") == []
    larger = {"global_batch_size": 2 * options["global_batch_size"]}
    assert 0 < len(rates("larger batches", 3, "longer", **larger)) < num_short


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
