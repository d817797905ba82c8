"""Owns the reference of every benchmark, torchrun on the same machine in the same minutes, and the tables that they print."""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest


def torchrun(script: Path, *arguments: str, world_size: int = 2, options: Sequence[str] = ()) -> tuple[float, str, float]:
    """Run a script; return when it was started, what it printed, and when torchrun had ended."""
    started = time.time()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
    done = subprocess.run([*command, *options, str(script), *arguments], capture_output=True, text=True, timeout=300, check=False)
    ended = time.time()
    assert done.stdout, done.stderr[-2000:]
    return started, done.stdout, ended


class Times:
    """Seconds by name, in rounds."""

    def __init__(self) -> None:
        """Start empty."""
        self.seen: dict[str, list[float]] = {}

    def note(self, name: str, measure: Callable[[], float]) -> None:
        """Measure once."""
        self.seen.setdefault(name, []).append(measure())

    def median_ms(self, name: str) -> float:
        """Return the middle one in milliseconds."""
        return statistics.median(self.seen[name]) * 1000

    def worst_ms(self, name: str) -> float:
        """Return the largest in milliseconds."""
        return max(self.seen[name]) * 1000


def show(capsys: pytest.CaptureFixture[str], head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a markdown table, as it stands in docs/performance.md."""
    with capsys.disabled():
        print("\n")
        for row in (head, ["---"] * len(head), *rows):
            print(f"| {' | '.join(row)} |")
