"""How long a gang takes to start, to fail and to start again, compared with torchrun."""

import inspect
import re
import time
from pathlib import Path
from typing import Any

import pytest
from distributed import Client

from prefect_torch_ddp import RankFailedError, run_gang
from tests.benchmarks import timed
from tests.benchmarks.beside import Times, TorchrunHungError, rounds, show, torchrun
from tests.workloads import failing, plain

pytestmark = pytest.mark.timeout(900)
ROUNDS = rounds(9)
TORCHRUN_HANGS_AFTER_S = 20.0

MEET = """
import os, signal, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
"""
TORCHRUN_START = f"""{MEET}
os.write(1, f"{{time.time():.6f}}\\n".encode())
dist.barrier()
dist.destroy_process_group()
"""
TORCHRUN_KILLED = f"""{MEET}
if dist.get_rank() == 1:
    os.write(1, f"{{time.time():.6f}}\\n".encode())
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(torch.ones(1))
"""


def stamps(printed: str) -> list[float]:
    """Return the times that ranks printed."""
    return [float(stamp) for stamp in re.findall(r"\d{10}\.\d{6}", printed)]


TORCHRUN_RESTARTED = f"""{MEET}
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if dist.get_rank() == 1:
        open(sys.argv[1], "w").write(repr(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))

{inspect.getsource(timed.first_step)}
os.write(1, f"{{first_step():.6f}}\\n".encode())
"""


def start_of(client: Client, launcher: str) -> tuple[float, float]:
    """Return the seconds from the call to the first all-reduce done on all ranks, and of the
    whole call."""
    started = time.time()
    call: Any = {"world_size": 2, "launcher": launcher}
    met = max(run_gang(client, plain.time_of_first_all_reduce, **call))
    return met - started, time.time() - started


def torchrun_start(script: Path) -> tuple[float, float]:
    """Return the same from the start of torchrun."""
    began, printed, ended = torchrun(script)
    return max(stamps(printed)) - began, ended - began


def death_of(client: Client, stamp: Path) -> float:
    """Return the seconds from the SIGKILL of a rank to the exception in the caller, with all
    ranks gone."""
    with pytest.raises(RankFailedError, match="SIGKILL"):
        run_gang(client, failing.stamp_and_die, args=(str(stamp),), world_size=2)
    return time.time() - float(stamp.read_text())


def torchrun_death(script: Path) -> float:
    """Return the seconds from the SIGKILL of a rank to the end of torchrun."""
    _, printed, ended = torchrun(script)
    return ended - max(stamps(printed))


def restart_of(client: Client, stamp: Path) -> float:
    """Return the seconds from the SIGKILL of a rank to the first step of the next attempt, done
    on all ranks."""
    call: Any = {"args": (str(stamp),), "world_size": 2, "max_restarts": 1}
    first_step_s: float = max(run_gang(client, timed.die_once, **call))
    return first_step_s - float(stamp.read_text())


def torchrun_restart(script: Path, stamp: Path) -> float:
    """Return the same under torchrun with one restart.

    Raises:
        TorchrunHungError: the second attempt met the first one's keys in torchrun's store, and
            waits for ever.
    """
    _, printed, _ = torchrun(
        script, str(stamp), options=("--max-restarts", "1"), timeout_s=TORCHRUN_HANGS_AFTER_S
    )
    if len(stamps(printed)) != 2:
        raise TorchrunHungError
    return max(stamps(printed)) - float(stamp.read_text())


def test_start_death_and_restart(client: Client, tmp_path: Path) -> None:
    """Print the first table of docs/performance.md."""
    scripts = {"start": TORCHRUN_START, "killed": TORCHRUN_KILLED, "restarted": TORCHRUN_RESTARTED}
    for name, text in scripts.items():
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    stamp, times, num_hung = tmp_path / "stamp", Times(), 0
    for _ in range(ROUNDS):
        for name, (start_s, whole_s) in {
            "torchrun": torchrun_start(tmp_path / "start.py"),
            'run_gang, launcher="exec"': start_of(client, "exec"),
            "run_gang, warm host": start_of(client, "auto"),
        }.items():
            times.note(f"start: {name}", start_s)
            times.note(f"whole: {name}", whole_s)
        times.note("death: torchrun", torchrun_death(tmp_path / "killed.py"))
        times.note("death: run_gang", death_of(client, stamp))
        try:
            restarted = tmp_path / "restarted.py"
            times.note("restart: torchrun", torchrun_restart(restarted, stamp))
        except TorchrunHungError:
            num_hung += 1
        times.note("restart: run_gang", restart_of(client, stamp))
    rows = []
    for name in times.seen:
        reference = times.median_ms(name.partition(":")[0] + ": torchrun")
        median = times.median_ms(name)
        found = f"{median:.0f}", f"{times.worst_ms(name):.0f}", f"{median / reference:.3f}"
        rows.append((name, *found))
    show("what | median ms | worst ms | times torchrun", rows)
    print(
        f"\n{num_hung} of {ROUNDS} restarts by torchrun failed, or hung for "
        f"{TORCHRUN_HANGS_AFTER_S:.0f} s, and have no time."
    )
