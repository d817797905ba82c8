"""Trainings on arrays end undisturbed after kills in mid-epoch, on real ranks and a real S3."""

from pathlib import Path
from typing import Any

import pytest
import torch

from prefect_torch_ddp import RankContext
from prefect_torch_ddp.data import array
from prefect_torch_ddp.data.arrays import axes as array_axes
from prefect_torch_ddp.records.ledger import read_ledger
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.storage.protocol import Storage
from tests.support.killed import check_killed_and_resumed, train_or_die
from tests.support.ranks import config_for, train_on
from tests.support.s3_server import S3Server
from tests.unit.data.arrays.array_files import walk, weather

pytest.importorskip("zarr")
pytest.importorskip("xarray")
pytestmark = [
    pytest.mark.timeout(200),
    pytest.mark.filterwarnings("ignore:Consolidated metadata is currently not part"),
]
BATCH = 16
NUM_SAMPLES, NUM_STEPS = 108, 14
CUT: dict[str, Any] = {"window": {"time": 3}, "patch": {"lat": 4, "lon": 2}}


def train(ctx: RankContext, storage: Storage, kill_at: int | None) -> dict[str, Any]:
    """Predict the next time from two before it."""
    array_axes.PIECE_BYTES = 1
    samples = array("weather.zarr", storage=storage, shuffle_buffer=40, **CUT)
    torch.manual_seed(0)
    net = torch.nn.Conv2d(2, 1, 3, padding=1)

    def loss_of(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        steps = batch["t2m"] / 1000
        return torch.nn.functional.mse_loss(model(steps[:, :2]), steps[:, 2:])

    loader = ctx.loader(samples, global_batch_size=BATCH)
    return train_or_die(ctx, loader, net, loss_of, kill_at)


def in_both(tmp_path: Path, server: S3Server) -> dict[str, Storage]:
    """Write the same Zarr group into a folder, format 2, and into a bucket, format 3."""
    for zarr_format in (2, 3):
        weather().to_zarr(
            tmp_path / f"format_{zarr_format}" / "weather.zarr",
            zarr_format=zarr_format,
            encoding={"t2m": {"chunks": (4, 3, 6)}},
        )
    bucket = server.storage()
    folder = DirectoryStorage(tmp_path / "format_3")
    for item in folder.list():
        bucket.write(item.key, folder.read(item.key))
    return {"directory": DirectoryStorage(tmp_path / "format_2"), "s3": bucket}


@pytest.fixture
def storages(tmp_path: Path, s3_server: S3Server) -> dict[str, Storage]:
    """Give the same Zarr group in a folder and in a bucket."""
    return in_both(tmp_path, s3_server)


@pytest.mark.long
@pytest.mark.parametrize("kind", [pytest.param("directory", marks=pytest.mark.more), "s3"])
def test_on_arrays_a_killed_training_ends_with_the_undisturbed_weights(
    kind, storages, tmp_path
) -> None:
    """Two ranks are killed twice, and the ledger counts every sample once an epoch."""
    last = check_killed_and_resumed(tmp_path, train, storages["directory"], storages[kind], (5, 10))
    assert last == NUM_STEPS
    report = read_ledger(DirectoryStorage(tmp_path / "runs"), "run")
    assert str(report).splitlines() == [
        f"epoch {epoch}: {NUM_SAMPLES} samples, each once" for epoch in (1, 2)
    ]


@pytest.mark.extended
def test_with_elastic_determinism_the_ranks_of_arrays_may_change(storages, tmp_path) -> None:
    """Two ranks, killed, and then one rank end with the bits of an undisturbed rank."""
    elastic = {"determinism": "elastic", "virtual_ranks": 2, "ledger": True}
    calm = train_on(1, config_for(tmp_path / "calm", **elastic), train, storages["directory"], None)
    train_on(2, config_for(tmp_path / "runs", **elastic), train, storages["directory"], 5)
    config = config_for(tmp_path / "runs", **elastic)
    (ended,) = train_on(1, config, train, storages["directory"], None)
    assert ended == calm[0]
    assert read_ledger(DirectoryStorage(tmp_path / "runs"), "run").is_clean


def test_a_bucket_gives_the_samples_of_a_folder(tmp_path, chain_bucket_server, monkeypatch) -> None:
    """A storage with its credentials and an s3:// URI give a folder's batches, on 1 and 2 ranks."""
    monkeypatch.setattr(array_axes, "PIECE_BYTES", 1)
    options = {"numbered": True, "shuffle_buffer": 40, **CUT}
    folder, bucket = in_both(tmp_path, chain_bucket_server).values()
    expected = walk(array("weather.zarr", storage=folder, **options), BATCH, 1)
    uri, endpoint = f"{bucket.uri}/weather.zarr", chain_bucket_server.endpoint_url
    for samples in (
        array("weather.zarr", storage=bucket, **options),
        array(uri, endpoint_url=endpoint, **options),
    ):
        assert walk(samples, BATCH, 2) == walk(samples, BATCH, 1) == expected


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.more)])
def test_loader_workers_give_the_same_samples(context, storages, monkeypatch) -> None:
    """Workers may be forked after the rank has read the arrays, or spawned with a pickle."""
    monkeypatch.setattr(array_axes, "PIECE_BYTES", 1)
    where = storages["directory"]
    samples = array("weather.zarr", storage=where, numbered=True, shuffle_buffer=40, **CUT)
    expected = walk(samples, BATCH, 2)
    assert walk(samples, BATCH, 2, num_workers=2, multiprocessing_context=context) == expected
