"""Trainings on a dataset of Hugging Face, unadapted, on real ranks that are killed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prefect_torch_ddp import RankContext
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.records.ledger import read_ledger
from prefect_torch_ddp.storage.directory import DirectoryStorage
from tests.support.killed import train_or_die
from tests.support.ranks import Died, config_for, train_on
from tests.unit.data.test_hugging_face import rows, walk

datasets = pytest.importorskip("datasets")
pytestmark = pytest.mark.timeout(200)
NUM_ROWS, BATCH, NUM_STEPS = 45, 8, 12


def train(ctx: RankContext, folder: Path, kill_at: int | None) -> dict[str, Any]:
    """Train for two epochs on a dataset that is mapped from a folder; rank 1 may die."""
    rows = datasets.load_from_disk(str(folder)).with_format("torch")
    asked: list[int] = []
    own = datasets.Dataset.__getitems__
    datasets.Dataset.__getitems__ = lambda self, keys: asked.append(len(keys)) or own(self, keys)
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 1)

    def loss_of(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.mse_loss(model(batch["x"])[:, 0], batch["y"])

    ended = train_or_die(ctx, ctx.loader(rows, global_batch_size=BATCH), net, loss_of, kill_at)
    return {**ended, "batches": len(asked)}


def refused(ctx: RankContext) -> str:
    """Return the error that a stream gets."""
    stream = datasets.Dataset.from_dict({"x": [1, 2]}).to_iterable_dataset()
    try:
        ctx.loader(stream, global_batch_size=2)
    except InvalidParamsError as error:
        return str(error)
    return "nothing"


@pytest.mark.extended
def test_a_killed_training_on_a_dataset_of_arrow_ends_with_the_undisturbed_weights(
    tmp_path,
) -> None:
    """Two ranks read it by their own __getitems__, a call a batch, and each row counts once."""
    x = np.random.default_rng(0).random((NUM_ROWS, 3), dtype=np.float32)
    datasets.Dataset.from_dict({"x": x, "y": x.sum(1)}).save_to_disk(tmp_path / "rows")
    folder = tmp_path / "rows"
    calm = train_on(2, config_for(tmp_path / "calm"), train, folder, None)
    assert [each["batches"] for each in calm] == [NUM_STEPS, NUM_STEPS]
    struck = train_on(2, config_for(tmp_path / "run", ledger=True), train, folder, 8)
    assert any(isinstance(value, Died) for value in struck)
    ended = train_on(2, config_for(tmp_path / "run", ledger=True), train, folder, None)
    assert [each["sha256"] for each in ended] == [each["sha256"] for each in calm]
    assert [each["step"] for each in ended] == [NUM_STEPS, NUM_STEPS]
    assert read_ledger(DirectoryStorage(tmp_path / "run"), "run").is_clean


def test_a_stream_is_refused_on_a_rank(tmp_path) -> None:
    """`ctx.loader` names its class, and the ways out."""
    (says,) = train_on(1, config_for(tmp_path), refused)
    assert says.startswith("IterableDataset is an IterableDataset")
    assert "ctx.steps(loader, total=5000)" in says


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.more)])
def test_loader_workers_read_the_batches_of_a_dataset_of_arrow(context, tmp_path) -> None:
    """A dataset on disk is mapped in each worker."""
    rows(20).save_to_disk(tmp_path / "rows")
    dataset = datasets.load_from_disk(str(tmp_path / "rows")).with_format("torch")
    expected = walk(dataset, 2)
    assert walk(dataset, 2, num_workers=2, multiprocessing_context=context) == expected
