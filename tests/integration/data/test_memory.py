"""A rank holds two windows of a table or an array, and a Dask worker that prepares one holds what
Dask computes at once, however large it is."""

import logging
import re
from pathlib import Path
from typing import Any

import cloudpickle
import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prefect_torch_ddp import RankContext
from prefect_torch_ddp.data import array, table
from prefect_torch_ddp.protocol.prepared import LazyDataset
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.tasks.gangs.computed import publish_computed
from tests.support.gangs import own_cluster
from tests.support.ranks import config_for, train_on

zarr = pytest.importorskip("zarr")
pytest.importorskip("xarray")
pytestmark = [pytest.mark.extended, pytest.mark.timeout(200)]
MB = 2**20
DATASET_BYTES, WINDOW_BYTES = 256 * MB, 8 * MB
ROW_BYTES, CHUNK_ROWS = 256, 8192
LIMIT_BYTES = DATASET_BYTES // 4
"""Two windows take 16 MB. The rest is for chunks that are decoded, batches, and the allocator."""


def memory(name: str) -> int:
    """Return a size of this process that the kernel counts."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{name}:\s+(\d+) kB", status)[1]) * 1024


def peak_of(ctx: RankContext, where: Path, kind: str) -> dict[str, Any]:
    """Go through the data twice; return by how much the memory grew after the first window."""
    num = WINDOW_BYTES // ROW_BYTES
    if kind == "table":
        names = [f"c{i}" for i in range(ROW_BYTES // 4)]
        rows: Any = table(where, features=names, shuffle_buffer=num)
    else:
        rows = array(where, shuffle_buffer=num)
    loader = ctx.loader(rows, global_batch_size=1024)
    before, total = None, 0
    for batch in ctx.steps(loader, epochs=2):
        total += len(batch)
        if before is None:
            before = memory("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
    peak = memory("VmHWM")
    return {"total": total, "grew": peak - before}


def write(kind: str, folder: Path) -> Path:
    """Write float32 [rows, 64], in small chunks."""
    num, width = DATASET_BYTES // ROW_BYTES, ROW_BYTES // 4
    generator = np.random.default_rng(0)
    parts = (generator.random((CHUNK_ROWS, width), "float32") for _ in range(num // CHUNK_ROWS))
    if kind == "array":
        made = zarr.create_array(
            folder / "a.zarr", shape=(num, width), chunks=(CHUNK_ROWS, width), dtype="float32"
        )
        for i, part in enumerate(parts):
            made[i * CHUNK_ROWS : (i + 1) * CHUNK_ROWS] = part
        return folder / "a.zarr"
    names = [f"c{i}" for i in range(width)]
    schema = pa.schema([(name, pa.float32()) for name in names])
    with pq.ParquetWriter(
        folder / "a.parquet", schema, use_dictionary=False, write_statistics=False
    ) as file:
        for part in parts:
            file.write_table(pa.table(list(part.T.copy()), schema=schema))
    return folder / "a.parquet"


@pytest.mark.parametrize("kind", ["array", "table"])
def test_a_ranks_memory_stays_far_below_the_size_of_its_data(kind, tmp_path) -> None:
    """256 MB in windows of 8 MB: the memory grows by less than 64 MB."""
    where = write(kind, tmp_path)
    (found,) = train_on(1, config_for(tmp_path / "run", None), peak_of, where, kind)
    assert found["total"] == 2 * DATASET_BYTES // ROW_BYTES
    assert found["grew"] < LIMIT_BYTES


def sizes_with_a_copy(ctx: RankContext, where: Path, copies: Path) -> dict[str, Any]:
    """Decode a table into a local copy, and go through it twice; return what memory that took."""
    names = [f"c{i}" for i in range(ROW_BYTES // 4)]
    table(where, features=names[:1], local_copy=copies)  # loads what is loaded once
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    rows = table(where, features=names, local_copy=copies)
    decoding = memory("VmHWM") - before
    loader = ctx.loader(rows, global_batch_size=1024)
    own, total = None, 0
    for batch in ctx.steps(loader, epochs=2):
        total += len(batch)
        own = memory("RssAnon") if own is None else own
    grew, mapped = memory("RssAnon") - own, memory("RssFile")
    return {"total": total, "decoding": decoding, "grew": grew, "mapped": mapped}


def test_a_local_copy_is_only_in_the_page_cache(tmp_path) -> None:
    """To decode 256 MB takes less than 64 MB. A rank that reads all of it maps it, and its own
    memory grows by less than 8 MB."""
    where = write("table", tmp_path)
    config = config_for(tmp_path / "run", None)
    (found,) = train_on(1, config, sizes_with_a_copy, where, tmp_path / "copies")
    assert found["total"] == 2 * DATASET_BYTES // ROW_BYTES
    assert found["decoding"] < LIMIT_BYTES
    assert found["mapped"] > DATASET_BYTES
    assert found["grew"] < 8 * MB


def part(number: int) -> pd.DataFrame:
    """Return 8 MB of noise."""
    values = np.random.default_rng(number).random((CHUNK_ROWS * 4, ROW_BYTES // 4), "float32")
    return pd.DataFrame(values, columns=[f"c{i}" for i in range(values.shape[1])])


def collection(kind: str, num: int) -> LazyDataset:
    """Describe so many partitions or blocks of 8 MB."""
    if kind == "table":
        made: Any = dd.from_map(part, range(num), meta=part(0)[:0])
        return LazyDataset("dask.dataframe.DataFrame", "table", cloudpickle.dumps(made))
    rows, width = CHUNK_ROWS * 4, ROW_BYTES // 8
    made = da.random.default_rng(0).random((rows * num, width), chunks=(rows, width))
    return LazyDataset("dask.array.Array", "arrays", cloudpickle.dumps(made))


def count_peak_from_now() -> int:
    """Return this process's memory."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


@pytest.mark.parametrize("kind", ["array", "table"])
def test_a_preparation_needs_the_memory_of_what_is_computed_at_once(kind, tmp_path) -> None:
    """256 MB in parts of 8 MB: the memory of a worker, and that of who waits, grows by less than
    64 MB."""
    storage, logger = DirectoryStorage(tmp_path / "store"), logging.getLogger("test")
    num = DATASET_BYTES // WINDOW_BYTES
    with own_cluster(1) as (_, client):
        publish_computed(client, storage, "few", collection(kind, 2), logger)  # loads what it needs
        (before,), own = client.run(count_peak_from_now).values(), count_peak_from_now()
        made = publish_computed(client, storage, "all", collection(kind, num), logger)
        (peak,), own_peak = client.run(memory, "VmHWM").values(), memory("VmHWM")
    assert made.num_bytes > 0.8 * DATASET_BYTES
    assert peak - before < LIMIT_BYTES
    assert own_peak - own < LIMIT_BYTES
