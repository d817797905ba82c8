"""Trainings on tables end undisturbed after kills in mid-epoch, on real ranks and a real S3."""

import pickle
from pathlib import Path
from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
import pyarrow as pa
import pytest
import torch
import xarray as xr

from prefect_torch_ddp import InvalidParamsError, RankContext, S3Storage
from prefect_torch_ddp.data import table
from prefect_torch_ddp.data.tables import pieces as tables_pieces
from prefect_torch_ddp.records.ledger import read_ledger
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.storage.protocol import Storage
from tests.support.killed import check_killed_and_resumed, train_or_die
from tests.support.ranks import config_for, train_on
from tests.support.s3_server import S3Server
from tests.unit.data.tables.parquet_files import noisy_batches, numbered, walk, write

pytestmark = pytest.mark.timeout(200)
NUM_ROWS, BATCH = 150, 16
NUM_STEPS = 20
SIZES = [70, 0, 80]


def train(ctx: RankContext, storage: Storage, kill_at: int | None) -> dict[str, Any]:
    """Train on a table with small windows."""
    tables_pieces.PIECE_ROWS = 8
    rows = table(storage, features=["half"], target="number", shuffle_buffer=32)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    def loss_of(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, y = batch
        return torch.nn.functional.mse_loss(model(x / 75)[:, 0], y.float() / 150)

    return train_or_die(ctx, ctx.loader(rows, global_batch_size=BATCH), net, loss_of, kill_at)


def in_both(tmp_path: Path, server: S3Server) -> dict[str, Storage]:
    """Write the same table into a folder and into a bucket."""
    folder = DirectoryStorage(numbered(tmp_path / "table", SIZES, 5))
    bucket = server.storage()
    for item in folder.list():
        bucket.write(item.key, folder.read(item.key))
    return {"directory": folder, "s3": bucket}


@pytest.fixture
def storages(tmp_path: Path, s3_server: S3Server) -> dict[str, Storage]:
    """Give the same table in a folder and in a bucket."""
    return in_both(tmp_path, s3_server)


@pytest.mark.extended
@pytest.mark.parametrize("kind", [pytest.param("directory", marks=pytest.mark.more), "s3"])
def test_killed_in_mid_epoch_it_ends_with_the_undisturbed_weights(kind, storages, tmp_path) -> None:
    """Two ranks are killed twice, and the ledger counts every row once an epoch."""
    last = check_killed_and_resumed(tmp_path, train, storages["directory"], storages[kind], (5, 14))
    assert last == NUM_STEPS
    report = read_ledger(DirectoryStorage(tmp_path / "runs"), "run")
    assert str(report).splitlines() == [
        f"epoch {epoch}: {NUM_ROWS} samples, each once" for epoch in (1, 2)
    ]


@pytest.mark.extended
def test_with_elastic_determinism_the_number_of_ranks_doesnt_matter(storages, tmp_path) -> None:
    """Four, two and one killed ranks end with the bits of one undisturbed rank."""
    elastic = {"determinism": "elastic", "virtual_ranks": 4, "ledger": True}
    calm = train_on(1, config_for(tmp_path / "calm", **elastic), train, storages["directory"], None)
    for size, kill_at in ((4, 4), (2, 9), (1, 13)):
        config = config_for(tmp_path / "runs", **elastic)
        train_on(size, config, train, storages["s3"], kill_at)
    ended = train_on(4, config_for(tmp_path / "runs", **elastic), train, storages["s3"], None)
    assert {value["sha256"] for value in ended} == {calm[0]["sha256"]}
    assert read_ledger(DirectoryStorage(tmp_path / "runs"), "run").is_clean


def test_a_bucket_gives_the_batches_of_a_folder(tmp_path, chain_bucket_server, monkeypatch) -> None:
    """A storage and an s3:// URI give a folder's batches, also with filters, by range reads."""
    monkeypatch.setattr(tables_pieces, "PIECE_ROWS", 8)
    folder, bucket = in_both(tmp_path, chain_bucket_server).values()
    expected = walk(table(folder, shuffle_buffer=32), BATCH, 1)
    uri = {"endpoint_url": chain_bucket_server.endpoint_url}
    for rows in (
        table(bucket, shuffle_buffer=32),
        table(bucket.uri, shuffle_buffer=32, **uri),
        table([f"{bucket.uri}/{i:03d}.parquet" for i in range(3)], shuffle_buffer=32, **uri),
    ):
        for world in (1, 2, 4):
            assert walk(rows, BATCH, world) == expected
    few = [table(where, filters=[("number", "<", 100)]) for where in (bucket, folder)]
    assert walk(few[0], BATCH, 2) == walk(few[1], BATCH, 1)


def test_a_log_in_a_bucket_is_found(tmp_path, bucket_server) -> None:
    """Of a table of Delta Lake, whose folder has files that no longer count."""
    _, bucket = in_both(tmp_path, bucket_server).values()
    bucket.write("_delta_log/00000000000000000000.json", b"{}")
    with pytest.raises(InvalidParamsError, match=f"{bucket.uri} is a table of Delta Lake"):
        table(bucket)
    files = [f"{i:03d}.parquet" for i in range(3)]
    assert len(table(files, storage=bucket)) == NUM_ROWS


def test_a_piece_in_a_bucket_is_read_by_the_ranges_of_its_columns(bucket_server, tmp_path) -> None:
    """Unwanted columns aren't read."""
    generator = np.random.default_rng(0)
    wide = {f"c{i}": pa.array(generator.random(60_000)) for i in range(8)}
    write(tmp_path / "wide.parquet", {"number": list(range(60_000)), **wide})
    bucket = bucket_server.storage()
    bucket.write("wide.parquet", (tmp_path / "wide.parquet").read_bytes())
    rows = table(bucket, ["c7", "number"])
    ranges = list(rows.rows.files[0]._ranges(range(1), {"c7", "number"}))
    assert len(ranges) == 2
    assert sum(end - start for start, end in ranges) < 1_200_000
    batches = walk(rows, 9000, 2)
    assert sorted(n for batch in batches for n in batch) == list(range(60_000))


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.extended)])
def test_loader_workers_give_the_same_batches(context, tmp_path, monkeypatch) -> None:
    """Workers may be forked after the rank has read the table, or spawned with a pickle of it."""
    monkeypatch.setattr(tables_pieces, "PIECE_ROWS", 8)
    rows = table(numbered(tmp_path, [50, 41], 5), shuffle_buffer=30)
    expected = walk(rows, 6, 2)
    assert walk(rows, 6, 2, num_workers=2, multiprocessing_context=context) == expected
    assert walk(pickle.loads(pickle.dumps(rows)), 6, 2) == expected


