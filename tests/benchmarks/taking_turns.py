"""Trainings that take turns of some seconds; the others are stopped with all their processes, by
SIGSTOP."""

import json
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import psutil

from tests.benchmarks import steady
from tests.support.separate_cluster import end

SETTLE_S = 0.2
"""After it was stopped: timers that went off meanwhile have their say at once, which is no part
of a steady training."""


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
        """Wait for its end."""
        self._signal(stop=False)
        assert self._process.wait(timeout=60) == 0

    def close(self) -> None:
        """Close the pipes."""
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
def trainer(command: Sequence[str], turns: steady.Turns) -> Iterator[Trainer]:
    """Start a training; its arguments are added."""
    folder = Path(turns.folder)
    folder.mkdir()
    for name in ("go", "done"):
        os.mkfifo(folder / name)
    process = subprocess.Popen([*command, json.dumps(asdict(turns))], start_new_session=True)
    made = Trainer(process, folder)
    try:
        yield made
    finally:
        made.close()
        if process.poll() is None:
            end(psutil.Process(process.pid))
        process.wait()
