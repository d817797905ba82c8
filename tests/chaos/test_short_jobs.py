"""One training over many short jobs of a real Slurm, which gives it one to four at a time, and
loses nodes. PTD_JOBS and PTD_WALLTIME_S set how many jobs and how long, by default 8 of 90 s."""

import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import dask
import numpy as np
import psutil
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from prefect_torch_ddp import CheckpointParams, ClusterParams, TrainParams, read_metrics, train_flow
from prefect_torch_ddp.records.run_record import RunRecord, list_run_records
from prefect_torch_ddp.storage.directory import DirectoryStorage
from tests.integration.clusters.slurm import SlurmSite, running_slurm, skip_without_slurm
from tests.support.runs import artifacts_of, flow_run_id_of
from tests.support.waiting import HANG_S, wait_until
from tests.workloads.short_jobs import BATCH, NUM_SAMPLES

NUM_JOBS = int(os.environ.get("PTD_JOBS", "8"))
WALLTIME_S = float(os.environ.get("PTD_WALLTIME_S", "90"))
SEED = int(os.environ.get("PTD_SEED", "0"))
AHEAD_S = 12.0
"""So long before a job's end Slurm's signal comes, as `--signal=B:USR1@12` would have it."""
MOST, SAMPLE_S = 4, 0.01
KILL_AFTER = (0.3, 0.6)
"""When nodes are killed, in parts of the training."""
NUM_EPOCHS = int(0.45 * NUM_JOBS * WALLTIME_S / (SAMPLE_S * NUM_SAMPLES))
"""Their steps take a little under half of the jobs' time."""
NUM_STEPS = NUM_EPOCHS * NUM_SAMPLES // BATCH
VIRTUAL_RANKS = 12
"""1, 2, 3 and 4 divide it."""

# Slurm counts walltimes in minutes, so this test sends the signals of shorter ones itself.
pytestmark = [pytest.mark.timeout(600 + 4 * NUM_JOBS * WALLTIME_S)]


@dataclass
class Queue:
    """Ends jobs at their walltime, kills nodes, and has jobs of others take turns with ours."""

    site: SlurmSite
    folder: Path
    """Of the training."""
    draws: random.Random = field(default_factory=lambda: random.Random(SEED))
    began: dict[str, float] = field(default_factory=dict)
    """When each of our jobs was first seen to run, in Unix seconds."""
    ended: dict[str, float] = field(default_factory=dict)
    killed: list[float] = field(default_factory=list)
    """When nodes were killed."""
    told: set[str] = field(default_factory=set)
    last_other_s: float = 0.0

    def look(self) -> None:
        """See which jobs run, and do what is due."""
        now = time.time()
        rows = self.site.call("squeue", "--noheader", "--format=%i %j %t %N").splitlines()
        running = {row.split()[0]: row.split()[3] for row in rows if " dask-worker R " in row}
        for job in running.keys() - self.began.keys():
            self.began[job] = now
        for job in self.began.keys() - {row.split()[0] for row in rows} - self.ended.keys():
            self.ended[job] = now
        for job in running:
            lasted_s = now - self.began[job]
            if lasted_s > WALLTIME_S:
                self._call(*self.site.cancel_job, job)
            elif lasted_s > WALLTIME_S - AHEAD_S and job not in self.told:
                self.told.add(job)
                self._call(*self.site.announce_end, job)
        step, due = self.folder / "step", KILL_AFTER[len(self.killed) :]
        done = int(step.read_text()) / NUM_STEPS if step.exists() else 0.0
        if due and done > due[0]:
            self._kill_a_node(running, now)
        if now - self.last_other_s > WALLTIME_S / 4:
            self.last_other_s = now
            lasts_s = self.draws.uniform(WALLTIME_S / 8, WALLTIME_S / 2)
            sleep = f"--wrap=sleep {lasts_s:.0f}"
            quiet = ["--output=/dev/null", "--job-name=other", "--cpus-per-task=8"]
            self._call("sbatch", *quiet, sleep)

    def _kill_a_node(self, running: dict[str, str], now: float) -> None:
        """Kill all processes of our jobs on a node at once, unless one of our jobs ends anyway."""
        alive = {job: node for job, node in running.items() if job not in self.told}
        if alive != running or not alive:
            return
        node = self.draws.choice(sorted(alive.values()))
        for job, where in alive.items():
            for process in self.site.processes(job) if where == node else ():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self.killed.append(now)

    def _call(self, *command: str) -> None:
        # A job may have ended since squeue's answer.
        environment = os.environ | self.site.environment
        subprocess.run(command, env=environment, check=False, capture_output=True, timeout=HANG_S)


