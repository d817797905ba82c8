"""How long a million points take to reach a tracker, and how soon a tracker has a checkpoint."""

import json
import statistics
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from prefect_torch_ddp.checkpoint.keys import manifest_key
from prefect_torch_ddp.checkpoint.manifest import Manifest
from prefect_torch_ddp.records.log import RecordLog
from prefect_torch_ddp.records.run_record import RunRecord, write_run_record
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.tracking.trackers.follow import follow_run
from prefect_torch_ddp.tracking.trackers.sync import Synced
from prefect_torch_ddp.tracking.trackers.tensorboard_tracker import TensorboardTracker
from tests.benchmarks.beside import rounds, show
from tests.support.mlflow_server import MlflowServer, mlflow_in

pytestmark = pytest.mark.timeout(1800)
RUN = "calm-otter-12345678"
NUM_STEPS, NUM_METRICS = 100_000, 10
ROUNDS = rounds(5)
SYNC = """
import resource, sys, time
from prefect_torch_ddp.tracking.runs import storage_of
from prefect_torch_ddp.tracking.trackers.known import open_tracker
from prefect_torch_ddp.tracking.trackers.sync import sync_run
storage = storage_of(sys.argv[2])
tracker = open_tracker(sys.argv[1], storage)
began = time.perf_counter()
done = sync_run(storage, sys.argv[3], tracker)
wall_s, own_s = time.perf_counter() - began, time.process_time()
started = resource.getrusage(resource.RUSAGE_CHILDREN)
print(done.num_sent, wall_s, own_s, started.ru_utime + started.ru_stime)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    """Run MLflow's server, with SQLite."""
    with mlflow_in(tmp_path_factory.mktemp("mlflow")) as found:
        yield found


def begin(storage: DirectoryStorage, state: str = "training") -> None:
    """Write the run's record."""
    about = {"experiment": "bench", "workload": "w", "storage": storage.uri}
    write_run_record(storage, RunRecord(run_id=RUN, began=datetime.now(UTC), state=state, **about))


def report(storage: DirectoryStorage, steps: range, num_metrics: int, attempt: int = 1) -> None:
    """Write what a rank reports."""
    log = RecordLog(storage, RUN, "metrics", rank=0, attempt=attempt)
    for step in steps:
        metrics = {f"metric_{i}": 1 / (step + i) for i in range(num_metrics)}
        about = {"step": step, "epoch": 1, "rank": 0, "attempt": attempt, "time": time.time()}
        log.append({**about, "num_samples": 32, "metrics": metrics})
    log.close()


def test_a_million_points(server: MlflowServer, tmp_path: Path) -> None:
    """Print the seconds of a first sync by each tracker, in a process that has loaded it, and the
    processor time of that process and of those that it starts; MLflow's server isn't among them."""
    storage = DirectoryStorage(tmp_path)
    begin(storage, "completed")
    report(storage, range(1, NUM_STEPS + 1), NUM_METRICS)
    rows = []
    for name in ("tensorboard", "wandb", "mlflow"):
        told = server.run("-c", SYNC, name, str(tmp_path), RUN).split()
        assert int(told[0]) == NUM_STEPS * NUM_METRICS
        rows.append((name, *(f"{float(each):.1f}" for each in told[1:])))
    show("a million points to | s | processor time s | of its own processes s", rows)


def test_lag(server: MlflowServer, tmp_path: Path) -> None:
    """Print how long after the commit of a checkpoint a tracker has the steps before it, in
    TensorBoard's files and on MLflow's server."""
    rows = []
    for follow, num_steps in ((in_tensorboard, 1000), (in_mlflow, 100), (in_mlflow, 1000)):
        storage = DirectoryStorage(tmp_path / f"{follow.__name__}-{num_steps}")
        begin(storage)
        with follow(server, storage) as newest:
            lags = [_lag(storage, each, num_steps, newest) for each in range(1, 2 * ROUNDS + 1)]
        name = f"{num_steps * NUM_METRICS:,} values {follow.__name__}"
        rows.append((name, f"{statistics.median(lags):.1f}", f"{max(lags):.1f}"))
    show("from a commit to the tracker | median s | worst s", rows)


@contextmanager
def in_tensorboard(_: MlflowServer, storage: DirectoryStorage) -> Iterator[Callable[[], int]]:
    """Follow the run in a thread; yield what says which step was written last."""
    tracker, over = TensorboardTracker(storage.root / "logs"), threading.Event()
    newest = -1

    def on_synced(synced: Synced) -> None:
        nonlocal newest
        newest = synced.step

    class Over(Exception):  # noqa: N818 - no error
        pass

    def wait(seconds: float) -> None:
        if over.wait(seconds):
            raise Over

    def follow() -> None:
        with suppress(Over):
            follow_run(storage, RUN, tracker, wait=wait, on_synced=on_synced)

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        yield lambda: newest
    finally:
        over.set()
        thread.join()


@contextmanager
def in_mlflow(server: MlflowServer, storage: DirectoryStorage) -> Iterator[Callable[[], int]]:
    """Follow the run in a process; yield what asks the server for the last step that it has."""
    command = [str(server.python), "-m", "prefect_torch_ddp", "sync", RUN, "--follow"]
    command += ["--tracker", "mlflow", "--storage", str(storage.root)]
    variables = {**server.environment, "MLFLOW_EXPERIMENT_NAME": storage.root.name}
    with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True) as follower:
        try:
            assert follower.stdout is not None
            follower.stdout.readline()  # what the first sync did
            named = _asked(server, f"experiments/get-by-name?experiment_name={storage.root.name}")
            about = {"experiment_ids": [named["experiment"]["experiment_id"]]}
            (run,) = _asked(server, "runs/search", about)["runs"]
            asks = f"runs/get?run_id={run['info']['run_id']}"

            def newest() -> int:
                found = _asked(server, asks)["run"]["data"].get("metrics", [])
                # The metrics are sent one after another: the last one is this.
                last = f"metric_{NUM_METRICS - 1}"
                return max((int(each["step"]) for each in found if each["key"] == last), default=-1)

            yield newest
        finally:
            follower.kill()


def _asked(server: MlflowServer, path: str, body: object = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{server.url}/api/2.0/mlflow/{path}", data, headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def _lag(
    storage: DirectoryStorage, number: int, num_steps: int, newest: Callable[[], int]
) -> float:
    last = num_steps * number
    report(storage, range(last - num_steps + 1, last + 1), NUM_METRICS, attempt=1)
    manifest = Manifest(RUN, last, 1, epoch=1, position={}, world_size=1)
    storage.write(manifest_key(RUN, last, 1), manifest.as_bytes())
    committed = time.time()
    while newest() < last - 1:
        time.sleep(0.05)
    return time.time() - committed
