"""What is twice or missing in the curves of a training that is killed and goes on from its
checkpoint: Lightning's loggers, W&B's resume and our trackers, with the same kills.
PTD_BENCH_KILLS is their number."""

import csv
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from distributed import Client
from prefect import flow
from prefect_dask import DaskTaskRunner
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from prefect_torch_ddp import CheckpointParams, ddp_task, read_metrics
from tests.benchmarks import logged
from tests.benchmarks.beside import show
from tests.support.wandb_files import run_in

pytestmark = [pytest.mark.timeout(3600), pytest.mark.usefixtures("on_cpus", "prefect_api")]
NUM_KILLS = int(os.environ.get("PTD_BENCH_KILLS", "20"))
KILLED_AFTER = sorted(random.Random(0).sample(range(1, logged.NUM_STEPS), NUM_KILLS))


def test_curves_of_a_killed_training(
    tmp_path: Path, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Print how many steps are twice or missing in each."""
    lightning, wandb, ours = (tmp_path / name for name in ("lightning", "wandb", "ours"))
    for folder in (lightning, wandb, ours):
        folder.mkdir()
    until_it_ends("lightning", lightning)
    until_it_ends("wandb", wandb)
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(ours / "tensorboard"))
    monkeypatch.setenv("WANDB_DIR", str(ours))
    fit: Any = ddp_task(
        world_size=1,
        max_restarts=2 * NUM_KILLS,
        storage=str(ours / "storage"),
        checkpoint=CheckpointParams(every_steps=logged.SAVE_EVERY, every_s=None),
        trackers=["tensorboard", "wandb"],
    )(logged.ours)
    assert client.scheduler is not None
    runner: Any = DaskTaskRunner(address=client.scheduler.address)

    @flow(task_runner=runner)
    def train() -> None:
        fit.submit(str(ours), KILLED_AFTER).result()

    train()
    with (lightning / "csv" / "metrics.csv").open(encoding="utf-8") as file:
        in_csv = [int(row["step"]) + 1 for row in csv.DictReader(file) if row["loss"]]
    starts = [steps_in_wandb(folder) for folder in sorted((wandb / "wandb").glob("offline-run-*"))]
    (own,) = (ours / "wandb").glob("offline-run-*")
    (run,) = (ours / "tensorboard").iterdir()
    theirs, run_id = lightning / "tensorboard", run.name
    rows = {
        "Lightning's TensorBoardLogger": steps_in_tensorboard(theirs),
        "the same, as TensorBoard shows it": steps_in_tensorboard(theirs, purged=True),
        "Lightning's CSVLogger": in_csv,
        f"W&B offline, all {len(starts)} folders": [*chain.from_iterable(starts)],
        "the same, the last folder": starts[-1],
        "our TensorBoard files": steps_in_tensorboard(run),
        "our folder for W&B": steps_in_wandb(own),
        "`read_metrics`": read_metrics(str(ours / "storage"), run_id)["step"].tolist(),
    }
    head = f"{logged.NUM_STEPS} steps, {NUM_KILLS} kills | points | steps twice or more | missing"
    show(head, [(name, *numbers_of(steps)) for name, steps in rows.items()])


def until_it_ends(way: str, folder: Path) -> None:
    """Start the training again as often as it is killed."""
    command = [sys.executable, "-m", "tests.benchmarks.logged", way, str(folder)]
    environment = {**os.environ, "WANDB_SILENT": "true", "OMP_NUM_THREADS": "1"}
    for _ in range(NUM_KILLS + 1):
        ended = subprocess.run([*command, *map(str, KILLED_AFTER)], env=environment, check=False)
        if ended.returncode == 0:
            return
        assert ended.returncode == -signal.SIGKILL


def steps_in_tensorboard(folder: Path, *, purged: bool = False) -> list[int]:
    """Return the steps of the loss in a folder of event files, counted from 1."""
    found = EventAccumulator(str(folder), size_guidance={"scalars": 0}, purge_orphaned_data=purged)
    found.Reload()
    return [event.step for event in found.Scalars("loss")]


def steps_in_wandb(folder: Path) -> list[int]:
    """Return the steps of the loss in a run's folder."""
    return [step for step, _ in run_in(folder)["series"]["loss"]]


def numbers_of(steps: Iterable[int]) -> tuple[str, ...]:
    """Count the points, the steps with several, and those with none."""
    seen = Counter(steps)
    numbers = seen.total(), sum(each > 1 for each in seen.values()), logged.NUM_STEPS - len(seen)
    return tuple(map(str, numbers))
