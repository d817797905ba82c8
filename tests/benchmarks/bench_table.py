"""A training on a Parquet table, compared with the same training on tensors in memory, and the
preparation of one, compared with Dask's own. PTD_BENCH_ROWS and PTD_BENCH_ROUNDS make it shorter
or longer."""

import logging
import os
import resource
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import cloudpickle
import dask.dataframe as dd
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from distributed import Client
from torch.utils.data import TensorDataset

from prefect_torch_ddp.data import table
from prefect_torch_ddp.data.loader import RankLoader
from prefect_torch_ddp.protocol.prepared import LazyDataset
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.storage.s3.storage import S3Storage
from prefect_torch_ddp.tasks.gangs.computed import publish_computed
from tests.benchmarks import peers
from tests.benchmarks.beside import median_and_half, rounds, show
from tests.benchmarks.image_servers import SECRETS_OF_NOBODY, Served, proxy, run_nginx
from tests.benchmarks.peers.environments import make, python_of
from tests.benchmarks.peers.runs import AS_A_USER
from tests.benchmarks.table_parts import FEATURES, FILE_ROWS, META, rows_of
from tests.benchmarks.table_training import Training
from tests.support.separate_cluster import end
from tests.support.waiting import HANG_S

pytestmark = pytest.mark.timeout(1800)
ROUNDS = rounds(5)
GROUP_ROWS = 16_384
NUM_ROWS = int(os.environ.get("PTD_BENCH_ROWS", str(2**20)))
STEPS_A_ROUND = 400


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give rows of 64 float32 columns, by zstd."""
    where = tmp_path_factory.mktemp("table") / "bucket"
    where.mkdir()
    for i in range(NUM_ROWS // FILE_ROWS):
        rows = pa.Table.from_pandas(rows_of(i), preserve_index=False)
        options: dict[str, Any] = {"row_group_size": GROUP_ROWS, "use_dictionary": False}
        pq.write_table(rows, where / f"{i:04d}.parquet", compression="zstd", **options)
    return where


def in_memory(folder: Path) -> TensorDataset:
    """Return the same rows as tensors."""
    read = pq.read_table(folder)
    x = np.stack([read[name].to_numpy() for name in FEATURES], axis=1)
    return TensorDataset(torch.from_numpy(x), torch.from_numpy(read["target"].to_numpy().copy()))


def copied(folder: Path) -> Any:
    """Return the same rows in a local copy."""
    where = folder.parent / "copies"
    return table(folder, features=FEATURES, target="target", local_copy=where)


def batches_of(dataset: Any, size: int) -> Iterator[Any]:
    """Yield the batches of epoch after epoch."""
    loader = RankLoader(dataset, global_batch_size=size, rank=0, world_size=1, seed=1)
    for epoch in count():
        for batch, _ in loader.lockstep(epoch):
            yield batch


def by_hand(client: Client, folder: Path, size: int) -> Iterator[Any]:
    """Yield batches as people write it: a Dask future for each partition, whose rows the rank
    shuffles."""
    frame = dd.read_parquet(folder)
    while True:
        for number in torch.randperm(frame.npartitions).tolist():
            part = client.compute(frame.partitions[number]).result()
            x = torch.from_numpy(part[FEATURES].to_numpy(copy=True))
            y = torch.from_numpy(part["target"].to_numpy(copy=True))
            for some in torch.randperm(len(x)).split(size):
                yield x[some], y[some]


class WithRay:
    """The same training with Ray Data, in another process."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def run(self, num_steps: int) -> float:
        """Return the seconds of so many steps."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(num_steps, file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith("seconds "):
                return float(line.split()[1])
        raise AssertionError(self._process.wait())

    def close(self) -> None:
        """End it."""
        self._process.communicate(timeout=HANG_S)


@contextmanager
def with_ray(folder: Path, *numbers: int) -> Iterator[WithRay]:
    """Start the training under the interpreter of the benchmark of peers."""
    make("ray")
    script = Path(peers.__file__).with_name("table_with_ray.py")
    with subprocess.Popen(
        [str(python_of("ray")), str(script), str(folder), *map(str, numbers)],
        env={**os.environ, **AS_A_USER},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield WithRay(process)
        finally:
            if process.poll() is None:
                end(psutil.Process(process.pid))


def turn_about(
    ways: Mapping[str, Training | WithRay], batch_size: int, num_steps: int, head: str
) -> None:
    """Print rows/s of each training, and its ratio to the first one."""
    for training in ways.values():
        training.run(20)
    seen: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(ROUNDS):
        for name in list(ways)[:: 1 if number % 2 else -1]:
            seen[name].append(ways[name].run(num_steps))
    shown = []
    for name, seconds in seen.items():
        ways[name].close()
        pairs = zip(seconds, seen[next(iter(ways))], strict=True)
        step_ms = sorted(seconds)[len(seconds) // 2] / num_steps * 1000
        ratios = median_and_half([theirs / ours for ours, theirs in pairs])
        shown.append((name, f"{step_ms:.2f}", f"{batch_size / step_ms * 1000:.0f}", *ratios))
    show(f"{head} | step ms | rows/s | times {next(iter(ways))}'s | half", shown)


@pytest.mark.parametrize(("batch_size", "hidden"), [(256, 512), (1024, 512), (1024, 1536)])
def test_table_beside_tensors_in_memory(folder: Path, batch_size: int, hidden: int) -> None:
    """Print rows/s of each, turn about; the ratio to tensors of a table that is read in windows,
    and of one in a local copy, whose rows are all shuffled as the tensors are."""
    torch.set_num_threads(1)
    rows = table(folder, features=FEATURES, target="target")
    ways = {
        "tensors in memory": Training(batches_of(in_memory(folder), batch_size), hidden),
        "table": Training(batches_of(rows, batch_size), hidden),
        "table, local copy": Training(batches_of(copied(folder), batch_size), hidden),
    }
    head = f"batches of {batch_size}, {hidden} hidden"
    turn_about(ways, batch_size, STEPS_A_ROUND, head)


def test_table_in_a_bucket_and_by_hand(folder: Path, client: Client, tmp_path: Path) -> None:
    """Print rows/s of a table on a disk, in a bucket 20 ms away, and of a Dask future for each
    partition. A round has the steps of one partition."""
    torch.set_num_threads(1)
    size, hidden = 256, 512
    key, secret = SECRETS_OF_NOBODY
    with run_nginx(folder, tmp_path) as server, proxy(server.port, 0.02) as url:
        keys: Any = {"access_key_id": key, "secret_access_key": secret}
        s3 = S3Storage("bucket", endpoint_url=url, region="us-east-1", **keys)
        options: Any = {"features": FEATURES, "target": "target"}
        ways = {
            "table, directory": batches_of(table(folder, **options), size),
            "table, S3 +20 ms": batches_of(table(Served(folder, s3), **options), size),
            "a Dask future per partition": by_hand(client, folder, size),
        }
        trainings = {name: Training(batches, hidden) for name, batches in ways.items()}
        turn_about(trainings, size, FILE_ROWS // size, f"batches of {size}, {hidden} hidden")


@pytest.mark.parametrize("shuffled_rows", [0, 4 * GROUP_ROWS])
def test_table_beside_ray_data(folder: Path, shuffled_rows: int) -> None:
    """Print rows/s of a table and of Ray Data's iterator on the same files, in their order or with
    a local shuffle buffer."""
    torch.set_num_threads(1)
    size, hidden = 256, 512
    rows = table(folder, features=FEATURES, target="target")
    with with_ray(folder, size, hidden, shuffled_rows) as ray:
        ways: dict[str, Training | WithRay] = {
            "table": Training(batches_of(rows, size), hidden),
            f"Ray Data, {shuffled_rows} rows shuffled": ray,
        }
        turn_about(ways, size, STEPS_A_ROUND, f"batches of {size}, {hidden} hidden")


def test_table_prepared_beside_to_parquet(client: Client, tmp_path: Path) -> None:
    """Print rows/s of two workers that make and write a table, as `prepare` has it done and by
    Dask's `to_parquet`, in turn."""
    frame = dd.from_map(rows_of, range(NUM_ROWS // FILE_ROWS), meta=META)
    logger, storage = logging.getLogger(__name__), DirectoryStorage(tmp_path / "ours")

    def by_us(number: int) -> None:
        lazy = LazyDataset("dask.dataframe.DataFrame", "table", cloudpickle.dumps(frame))
        publish_computed(client, storage, f"d{number}", lazy, logger)

    def by_dask(number: int) -> None:
        where = tmp_path / f"theirs{number}"
        frame.to_parquet(where, compression="zstd", write_index=False)

    ways = {"to_parquet": by_dask, "prepare": by_us}
    seen: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(ROUNDS + 1):
        for name in list(ways)[:: 1 if number % 2 else -1]:
            began_s = time.perf_counter()
            ways[name](number)
            seen[name].append(time.perf_counter() - began_s)
        shutil.rmtree(tmp_path / f"theirs{number}")
        shutil.rmtree(tmp_path / "ours")
    rows = []
    for name, seconds in seen.items():
        ratios = [its / own for own, its in zip(seconds[1:], seen["to_parquet"][1:], strict=True)]
        pace = NUM_ROWS / statistics.median(seconds[1:])
        rows.append((name, f"{pace:.0f}", *median_and_half(ratios)))
    show(f"{NUM_ROWS} rows, two workers | rows/s | times to_parquet's | half", rows)


def test_table_first_batch_resume_and_memory(folder: Path) -> None:
    """Print the time to a first batch, at an epoch's start and in its middle, rows/s of a pass
    that does nothing else, and the most memory that this takes in a process."""
    _show_of_a_process(_measured, folder)


def test_local_copy_first_batch_and_memory(folder: Path) -> None:
    """Print the time to decode a copy, to open it and to its first batch, rows/s of a pass that
    does nothing else, and how much of a process's own memory each takes."""
    shutil.rmtree(folder.parent / "copies", ignore_errors=True)
    _show_of_a_process(_measured_of_a_copy, folder)


def _show_of_a_process(measured: Callable[[Path], str], folder: Path) -> None:
    """Show what is measured in a process of its own."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        os.write(writer, measured(folder).encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as said:
        show("what | value", [tuple(line.split("|")) for line in said.read().splitlines()])


def _own_bytes() -> int:
    memory = psutil.Process().memory_info()
    return int(memory.rss - memory.shared)


def _measured_of_a_copy(folder: Path) -> str:
    lines = []

    def note(what: str, began_s: float) -> None:
        lines.append(f"{what}|{(time.perf_counter() - began_s) * 1000:.0f} ms")

    before = psutil.Process().memory_info().rss
    began_s = time.perf_counter()
    rows = copied(folder)
    note(f"table() of {len(rows)} rows, which decodes", began_s)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    lines.append(f"memory added at most|{peak / 1e6:.0f} MB")
    began_s = time.perf_counter()
    rows = copied(folder)
    note("table() with the copy there", began_s)
    before = _own_bytes()
    once_s = _first_batch_s(rows, 0, 0)
    loader = RankLoader(rows, global_batch_size=1024, rank=0, world_size=1)
    began_s = time.perf_counter()
    for _ in loader.lockstep(0):
        pass
    pace = len(rows) / (time.perf_counter() - began_s)
    lines.append(f"a pass that does nothing else|{pace:.0f} rows/s")
    lines.append(f"own memory added by the passes|{(_own_bytes() - before) / 1e6:.0f} MB")
    return "\n".join([*lines, *_first_batches(rows, once_s)])


def _measured(folder: Path) -> str:
    before = psutil.Process().memory_info().rss
    began_s = time.perf_counter()
    rows = table(folder, features=FEATURES, target="target")
    opened_s = time.perf_counter() - began_s
    once_s = _first_batch_s(rows, 0, 0)
    loader = RankLoader(rows, global_batch_size=1024, rank=0, world_size=1)
    began_s = time.perf_counter()
    for _ in loader.lockstep(0):
        pass
    pace = len(rows) / (time.perf_counter() - began_s)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    lines = [
        f"table() of {len(rows)} rows|{opened_s * 1000:.0f} ms",
        f"a pass that does nothing else|{pace:.0f} rows/s",
        f"memory added at most|{peak / 1e6:.0f} MB",
        *_first_batches(rows, once_s),
    ]
    return "\n".join(lines)


def _first_batch_s(rows: Any, epoch: int, where: float) -> float:
    """Return the seconds to the first batch from a place of an epoch on, as a share of it."""
    loader = RankLoader(rows, global_batch_size=1024, rank=0, world_size=1)
    began_s = time.perf_counter()
    steps: Any = loader.lockstep(epoch, int(where * len(loader)))
    next(iter(steps))
    taken_s = time.perf_counter() - began_s
    steps.close()
    return taken_s


def _first_batches(rows: Any, once_s: float) -> list[str]:
    """Measure the first batch of an epoch, and the first one after a resume in its middle.

    They take turns, after the first one in the process (`once_s`), which also pays for what is
    only done once. Each resume is at another place, since its distance from the start of a window
    may matter.
    """
    at_start: list[float] = []
    resumed: list[float] = []
    for number in range(ROUNDS):
        where = (number + 0.5) / ROUNDS
        for is_resumed in (False, True)[:: 1 if number % 2 else -1]:
            seen = resumed if is_resumed else at_start
            seen.append(_first_batch_s(rows, number, where if is_resumed else 0))
    more_s = [after - before for before, after in zip(at_start, resumed, strict=True)]
    return [
        f"first batch in the process|{once_s * 1000:.0f} ms",
        f"first batch of an epoch|{statistics.median(at_start) * 1000:.0f} ms",
        f"first batch after a resume in its middle|{statistics.median(resumed) * 1000:.0f} ms",
        f"a resume takes longer by|{statistics.median(more_s) * 1000:.0f} ms",
        f"at most by|{max(more_s) * 1000:.0f} ms",
    ]
