"""How long a gang takes to start and to fail, beside torchrun on the same machine in the same minutes."""

import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from distributed import Client

from prefect_torch_ddp import RankFailedError, run_gang
from tests.workloads import faulty, plain

pytestmark = pytest.mark.timeout(600)
ROUNDS = 9

TORCHRUN_START = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
os.write(1, f"{time.time():.6f}\\n".encode())
dist.destroy_process_group()
"""
TORCHRUN_KILLED = """
import os, signal, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 1:
    os.write(1, f"{time.time():.6f}\\n".encode())
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(torch.ones(1))
"""


def torchrun(script: Path) -> tuple[float, float, float]:
    """Run a script on two ranks; return when it was started, the newest time it printed, and when torchrun had ended."""
    started = time.time()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    ended = time.time()
    stamps = [float(stamp) for stamp in re.findall(r"\d{10}\.\d{6}", done.stdout)]
    assert stamps, done.stderr[-2000:]
    return started, max(stamps), ended


def start_of(client: Client, launcher: str) -> float:
    """Return the seconds from the call to the first all-reduce done on all ranks."""
    started = time.time()
    return max(run_gang(client, plain.time_of_first_all_reduce, world_size=2, launcher=launcher)) - started  # type: ignore[arg-type]


def death_of(client: Client, folder: Path) -> float:
    """Return the seconds from the SIGKILL of a rank to the exception in the caller, with all ranks gone."""
    stamp = folder / "stamp"
    with pytest.raises(RankFailedError, match="SIGKILL"):
        run_gang(client, faulty.stamp_and_die, args=(str(stamp),), world_size=2)
    return time.time() - float(stamp.read_text())


def test_start_and_death(dask_client: Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Print the table that stands in docs/performance.md."""
    start, killed = tmp_path / "start.py", tmp_path / "killed.py"
    start.write_text(TORCHRUN_START)
    killed.write_text(TORCHRUN_KILLED)
    seen: dict[str, list[float]] = {}

    def note(name: str, measure: Callable[[], float]) -> None:
        seen.setdefault(name, []).append(measure())

    def torchrun_start() -> float:
        began, reduced, _ = torchrun(start)
        return reduced - began

    def torchrun_death() -> float:
        _, died, ended = torchrun(killed)
        return ended - died

    run_gang(dask_client, plain.sum_of_ones, world_size=2)
    for _ in range(ROUNDS):
        note("start: torchrun", torchrun_start)
        note('start: run_gang, launcher="exec"', lambda: start_of(dask_client, "exec"))
        note("start: run_gang, warm host", lambda: start_of(dask_client, "auto"))
        note("death: torchrun", torchrun_death)
        note("death: run_gang", lambda: death_of(dask_client, tmp_path))
    with capsys.disabled():
        print("\n\n| what | median ms | worst ms | times torchrun |\n|---|---|---|---|")
        for name, times in seen.items():
            reference = statistics.median(seen[name.split(":")[0] + ": torchrun"])
            median = statistics.median(times)
            print(f"| {name} | {median * 1000:.0f} | {max(times) * 1000:.0f} | {median / reference:.3f} |")
