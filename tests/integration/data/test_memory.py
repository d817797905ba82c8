"""A rank holds two windows of a table or an array, however large that is."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prefect_torch_ddp import RankContext
from prefect_torch_ddp.data import array, table
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
