"""How fast images in a bucket are read, beside a local disk: a static file server and Ceph, 0
and 20 ms away.

Other libraries' ways run in environments of their own, `$PTD_BENCH_ENVS/<package>/bin/python`,
which `image_envs.py` makes; where there is none, a line says which row is left out, and where
one fails, how often. Each way is a process that stays, so that little but the epochs is
repeated; the dataset, its client, its loader processes and its cache are new in each round.
PTD_BENCH_ROUNDS and PTD_BENCH_IMAGES make it shorter or longer; 5 rounds of 1,500 images are
meant to take under 20 minutes on two quiet cores. PTD_BENCH_WAYS chooses rows by a regular
expression, so that some can have many rounds.
"""

import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from boto3.session import Session
from botocore.config import Config

from prefect_torch_ddp.data.images.listing import write_index
from prefect_torch_ddp.data.images.tar_shards import pack_shards
from tests.benchmarks.beside import rounds, show
from tests.benchmarks.image_servers import Server, proxy, run_filled_ceph, run_nginx
from tests.benchmarks.photos import write_photos

pytestmark = pytest.mark.timeout(7200)
ROUNDS = rounds(5)
NUM_IMAGES = int(os.environ.get("PTD_BENCH_IMAGES", "1500"))
CHOSEN = re.compile(os.environ.get("PTD_BENCH_WAYS", ""))
ENVS = Path(os.environ.get("PTD_BENCH_ENVS", "/nonexistent"))
NUM_CLASSES, NUM_SHARDS = 10, 8
BUCKET, PREFIX, SHARDS = "bucket", "images", "shards"
SLOW_ROUNDS = 2
"""Of what is many times slower than the rest, in which a few per cent say nothing."""
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Route:
    """A row of the table."""

    title: str
    way: str
    env: str = ""
    options: tuple[tuple[str, Any], ...] = ()
    num_images: int = 0
    """How many are read, in one epoch and in few rounds, and the time multiplied; 0: all, in
    two epochs and all rounds."""

    @property
    def python(self) -> Path:
        """The interpreter that has what it needs."""
        return ENVS / self.env / "bin" / "python" if self.env else Path(sys.executable)


LOCAL = Route("ImageFolder, local disk", "local")
ORDER = (
    Route("a new client for each image (dask-pytorch-ddp's way)", "new client each", num_images=32),
    Route("boto3, item by item", "boto3", num_images=400),
    Route("s3torchconnector: S3MapDataset", "S3MapDataset", "s3torchconnector", num_images=400),
    Route("webdataset: streams shards; order only nearly random", "webdataset", "webdataset"),
    Route(
        "s3torchconnector's client, 16 threads, look-ahead", "CRT, look-ahead", "s3torchconnector"
    ),
    Route("S3ImageFolder", "ours"),
    LOCAL,
    Route("S3ImageFolder, cache", "ours", options=(("cache", True),)),
    Route("S3ImageFolder, shards", "ours", options=(("shards", SHARDS),)),
    Route("litdata: its chunks, then its cache", "litdata", "litdata"),
    Route("mosaicml-streaming: its shards, then its cache", "streaming", "mosaicml-streaming"),
)
"""In which they run, the unit in their middle; every second round backwards."""
ROWS = sorted(
    ORDER, key=lambda way: ("local", "ours").index(way.way) if way.way in {"local", "ours"} else 2
)