def test_what_collate_fn_draws_is_the_same_for_any_number_of_workers(tmp_path) -> None:
    """The generators are seeded for each batch."""
    rows = table(numbered(tmp_path, [64], 8), ["number"])
    assert noisy_batches(rows, 16, num_workers=1) == noisy_batches(rows, 16, num_workers=2)


def test_dask_and_xarray_open_what_a_storage_is(storages, monkeypatch) -> None:
    """With the endpoint and the keys of the storage, which the environment doesn't have."""
    monkeypatch.setitem(dask.config.config, "scheduler", "sync")
    for storage in storages.values():
        options = storage.storage_options
        rows = dd.read_parquet(storage.uri, storage_options=options)
        assert len(rows) == NUM_ROWS
        store, where = storage.below("gridded"), f"{storage.uri}/gridded"
        field = xr.Dataset({"t2m": ("time", np.arange(6.0))})
        field.to_zarr(where, storage_options=options, consolidated=False)
        found = xr.open_zarr(store.uri, storage_options=options, consolidated=False)
        xr.testing.assert_identical(found.load(), field)
        assert store.storage_options == options
    anonymous = S3Storage("b", anonymous=True, region="eu-west-1", addressing_style="path")
    assert anonymous.storage_options == {
        "anon": True,
        "client_kwargs": {"region_name": "eu-west-1"},
        "config_kwargs": {"s3": {"addressing_style": "path"}},
    }