@contextlib.contextmanager
def queue_of(site: SlurmSite, folder: Path) -> Iterator[Queue]:
    """Look after the jobs in a thread."""
    queue, stops, failures = Queue(site, folder), threading.Event(), []

    def look_after() -> None:
        try:
            while not stops.wait(0.3):
                queue.look()
        except BaseException as error:
            failures.append(error)
            raise

    thread = threading.Thread(target=look_after)
    thread.start()
    try:
        yield queue
    finally:
        stops.set()
        thread.join()
    assert not failures
    queue.look()


def params_of(folder: Path, cluster: ClusterParams, **changes: Any) -> TrainParams:
    """Describe the training."""
    folder.mkdir()
    sample_s = changes.pop("sample_s", SAMPLE_S)
    return TrainParams(
        workload="tests.workloads.short_jobs",
        storage=str(folder / "store"),
        options={"folder": str(folder), "epochs": NUM_EPOCHS, "sample_s": sample_s},
        determinism="elastic",
        virtual_ranks=VIRTUAL_RANKS,
        cluster=cluster,
        **changes,
    )


def on_slurm(folder: Path) -> ClusterParams:
    """Describe jobs of which two fit on a node."""
    return ClusterParams(
        cluster_class="dask_jobqueue.SLURMCluster",
        cluster_kwargs={
            "n_workers": MOST,
            "processes": 1,
            "cores": 8,
            "memory": "4GB",
            "interface": "lo",
            "local_directory": str(folder),
            "log_directory": str(folder / "jobs"),
            "python": f"exec {sys.executable}",
            "worker_extra_args": [
                *("--preload-nanny", "prefect_torch_ddp.gang.worker.leave"),
                *("--preload", "prefect_torch_ddp.gang.warm"),
                *("--preload", "tests.workloads.job_mark"),
            ],
            "job_script_prologue": [
                f"cd {Path.cwd()}",
                f"export PTD_MARKS={folder}",
                "date +%s.%N > $PTD_MARKS/job-$SLURM_JOB_ID",
            ],
            "scheduler_options": {
                "host": "127.0.0.1",
                "dashboard_address": "127.0.0.1:0",
                "allowed_failures": 0,
            },
        },
        adapt_kwargs={"minimum": MOST, "maximum": MOST},
    )


@pytest.mark.usefixtures("prefect_api")
def test_one_training_over_many_short_jobs(tmp_path: Path, monkeypatch: Any) -> None:
    """No step is repeated at a walltime's end, and the weights are the undisturbed ones."""
    skip_without_slurm()
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "tracker"))
    undisturbed, folder = tmp_path / "undisturbed", tmp_path / "jobs"
    train_flow(params_of(undisturbed, ClusterParams(), world_size=2, sample_s=0.0))
    with running_slurm(make(tmp_path / "slurm")) as site:
        for name, value in site.environment.items():
            monkeypatch.setenv(name, value)
        given: dict[str, Any] = {
            "world_size": MOST,
            "min_world_size": 1,
            "max_world_size": MOST,
            "workers_timeout_s": 2.0,
            "max_restarts": 9,
            "retries": 9,
            "retry_delay_s": 0,
            "checkpoint": CheckpointParams(every_s=5),
            "trackers": ("tensorboard",),
        }
        with (
            queue_of(site, folder) as queue,
            dask.config.set({"distributed.deploy.lost-worker-timeout": "8s"}),
        ):
            report = train_flow(params_of(folder, on_slurm(tmp_path), **given))
        site.end_jobs()
        wait_until(lambda: not site.processes())
    lines = [
        json.loads(line)
        for path in sorted(folder.glob("steps-*"))
        for line in path.read_text().splitlines()
        if line.endswith("}")
    ]
    (record,), (first,) = (
        list_run_records(DirectoryStorage(each / "store")) for each in (folder, undisturbed)
    )
    show(queue, lines, tmp_path, record)
    assert record.state == "completed"
    assert record.value == first.value
    assert len(queue.killed) == len(KILL_AFTER)
    assert not repeated_at_an_end(queue, lines)
    artifacts = artifacts_of(flow_run_id_of(report.flow_run_url))
    assert len([name for name in artifacts if name.endswith("-report")]) == 1
    check_tracker(tmp_path / "tracker", folder / "store", record)


