"""Row groups of a table in a bucket: read by the ranges of the package's S3 client, as the loader
does, compared with pyarrow's own S3 file system. PTD_BENCH_ROUNDS makes it shorter or longer."""

import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import pytest

from prefect_torch_ddp.data import table
from prefect_torch_ddp.storage.s3.storage import S3Storage
from tests.benchmarks.beside import median_and_half, rounds, show
from tests.benchmarks.image_servers import SECRETS_OF_NOBODY, Served, proxy, run_nginx
from tests.benchmarks.table_parts import FILE_ROWS, rows_of

pytestmark = pytest.mark.timeout(600)
ROUNDS = rounds(5)
NUM_FILES, GROUP_ROWS, NUM_THREADS = 4, 16_384, 4


def _by_us(rows: Any, group: int) -> int:
    return sum(part.num_rows for _, part in rows.rows._batches(group))


def _by_pyarrow(system: Any, files: list[Any], group: int) -> int:
    number, within = divmod(group, FILE_ROWS // GROUP_ROWS)
    with system.open_input_file(f"bucket/{number:04d}.parquet") as file:
        opened = pq.ParquetFile(file, metadata=files[number], pre_buffer=True)
        return int(opened.read_row_group(within, use_threads=False).num_rows)


@pytest.mark.parametrize("delay_s", [0, 0.02])
def test_table_in_a_bucket_beside_pyarrows_file_system(delay_s: float, tmp_path: Path) -> None:
    """Print rows/s and processor time of each, four threads, turn about, footers read before."""
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    for number in range(NUM_FILES):
        part = pa.Table.from_pandas(rows_of(number), preserve_index=False)
        options: dict[str, Any] = {"row_group_size": GROUP_ROWS, "use_dictionary": False}
        pq.write_table(part, bucket / f"{number:04d}.parquet", compression="zstd", **options)
    key, secret = SECRETS_OF_NOBODY
    with run_nginx(bucket, tmp_path) as server, proxy(server.port, delay_s) as url:
        keys: Any = {"access_key_id": key, "secret_access_key": secret}
        s3 = S3Storage("bucket", endpoint_url=url, region="us-east-1", **keys)
        system = pyarrow.fs.S3FileSystem(
            access_key=key, secret_key=secret, endpoint_override=url, region="us-east-1"
        )
        files = [pq.read_metadata(path) for path in sorted(bucket.iterdir())]
        ways = {
            "pyarrow's S3FileSystem": partial(_by_pyarrow, system, files),
            "table()": partial(_by_us, table(Served(bucket, s3))),
        }
        seen: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        groups = [*range(NUM_FILES * FILE_ROWS // GROUP_ROWS)]
        random.Random(0).shuffle(groups)
        for number in range(ROUNDS + 1):
            for name in list(ways)[:: 1 if number % 2 else -1]:
                began_s, used_s = time.perf_counter(), time.process_time()
                with ThreadPoolExecutor(NUM_THREADS) as pool:
                    assert sum(pool.map(ways[name], groups)) == NUM_FILES * FILE_ROWS
                passed = time.perf_counter() - began_s, time.process_time() - used_s
                seen[name].append(passed)
    first, shown = seen["pyarrow's S3FileSystem"][1:], []
    for name, times in seen.items():
        pairs = list(zip(times[1:], first, strict=True))
        pace = NUM_FILES * FILE_ROWS / statistics.median(own for (own, _), _ in pairs)
        ratios = median_and_half([its / own for (own, _), (its, _) in pairs])
        cpu_s = statistics.median(own for (_, own), _ in pairs)
        shown.append((name, f"{pace:.0f}", *ratios, f"{cpu_s:.2f}"))
    head = f"S3 +{delay_s * 1000:.0f} ms | rows/s | times pyarrow's | half | processor s"
    show(head, shown)
