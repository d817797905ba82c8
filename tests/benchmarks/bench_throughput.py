"""How fast steps are once a training runs, compared with torchrun and the same code; and how
much processor time Dask and the agents use meanwhile. The trainings take turns of about a
second; the others are stopped with all their processes, by SIGSTOP. A turn's ratio
compares blocks that are seconds apart, and the median of many is reported."""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from operator import truediv
from pathlib import Path

import psutil
import pytest
import torch

from tests.benchmarks import steady, steady_gang
from tests.benchmarks.beside import command_of_torchrun, median_and_half, rounds, show
from tests.support.separate_cluster import end

pytestmark = pytest.mark.timeout(900)
NUM_TURNS = rounds(31)
SETTLE_S = 0.2
"""After it was stopped: timers that went off meanwhile have their say at once, which is no part
of a steady training."""
WORKS = {
    "cpu": (256, ((128, 90), (256, 60), (768, 30))),
    "cuda": (2048, ((256, 600), (1024, 300), (4096, 100))),
}
"""By device the features of a row; the rows per rank and step, and the steps in a turn, of about
6, 9 and 18 ms on two cores of 2026."""
REFERENCE = "torchrun"


class Trainer:
    """One of the trainings, with all its processes."""

    def __init__(self, process: "subprocess.Popen[bytes]", folder: Path) -> None:
        """Open the pipes; both ways, so that neither side sees an end when the other closes."""
        self._process = process
        self._go = os.fdopen(os.open(folder / "go", os.O_RDWR), "w")
        self._done = os.fdopen(os.open(folder / "done", os.O_RDWR))
        self.cores_of_dask: list[float] = []

    def make_ready(self) -> None:
        """Wait until it has its next work before it, and stop it."""
        self._signal(stop=False)
        assert self._done.readline() == "ready\n"
        self._signal(stop=True)

    def turn(self) -> float:
        """Have it train a block; return the seconds per step."""
        self._signal(stop=False)
        time.sleep(SETTLE_S)
        before, began = self._dask_s(), time.monotonic()
        self._go.write("go\n")
        self._go.flush()
        pace_s = float(self._done.readline())
        self.cores_of_dask.append((self._dask_s() - before) / (time.monotonic() - began))
        self._signal(stop=True)
        return pace_s

    def finish(self) -> None:
        self._signal(stop=False)
        assert self._process.wait(timeout=60) == 0

    def close(self) -> None:
        self._go.close()
        self._done.close()

    def _processes(self) -> list[psutil.Process]:
        root = psutil.Process(self._process.pid)
        return [root, *root.children(recursive=True)]

    def _signal(self, *, stop: bool) -> None:
        for process in self._processes():
            (process.suspend if stop else process.resume)()

    def _dask_s(self) -> float:
        """Return the seconds of processor time of everything that doesn't train: caller,
        scheduler, nannies, workers."""
        times = [
            process.cpu_times()
            for process in self._processes()
            if not process.name().startswith("ddp-rank")
        ]
        return sum(spent.user + spent.system for spent in times)


@contextmanager
def trainer(folder: Path, command: Sequence[str], device: str) -> Iterator[Trainer]:
    """Start a training; its arguments are added."""
    folder.mkdir()
    for name in ("go", "done"):
        os.mkfifo(folder / name)
    width, works = WORKS[device]
    turns = steady.Turns(str(folder), NUM_TURNS, works, width, device)
    process = subprocess.Popen([*command, json.dumps(asdict(turns))], start_new_session=True)
    made = Trainer(process, folder)
    try:
        yield made
    finally:
        made.close()
        if process.poll() is None:
            end(psutil.Process(process.pid))
        process.wait()


@pytest.mark.parametrize("device", list(WORKS))
def test_steady_training(tmp_path: Path, device: str) -> None:
    """Print the table of docs/performance.md: medians over the turns, and the median of the
    turns' ratios; on a rank for each GPU."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    num_ranks = 2 if device == "cpu" else torch.cuda.device_count()
    gang = (sys.executable, str(Path(steady_gang.__file__)))
    commands = {
        REFERENCE: command_of_torchrun(Path(steady.__file__), num_ranks=num_ranks),
        "run_gang": (*gang, "plain"),
        "run_gang with RankContext": (*gang, "context"),
    }
    rows = []
    with ExitStack() as stack:
        trainers = {
            name: stack.enter_context(trainer(tmp_path / str(number), command, device))
            for number, (name, command) in enumerate(commands.items())
        }
        for num_rows, _ in WORKS[device][1]:
            for each in trainers.values():
                each.make_ready()
            seen: dict[str, list[float]] = {name: [] for name in trainers}
            for number in range(NUM_TURNS):
                names = list(trainers)
                for name in names[number % 3 :] + names[: number % 3]:
                    seen[name].append(trainers[name].turn() * 1000)
            for name, paces in seen.items():
                ratios = list(map(truediv, seen[REFERENCE], paces))
                times = f"{statistics.median(paces):.2f}", f"{max(paces):.2f}"
                rows.append((f"{num_rows} rows: {name}", *times, *median_and_half(ratios)))
        for each in trainers.values():
            each.finish()
    what = "throughput, times torchrun's | middle half of the turns"
    show(f"steps of | median ms | worst ms | {what}", rows)
    cores = statistics.median(trainers["run_gang"].cores_of_dask)
    print(f"\nDask's processes and the caller take {cores:.3f} cores while a gang trains.")
