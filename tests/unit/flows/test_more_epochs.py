"""The example workloads, resumed for more epochs: each has a schedule of a fixed length."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from flows import cifar10, land_use, pet_names
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

    def rates(run_id: str, epochs: int, resume_from: str | None = None) -> list[float]:
        found: list[float] = []

        def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            found.append(optimizer.param_groups[0]["lr"])

        noting = register_optimizer_step_pre_hook(note)
        with RankContext.local(
            data=data,
            source=source,
            options={**options, "epochs": epochs},
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