class Reader:
    """A process that reads in one way."""

    def __init__(self, way: Route, scratch: Path, stack: ExitStack) -> None:
        """Start it."""
        self.way, self.scratch, self.stack = way, scratch, stack
        self.failures: list[str] = []
        self.start()

    def start(self) -> None:
        """Start it, also anew."""
        env = {
            **os.environ,
            "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
            "OMP_NUM_THREADS": "1",
        }
        command = [str(self.way.python), "-m", "tests.benchmarks.read_images", self.way.way]
        self.errors = self.scratch.with_suffix(f".{len(self.failures)}.log")
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with self.errors.open("w") as errors:
            self.process = self.stack.enter_context(
                subprocess.Popen(command, env=env, stderr=errors, **pipes)
            )
        self.stack.callback(self.process.kill)

    def hear(self) -> dict[str, Any]:
        """Wait for its next answer; raises AssertionError where it has none."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"{self.way.title}:\n{self.errors.read_text()[-3000:]}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def read(self, plan: dict[str, Any]) -> dict[str, Any] | None:
        """Have it read; seconds as if it had read all images.

        None: another library's way failed, and is started anew.
        """
        assert self.process.stdin is not None
        keys = (
            plan["keys"][:: len(plan["keys"]) // self.way.num_images or 1]
            if self.way.num_images
            else plan["keys"]
        )
        own = {
            "keys": keys,
            "epochs": 1 if self.way.num_images else 2,
            "scratch": str(self.scratch),
        }
        print(
            json.dumps({**plan, **dict(self.way.options), **own}),
            file=self.process.stdin,
            flush=True,
        )
        try:
            seen = self.hear()
        except AssertionError as error:
            if not self.way.env:
                raise
            self.failures.append(str(error).strip().rpartition("\n")[2][:200])
            self.start()
            self.hear()
            return None
        factor = len(plan["keys"]) / len(keys)
        return {
            "opened": seen["opened"],
            **{name: [value * factor for value in seen[name]] for name in ("epochs", "cpu")},
        }


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Reader]]:
    """Start the processes for all ways that have their environment."""
    home = tmp_path_factory.mktemp("r")
    with ExitStack() as stack:
        ways = [
            way
            for way in ORDER
            if way.python.exists() and (way == LOCAL or CHOSEN.search(way.title))
        ]
        started = [Reader(way, home / f"{number}", stack) for number, way in enumerate(ways)]
        for reader in started:
            reader.hear()
        yield started


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make photos of about 35 kB, in a folder as a bucket has it, and all formats of them;
    return the bucket's."""
    bucket = tmp_path_factory.mktemp("served") / BUCKET
    write_photos(bucket / PREFIX, NUM_IMAGES, NUM_CLASSES)
    # As many shards as make equal work for the loader processes of those who share out shards.
    num_bytes = sum(
        -(-path.stat().st_size // 512) * 512 + 1536 for path in (bucket / PREFIX).rglob("*.jpg")
    )
    shard_bytes = num_bytes // NUM_SHARDS + 2**16
    pack_shards(bucket / PREFIX, bucket / SHARDS, shard_bytes=shard_bytes, shuffle_seed=0)
    for way in ORDER:
        if way.env in {"litdata", "mosaicml-streaming"} and way.python.exists():
            where = [str(bucket / PREFIX), str(bucket / way.env), str(shard_bytes)]
            command = [str(way.python), "-m", "tests.benchmarks.other_formats", way.env, *where]
            subprocess.run(
                command,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                check=True,
                capture_output=True,
                timeout=300,
            )
    return bucket


@pytest.fixture(scope="module", params=["nginx", "ceph"])
def server(
    request: pytest.FixtureRequest, served: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """Serve all of it."""
    with {"nginx": run_nginx, "ceph": run_filled_ceph}[request.param](
        served, tmp_path_factory.mktemp("s")
    ) as running:
        yield running


@pytest.fixture(scope="module")
def tables() -> dict[str, "Seen"]:
    """Keep what was seen at each place."""
    return {}


Seen = dict[str, list[dict[str, Any]]]
"""What was seen of each row, round by round."""


@pytest.mark.parametrize("delay_s", [0.0, 0.02])
def test_epochs(  # noqa: PLR0917 - fixtures
    server: Server,
    delay_s: float,
    served: Path,
    readers: list[Reader],
    tables: dict[str, Seen],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Print each way's epochs in units of the local disk's in the same round, and their CPU; at
    last all places side by side."""
    seen: Seen = {reader.way.title: [] for reader in readers}
    write_index(server.listed(PREFIX), tmp_path)
    with proxy(server.port, delay_s) as url:
        plan = plan_of(server, url, served, tmp_path)
        for number in range(ROUNDS):
            units: dict[str, Any] = {}
            for reader in readers[:: -1 if number % 2 else 1]:
                if (number < SLOW_ROUNDS or not reader.way.num_images) and (
                    result := reader.read(plan)
                ):
                    units[reader.way.title] = result
            for title, result in units.items():
                seen[title].append({**result, "unit": units[LOCAL.title]})
    tables[f"{server.name}, +{1000 * delay_s:.0f} ms"] = seen
    print_place(*list(tables.items())[-1], capsys)
    print_all(tables, capsys)
    with capsys.disabled():
        for reader in filter(lambda reader: reader.failures, readers):
            print(
                f"\nFailed so far: {reader.way.title}: {len(reader.failures)} times, at "
                f"last by {reader.failures[-1]}",
                end="",
            )


def plan_of(server: Server, url: str, served: Path, index: Path) -> dict[str, Any]:
    """Say where everything is."""
    keys = [str(path.relative_to(served)) for path in sorted((served / PREFIX).rglob("*.jpg"))]
    session = Session(
        aws_access_key_id=server.key, aws_secret_access_key=server.secret, region_name="us-east-1"
    )
    client = session.client(
        "s3",
        endpoint_url=url,
        config=Config(signature_version="s3v4", s3={"addressing_style": "path"}),
    )
    shards = sorted(str(path.relative_to(served)) for path in (served / SHARDS).glob("*.tar"))
    urls = [
        client.generate_presigned_url(
            "get_object", {"Bucket": BUCKET, "Key": key}, ExpiresIn=36_000
        )
        for key in shards
    ]
    client.close()
    where = {
        "endpoint_url": url,
        "bucket": BUCKET,
        "prefix": PREFIX,
        "index": str(index),
        "folder": str(served / PREFIX),
    }
    return {**where, "key": server.key, "secret": server.secret, "keys": keys, "shard_urls": urls}


def ratios(results: list[dict[str, Any]], epoch: int) -> list[float]:
    """Return the seconds of an epoch in units of the local disk's in the same round; none where
    it wasn't read."""
    return [
        r["epochs"][epoch] / r["unit"]["epochs"][epoch] for r in results if epoch < len(r["epochs"])
    ]


def cpu_ms(results: list[dict[str, Any]], epoch: int) -> list[float]:
    """Return the client's CPU time of an image beyond that of a local file: ms."""
    beyond = [r["cpu"][epoch] - r["unit"]["cpu"][epoch] for r in results if epoch < len(r["cpu"])]
    return [1000 * seconds / NUM_IMAGES for seconds in beyond]


def cell(values: list[float]) -> str:
    """Return the middle one."""
    return f"{statistics.median(values):.2f}" if values else "-"


def spread(values: list[float]) -> str:
    """Return the middle one, the smallest and the largest."""
    return f"{cell(values)} ({min(values):.2f} to {max(values):.2f})" if values else "-"


def print_place(where: str, seen: Seen, capsys: pytest.CaptureFixture[str]) -> None:
    """Print what was seen at one place, with its spread."""
    head = (
        where,
        "first epoch, times local disk",
        "second",
        "CPU beyond local, ms an image: first",
        "second",
        "opened s",
        "first s",
    )
    rows = [
        (
            row.title,
            *(spread(values(results, epoch)) for values in (ratios, cpu_ms) for epoch in (0, 1)),
            cell([result["opened"] for result in results]),
            cell([result["epochs"][0] for result in results]),
        )
        for row in ROWS
        if (results := seen.get(row.title))
    ]
    show(capsys, head, rows)


def print_all(tables: dict[str, Seen], capsys: pytest.CaptureFixture[str]) -> None:
    """Print the places so far side by side: times, then CPU; and what is left out."""
    found = [row for row in ROWS if all(row.title in seen for seen in tables.values())]
    for what, values in (
        ("first / second epoch, times local disk", ratios),
        ("CPU beyond local, ms an image", cpu_ms),
    ):
        show(capsys, (what, *tables), [(row.title, *_both(row, values, tables)) for row in found])
    with capsys.disabled():
        for row in ROWS:
            if not row.python.exists():
                print(
                    f"\nLeft out: {row.title}: there is no $PTD_BENCH_ENVS/{row.env}/bin/python.",
                    end="",
                )


def _both(
    row: Route, values: Callable[[list[dict[str, Any]], int], list[float]], tables: dict[str, Seen]
) -> Iterator[str]:
    for seen in tables.values():
        yield " / ".join(
            cell(values(seen[row.title], epoch)) for epoch in range(1 if row.num_images else 2)
        )
