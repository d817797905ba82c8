"""How fast steps are once a training runs, beside torchrun with the same code; and what Dask and the seats burn meanwhile."""

import json
import re
import statistics
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from distributed import Client

from prefect_torch_ddp import run_gang
from prefect_torch_ddp.rank.config import CheckpointPolicy, RankConfig
from prefect_torch_ddp.storage.locate import storage_from_uri
from prefect_torch_ddp.tasks.cluster import local_cluster
from prefect_torch_ddp.tasks.run import RUN_WITH_CONTEXT
from tests.benchmarks.beside import show, torchrun
from tests.workloads import plain, steady

pytestmark = pytest.mark.timeout(900)
ROUNDS = 9
WORKS = ((128, 300), (256, 150), (768, 60))
"""Rows per rank and step, and steps: of about 5, 10 and 25 ms on a machine of 2026."""
NAMES = ("torchrun", "run_gang", "run_gang with RankContext")


def by_torchrun() -> list[float]:
    """Return the seconds per step of each work."""
    _, printed, _ = torchrun(Path(steady.__file__), json.dumps(WORKS))
    found = re.search(r"paces (.*)", printed)
    assert found is not None, printed
    paces: list[float] = json.loads(found[1])
    return paces


def by_gang(client: Client) -> list[float]:
    """Return the same of a plain function."""
    paces: list[float] = run_gang(client, steady.plain, args=(WORKS,), world_size=2)[0]
    return paces


def by_context(client: Client, folder: Path) -> list[float]:
    """Return the same of a function that uses the RankContext as a workload does; no checkpoint falls due."""
    config = RankConfig(
        run_id=f"bench-{uuid.uuid4().hex[:8]}",
        attempt=1,
        stage="task",
        storage=storage_from_uri(str(folder)),
        checkpoint=CheckpointPolicy(every_s=None),
    )
    paces: list[float] = run_gang(client, RUN_WITH_CONTEXT, args=(config, steady.with_context, (WORKS,)), world_size=2)[0]
    return paces


def cores_of_dask(measure: Callable[[], object]) -> float:
    """Return how many cores this process with client and scheduler, the nannies and the workers take meanwhile."""
    cluster = [process for process in psutil.Process().children(recursive=True) if not process.name().startswith("ddp-rank")]
    processes = [psutil.Process(), *cluster]

    def seconds() -> float:
        return sum(process.cpu_times().user + process.cpu_times().system for process in processes)

    before, began = seconds(), time.monotonic()
    measure()
    return (seconds() - before) / (time.monotonic() - began)


def test_steady_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Print the table of docs/performance.md: medians over interleaved rounds."""
    seen: dict[str, list[list[float]]] = {name: [] for name in NAMES}
    cores: list[float] = []
    with local_cluster(n_workers=2) as cluster, Client(cluster) as client:
        run_gang(client, plain.sum_of_ones, world_size=2)
        for _ in range(ROUNDS):
            seen["torchrun"].append(by_torchrun())
            cores.append(cores_of_dask(lambda: seen["run_gang"].append(by_gang(client))))
            seen["run_gang with RankContext"].append(by_context(client, tmp_path))
    rows = []
    for name in NAMES:
        for work in range(len(WORKS)):
            paces = [round_[work] * 1000 for round_ in seen[name]]
            reference = statistics.median(round_[work] * 1000 for round_ in seen["torchrun"])
            median = statistics.median(paces)
            rows.append((f"{WORKS[work][0]} rows: {name}", f"{median:.2f}", f"{max(paces):.2f}", f"{reference / median:.3f}"))
    rows.sort(key=lambda row: int(row[0].partition(" ")[0]))
    show(capsys, ("steps of", "median ms", "worst ms", "throughput, times torchrun's"), rows)
    with capsys.disabled():
        print(f"\nDask's processes and the caller take {statistics.median(cores):.3f} cores while a gang trains.")
