"""The reference of every benchmark, torchrun on the same machine in the same minutes, and
the tables that they print."""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import psutil

from tests.support.separate_cluster import end


class TorchrunHungError(Exception):
    """Torchrun neither ended nor got on."""


AS_A_USER = ("env", "-u", "MALLOC_TRIM_THRESHOLD_")
"""Without what tests/conftest.py sets, as Dask's nannies do: it makes steps on a CPU slower."""


def command_of_torchrun(
    script: Path, options: Sequence[str] = (), num_ranks: int = 2
) -> tuple[str, ...]:
    """Return the command that runs a script; its arguments follow."""
    standalone = ("--standalone", "--nproc-per-node", str(num_ranks))
    run = (sys.executable, "-m", "torch.distributed.run")
    return (*AS_A_USER, *run, *standalone, *options, str(script))


def torchrun(
    script: Path,
    *arguments: str,
    options: Sequence[str] = (),
    timeout_s: float = 300,
) -> tuple[float, str, float]:
    """Run a script; return when it was started, what it printed, and when torchrun had ended.

    Raises:
        TorchrunHungError: it hadn't ended in time; it is killed.
    """
    started = time.time()
    command = [*command_of_torchrun(script, options), *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            printed, complained = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            end(psutil.Process(process.pid))
            raise TorchrunHungError from error
    ended = time.time()
    assert printed or options, complained[-2000:]
    return started, printed, ended


class Times:
    """Seconds by name, in rounds."""

    def __init__(self) -> None:
        self.seen: dict[str, list[float]] = {}

    def note(self, name: str, seconds: float) -> None:
        self.seen.setdefault(name, []).append(seconds)

    def median_ms(self, name: str) -> float:
        return statistics.median(self.seen[name]) * 1000

    def worst_ms(self, name: str) -> float:
        return max(self.seen[name]) * 1000


def show(head: str, rows: Iterable[Sequence[str]]) -> None:
    """Print a markdown table, as it stands in docs/performance.md; its head names the columns
    between bars."""
    columns = head.split(" | ")
    print("\n")
    for row in (columns, ["---"] * len(columns), *rows):
        print(f"| {' | '.join(row)} |")


def median_and_half(ratios: Sequence[float]) -> tuple[str, str]:
    """Return the median, and the middle half of the rounds."""
    first, median, third = statistics.quantiles(ratios, n=4)
    return f"{median:.3f}", f"{first:.3f} to {third:.3f}"


def rounds(default: int) -> int:
    """Return how many rounds are asked for."""
    return int(os.environ.get("PTD_BENCH_ROUNDS", default))
