"""How fast `array()` gives shuffled batches, compared with plain zarr that only reads the same
chunks. PTD_BENCH_MB and PTD_BENCH_ROUNDS make it shorter or longer."""

import os
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from zarr.storage import FsspecStore, LocalStore

from prefect_torch_ddp.data import array
from prefect_torch_ddp.data.loader import RankLoader
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.storage.s3.storage import S3Storage
from tests.benchmarks.beside import median_and_half, rounds, show
from tests.benchmarks.image_servers import SECRETS_OF_NOBODY, Served, proxy, run_nginx

pytestmark = pytest.mark.timeout(1800)
ROUNDS = rounds(5)
NUM_MB = int(os.environ.get("PTD_BENCH_MB", "512"))
MB = 2**20
# Shape without the first dimension, chunks of 4 MB, how samples are cut, batch size.
KINDS: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any], int]] = {
    "rows of 1 kB": ((256,), (4096, 256), {}, 1024),
    "fields of 64 kB": ((128, 128), (64, 128, 128), {}, 64),
    "windows of 6, patches of 64 by 64": (
        (256, 256),
        (64, 128, 128),
        {"window": {"dim_0": 6}, "patch": {"dim_1": 64, "dim_2": 64}},
        64,
    ),
}
OURS, REFERENCE, BY_HAND = "array()", "plain zarr, chunks only", "plain zarr, stacked by hand"


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write arrays of noisy fields, which zstd makes half as large, as a bucket has them."""
    where = tmp_path_factory.mktemp("arrays") / "bucket"
    generator = np.random.default_rng(0)
    for kind, (shape, chunks, _, _) in KINDS.items():
        num = NUM_MB * MB // (4 * int(np.prod(shape)))
        made = zarr.create_array(
            where / name_of(kind), shape=(num, *shape), chunks=chunks, dtype="float32"
        )
        for start in range(0, num, chunks[0]):
            part = generator.standard_normal((min(chunks[0], num - start), *shape), "float32")
            made[start : start + len(part)] = np.round(part * 64) / 64
    return where


def name_of(kind: str) -> str:
    """Return the name of an array."""
    return f"{kind.partition(' ')[0]}.zarr"


def boxes_of(loader: RankLoader, samples: Any) -> list[list[tuple[tuple[slice, ...], Any]]]:
    """Return what the epoch reads, window by window: boxes, each with its piece."""
    reader: Any = loader._loader.dataset
    pieces = samples.samples
    (variable,) = pieces.found.variables
    windows = []
    number = 0
    while (found := reader._order.pieces(0, number)) is not None:
        blocks = [pieces.pieces[each].blocks for each in found]
        axes = [
            {
                axis.name: axis.positions(block)
                for axis, block in zip(pieces.axes, each, strict=True)
            }
            for each in blocks
        ]
        windows.append(
            [(tuple(each.get(dim, slice(None)) for dim in variable.dims), each) for each in axes]
        )
        number += 1
    return windows


def by_us(loader: RankLoader) -> int:
    """Go through an epoch; return the number of samples."""
    return sum(len(batch) for batch in loader)


def chunks_only(opened: Any, windows: Any) -> int:
    """Read the same boxes in the same order, and do nothing with them."""
    return sum(opened[box].shape[0] for window in windows for box, _ in window)


def by_hand(opened: Any, windows: Any, cut: dict[str, Any], size: int) -> int:
    """Shuffle the samples of each box, and stack batches of them."""
    extents = [*cut.get("window", {"dim_0": 1}).values(), *cut.get("patch", {}).values()]
    steps = [1, *cut.get("patch", {}).values()]
    num = 0
    for window in windows:
        for box, _ in window:
            values = opened[box]
            starts = [
                range(0, length - extent + 1, step)
                for length, extent, step in zip(values.shape, extents, steps, strict=False)
            ]
            grid = np.stack(np.meshgrid(*starts, indexing="ij"), -1).reshape(-1, len(starts))
            grid = grid[np.random.default_rng(0).permutation(len(grid))]
            for begin in range(0, len(grid), size):
                some = grid[begin : begin + size].tolist()
                samples = [
                    values[tuple(slice(a, a + n) for a, n in zip(at, extents, strict=True))]
                    for at in some
                ]
                num += len(torch.from_numpy(np.stack(samples)))
    return num


def ways_to(kind: str, where: str, bucket: Path, url: str | None) -> dict[str, Callable[[], int]]:
    """Return what goes through an epoch."""
    _, _, cut, size = KINDS[kind]
    storage: Any
    store: Any
    if url is None:
        storage = DirectoryStorage(bucket)
        store = LocalStore(bucket / where, read_only=True)
    else:
        key, secret = SECRETS_OF_NOBODY
        keys: Any = {"access_key_id": key, "secret_access_key": secret}
        s3 = S3Storage("bucket", endpoint_url=url, region="us-east-1", **keys)
        storage = Served(bucket, s3)
        options = {"key": key, "secret": secret, "endpoint_url": url}
        store = FsspecStore.from_url(
            f"s3://bucket/{where}", storage_options=options, read_only=True
        )
    samples = array(where, storage=storage, **cut)
    # At least four windows: a single one would stay in memory from epoch to epoch.
    samples.shuffle_buffer = min(samples.shuffle_buffer, len(samples) // 4)
    loader = RankLoader(samples, global_batch_size=size, rank=0, world_size=1)
    opened = zarr.open_array(store, mode="r", zarr_format=3)
    windows = boxes_of(loader, samples)
    return {
        REFERENCE: lambda: chunks_only(opened, windows),
        BY_HAND: lambda: by_hand(opened, windows, cut, size),
        OURS: lambda: by_us(loader),
    }


@pytest.mark.parametrize("delay_s", [None, 0.0, 0.02], ids=["directory", "s3", "s3-20ms"])
@pytest.mark.parametrize("kind", KINDS)
def test_array_beside_plain_zarr(
    kind: str, delay_s: float | None, bucket: Path, tmp_path: Path
) -> None:
    """Print MB/s of values that are read, of each way in turn, and its ratio to plain zarr."""
    with ExitStack() as stack:
        url = None
        if delay_s is not None:
            server = stack.enter_context(run_nginx(bucket, tmp_path))
            url = stack.enter_context(proxy(server.port, delay_s))
        ways = ways_to(kind, name_of(kind), bucket, url)
        seen: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for number in range(ROUNDS + 1):
            for name in list(ways)[:: 1 if number % 2 else -1]:
                began_s, began_cpu_s = time.perf_counter(), time.process_time()
                ways[name]()
                seen[name].append(
                    (time.perf_counter() - began_s, time.process_time() - began_cpu_s)
                )
    rows = []
    for name, measured in seen.items():
        pairs = list(zip(measured[1:], seen[REFERENCE][1:], strict=True))
        ratios, of_processor = ([its[i] / own[i] for own, its in pairs] for i in range(2))
        pace = f"{NUM_MB / statistics.median(wall_s for wall_s, _ in measured[1:]):.0f}"
        by_processor = f"{statistics.median(of_processor):.3f}"
        rows.append((name, pace, *median_and_half(ratios), by_processor))
    where = "directory" if delay_s is None else f"S3, +{1000 * delay_s:.0f} ms"
    show(f"{kind}, {where} | MB/s | times plain zarr's | half | by processor time", rows)