def make(folder: Path) -> Path:
    """Make a folder and return it."""
    folder.mkdir()
    return folder


def attempts_of(lines: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    """Return the lines of each attempt that made a step, in order."""
    found: dict[int, list[dict[str, Any]]] = {}
    for line in sorted(lines, key=lambda line: (line["attempt"], line["ended"])):
        found.setdefault(line["attempt"], []).append(line)
    return found


def repeats(queue: Queue, lines: list[dict[str, Any]]) -> list[tuple[int, int, bool]]:
    """Return how many steps each later attempt made again, and whether a node was killed before."""
    found = []
    for (_, before), (number, after) in pairwise(attempts_of(lines).items()):
        last = max(line["step"] for line in before)
        again = max(0, last + 1 - min(line["step"] for line in after))
        between = before[0]["began"], after[0]["began"]
        found.append((number, again, any(between[0] < at < between[1] for at in queue.killed)))
    return found


def repeated_at_an_end(queue: Queue, lines: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """Return the attempts that made steps again although no node was killed, with their number."""
    return [
        (number, again) for number, again, is_kill in repeats(queue, lines) if again and not is_kill
    ]


def check_tracker(tracker: Path, store: Path, record: RunRecord) -> None:
    """Check that TensorBoard has one run with each step once, as `read_metrics` has."""
    assert [each.name for each in tracker.iterdir()] == [record.run_id]
    options = {"size_guidance": {"scalars": 0}, "purge_orphaned_data": False}
    found = EventAccumulator(str(tracker / record.run_id), **options)
    found.Reload()
    rows = read_metrics(store, record.run_id, by="step")
    points = [(each.step, each.value) for each in found.Scalars("loss")]
    assert points == list(zip(rows.step, rows.loss.astype(np.float32), strict=True))


def fixed_costs(folder: Path) -> dict[str, float]:
    """Return the seconds from each job's start until its worker was there."""
    workers = {path.name.partition("-")[2]: path for path in folder.glob("worker-*")}
    return {
        job: float(path.read_text()) - float((folder / f"job-{job}").read_text())
        for job, path in workers.items()
    }


def show(queue: Queue, lines: list[dict[str, Any]], folder: Path, record: RunRecord) -> None:
    """Print what the jobs' time was used for, and the attempts in seconds since the first began."""
    costs = fixed_costs(folder)
    alive_s = {job: queue.ended.get(job, time.time()) - at for job, at in queue.began.items()}
    steps_s = sum(line["ended"] - line["began"] for line in lines)
    fixed_s = sum(costs.values())
    allocated_s = sum(alive_s.values())
    sizes = Counter({line["step"]: line["world_size"] for line in lines}.values())
    found = repeats(queue, lines)
    began = record.began.timestamp()
    for attempt in record.attempts:
        mine = [line for line in lines if line["attempt"] == attempt.attempt]
        times = [line["began"] for line in mine][:1] + [line["ended"] for line in mine][-1:]
        print(
            f"attempt {attempt.attempt}, {attempt.world_size} ranks: workers there after "
            f"{attempt.began.timestamp() - began:.1f} s, steps in "
            f"{[round(each - began, 1) for each in times]}; {attempt.cause[:90]}"
        )
    typical = f"{statistics.median(costs.values()):.1f} s" if costs else "not known"
    print(
        f"\n{len(queue.began)} jobs of {WALLTIME_S:g} s, {len(queue.killed)} nodes killed, "
        f"{len(record.attempts)} attempts, {len(found) + 1} of them with steps"
        f"\nsteps by number of ranks: {dict(sorted(sizes.items()))}"
        f"\nmade again at walltimes' ends and growths: {sum(n for _, n, kill in found if not kill)}"
        f"\nmade again after a killed node: {[n for _, n, kill in found if kill]}"
        f"\nallocated {allocated_s:.0f} s; from a job's start to its worker {typical} (median)"
        f"\nin steps {steps_s:.0f} s: {steps_s / allocated_s:.2f} of it, "
        f"{steps_s / (allocated_s - fixed_s):.2f} without the start of jobs"
        f"\n{record.goodput}"
    )
