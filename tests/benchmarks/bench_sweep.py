"""What a sweep's trials cost besides their training, beside plain tasks of Prefect that take as
long, and what making its page takes."""

import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed import LocalCluster
from prefect import flow, task
from prefect_dask import DaskTaskRunner

from prefect_torch_ddp import ddp_task, sweep_report
from prefect_torch_ddp.tasks.clusters.local_cluster import local_cluster
from tests.benchmarks.beside import rounds, show
from tests.benchmarks.sweep_trials import idle, trial

pytestmark = [pytest.mark.timeout(1800), pytest.mark.usefixtures("on_cpus", "prefect_api")]
NUM_WORKERS = 2
NUM_TRIALS = int(os.environ.get("PTD_BENCH_TRIALS", "100"))


@pytest.fixture(scope="module")
def cluster(on_cpus: None) -> Iterator[LocalCluster]:
    """Run the cluster that `train_flow` makes."""
    with local_cluster(n_workers=NUM_WORKERS) as cluster:
        yield cluster


def test_trials_of_a_second(tmp_path: Path, cluster: LocalCluster) -> None:
    """Print the worker's seconds of a trial beyond those between its first and last step."""
    fit: Any = ddp_task(
        world_size=1, storage=str(tmp_path), run_key="lr-{lr}", persist_result=True
    )(trial)

    runner: Any = DaskTaskRunner(address=cluster.scheduler_address)

    @flow(task_runner=runner)
    def sweep(rates: list[float]) -> tuple[float, float, list[float]]:
        began = time.monotonic()
        trained_s = fit.map(rates).result()
        ended = time.monotonic()
        sweep_report(fit, "loss", mode="min")
        return ended - began, time.monotonic() - ended, trained_s

    @flow(task_runner=runner)
    def plain(rates: list[float]) -> tuple[float, float, list[float]]:
        began = time.monotonic()
        waited_s = task(persist_result=True)(idle).map(rates).result()
        return time.monotonic() - began, 0.0, waited_s

    rows: list[list[str]] = []
    beyond_s: dict[str, list[float]] = {"ddp_task": [], "task of Prefect": []}
    first: list[float] = [0.5, 0.25]  # what only a cluster's first trials cost
    sweep(first)
    plain(first)
    for number in range(rounds(1)):
        rates = [0.1 + (number * NUM_TRIALS + i) / 1e6 for i in range(NUM_TRIALS)]
        for name, measured in zip(beyond_s, (sweep, plain), strict=True):
            whole_s, page_s, trained_s = measured(rates)
            beyond_s[name].append((NUM_WORKERS * whole_s - sum(trained_s)) / NUM_TRIALS)
            median_s = statistics.median(trained_s)
            cells = whole_s, median_s, beyond_s[name][-1], whole_s / NUM_TRIALS, page_s
            rows.append([name, str(NUM_TRIALS), *(f"{each:.2f}" for each in cells)])
    show("each a | trials | whole s | training s | beyond it s | s for each | page s", rows)
    trials, tasks = (f"{statistics.median(each):.2f} s" for each in beyond_s.values())
    print(f"\nA trial takes {trials} of its worker beyond its second, a plain task {tasks}.")
