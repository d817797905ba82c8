"""The examples in the public docstrings run, on what real runs left."""

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from prefect import flow
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import TensorDataset

import prefect_torch_ddp
import prefect_torch_ddp.data
from prefect_torch_ddp import ClusterParams, RankContext, TrainParams, TrainReport, train_flow
from tests.support.pages import example_of
from tests.support.s3_server import S3Server

pytestmark = [pytest.mark.extended, pytest.mark.timeout(300)]

DOORS = (prefect_torch_ddp, prefect_torch_ddp.data)
NAMES = {name: getattr(door, name) for door in DOORS for name in door.__all__}
NOT_HERE = {
    "__version__",
    # Whole programs, such as those of README, the tutorial and the recipes, which tests run.
    *("run_gang", "train_flow", "ddp_task", "ddp_script", "sweep_report"),
    "storage_from_uri",  # in a store at an address of nobody's
}
SAYS = {
    "Report": "accuracy 0.98, top5 0.999 on 360 samples",
    "LedgerReport": "epoch 1: 1,294 samples, each once",
    "ObjectChangedError": "True",
    "ObjectPart": "[b'the firs']",
    "seeded_split": "80 20",
    "RankFailedError": "ValueError",
    "NoImagesError": "runs",
    "BadKeyError": "secret",
    "InvalidParamsError": "ftp",
    "StorageError": "/proc/runs",
    "PrefectTorchDdpError": "no-such-run",
    "Storage": "mine",
    "read_result": "file,digit",
    "S3Storage": "s3://bucket/prefix",
}
"""What some examples print."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the folder that the examples run in, with a few images."""
    folder = tmp_path_factory.mktemp("examples")
    for number, kind in enumerate(("cat", "cat", "dog")):
        (folder / "images" / kind).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (number, 0, 0)).save(folder / f"images/{kind}/{number}.png")
    (folder / "runs/checkpoints").mkdir(parents=True)
    return folder


@pytest.fixture(scope="module")
def reports() -> list[TrainReport]:
    """Keep the reports of the runs that the first test makes."""
    return []


@pytest.fixture
def world(
    place: Path,
    reports: list[TrainReport],
    shared: ClusterParams,
    prefect_api: str,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[dict[str, Any]]:
    """Give the names that examples use without making them."""
    del prefect_api
    monkeypatch.chdir(place)
    for seed in range(2 - len(reports)):
        params = TrainParams(
            storage=str(place / "runs"),
            options={"epochs": 1},
            seed=seed,
            ledger=True,
            cluster=shared,
        )
        reports.append(train_flow(params))
    samples = TensorDataset(torch.rand(256, 3, 8, 8), torch.randint(2, (256,)))
    with RankContext.local(_data(place), source=place / "images") as ctx:
        yield {
            "__name__": "__main__",
            "fn": "os:getpid",
            "report": reports[0],
            "run_id": reports[0].run_id,
            "ctx": ctx,
            "torch": torch,
            "cross_entropy": cross_entropy,
            "mse_loss": mse_loss,
            "Net": lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 2)),
            "model": nn.Sequential(nn.Flatten(), nn.Linear(192, 2)),
            "loader": torch.utils.data.DataLoader(samples, batch_size=64),
            "dataset": samples,
            "to_tensor": lambda image: torch.tensor(image.getdata()),
            "prepare_data": lambda: None,
            "held_out": [(torch.rand(4, 3), torch.rand(4, 1))],
            "regression": nn.Linear(3, 1),
            "texts": [torch.randint(9, (2, 5))],
            "language_model": nn.Embedding(9, 9),
        }


def _data(place: Path) -> Path:
    """Make what `prepare` wrote: a table and an array."""
    import numpy as np
    import pandas as pd
    import xarray as xr

    if not (folder := place / "data").exists():
        folder.mkdir()
        rows = pd.DataFrame({"age": [1.0] * 64, "income": [2.0] * 64, "bought": [0, 1] * 32})
        rows.to_parquet(folder / "rows.parquet")
        (place / "grid").mkdir()
        field = (("time", "lat", "lon"), np.zeros((8, 64, 64), "float32"))
        xr.Dataset({"t2m": field, "z500": field}).to_zarr(place / "grid", consolidated=False)
    return folder


@pytest.fixture(autouse=True)
def _home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep runs of examples that name no storage out of the developer's."""
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in NOT_HERE])
def test_an_example_runs(
    name: str,
    world: dict[str, Any],
    place: Path,
    chain_s3_server: S3Server,
    request: pytest.FixtureRequest,
) -> None:
    """It raises nothing, and prints what its comments say."""
    if name == "S3ImageFolder":
        for image in place.glob("images/*/*.png"):
            key = f"train/{image.parent.name}/{image.name}"
            chain_s3_server.storage("images").write(key, image.read_bytes())
    example = example_of(NAMES[name])
    if "client" in example:  # flows refuse an open one
        world["client"] = request.getfixturevalue("dask_client")
    code = compile(example, name, "exec")
    with contextlib.redirect_stdout(io.StringIO()) as said:
        if name == "read_result":
            with RankContext.local(storage="runs", run_id=world["run_id"]) as ctx:
                ctx.save("predictions.csv", b"file,digit")
        if name == "array":
            with RankContext.local(place / "grid") as world["ctx"]:
                exec(code, world)
        elif name == "gang_report":  # which needs a flow
            flow(name="example")(lambda: exec(code, world))()
        else:
            exec(code, world)
    assert SAYS.get(name, "") in said.getvalue()
