"""How long a gang takes to start, to fail and to start again, beside torchrun."""

import inspect
import re
import statistics
import time
from pathlib import Path

import pytest
from distributed import Client

from prefect_torch_ddp import RankFailedError, run_gang
from tests.benchmarks import timed
from tests.benchmarks.beside import Times, TorchrunHungError, show, torchrun
from tests.workloads import failing, plain

pytestmark = pytest.mark.timeout(900)
ROUNDS = 9
CURVE_ROUNDS = 5
CURVE_OF_TORCHRUN_ROUNDS = 3
TORCHRUN_HANGS_AFTER_S = 20.0

MEET = """
import os, re, signal, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
"""
TORCHRUN_START = f"""{MEET}
now = time.time()
dist.barrier()
pss = re.search(r"Pss: +([0-9]+) kB", open("/proc/self/smaps_rollup").read())[1]
os.write(1, f"{{now:.6f}} {{pss}}\\n".encode())
dist.barrier()
dist.destroy_process_group()
"""
TORCHRUN_KILLED = f"""{MEET}
if dist.get_rank() == 1:
    os.write(1, f"{{time.time():.6f}} 0\\n".encode())
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(torch.ones(1))
"""


def stamps(printed: str) -> list[tuple[float, int]]:
    """Return the times that ranks printed, each with a number beside it."""
    return [
        (float(stamp), int(number))
        for stamp, number in re.findall(r"(\d{10}\.\d{6}) (\d+)", printed)
    ]


TORCHRUN_RESTARTED = f"""{MEET}
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if dist.get_rank() == 1:
        open(sys.argv[1], "w").write(repr(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))

{inspect.getsource(timed.first_step)}
os.write(1, f"{{first_step():.6f}} 0\\n".encode())
"""


def start_of(client: Client, launcher: str) -> float:
    """Return the seconds from the call to the first all-reduce done on all ranks."""
    started = time.time()
    return (
        max(run_gang(client, plain.time_of_first_all_reduce, world_size=2, launcher=launcher))
        - started
    )  # type: ignore[arg-type]


def torchrun_start(script: Path) -> float:
    """Return the same from the start of torchrun."""
    began, printed, _ = torchrun(script)
    return max(stamps(printed))[0] - began


def death_of(client: Client, stamp: Path) -> float:
    """Return the seconds from the SIGKILL of a rank to the exception in the caller, with all
    ranks gone."""
    with pytest.raises(RankFailedError, match="SIGKILL"):
        run_gang(client, failing.stamp_and_die, args=(str(stamp),), world_size=2)
    return time.time() - float(stamp.read_text())


def torchrun_death(script: Path) -> float:
    """Return the seconds from the SIGKILL of a rank to the end of torchrun."""
    _, printed, ended = torchrun(script)
    return ended - max(stamps(printed))[0]


def restart_of(client: Client, stamp: Path) -> float:
    """Return the seconds from the SIGKILL of a rank to the first step of the next attempt, done
    on all ranks."""
    stepped = max(
        run_gang(client, timed.die_once, args=(str(stamp),), world_size=2, max_restarts=1)
    )
    return stepped - float(stamp.read_text())


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
    return max(stamps(printed))[0] - float(stamp.read_text())


def test_start_death_and_restart(
    client: Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Print the first table of docs/performance.md."""
    scripts = {"start": TORCHRUN_START, "killed": TORCHRUN_KILLED, "restarted": TORCHRUN_RESTARTED}
    for name, text in scripts.items():
        (tmp_path / f"{name}.py").write_text(text)
    stamp, times, num_hung = tmp_path / "stamp", Times(), 0
    for _ in range(ROUNDS):
        times.note("start: torchrun", lambda: torchrun_start(tmp_path / "start.py"))
        times.note('start: run_gang, launcher="exec"', lambda: start_of(client, "exec"))
        times.note("start: run_gang, warm host", lambda: start_of(client, "auto"))
        times.note("death: torchrun", lambda: torchrun_death(tmp_path / "killed.py"))
        times.note("death: run_gang", lambda: death_of(client, stamp))
        try:
            times.note(
                "restart: torchrun", lambda: torchrun_restart(tmp_path / "restarted.py", stamp)
            )
        except TorchrunHungError:
            num_hung += 1
        times.note("restart: run_gang", lambda: restart_of(client, stamp))
    rows = []
    for name in times.seen:
        reference = times.median_ms(name.partition(":")[0] + ": torchrun")
        median = times.median_ms(name)
        rows.append(
            (name, f"{median:.0f}", f"{times.worst_ms(name):.0f}", f"{median / reference:.3f}")
        )
    show(capsys, ("what", "median ms", "worst ms", "times torchrun"), rows)
    with capsys.disabled():
        print(
            f"\n{num_hung} of {ROUNDS} restarts by torchrun failed, or hung for "
            f"{TORCHRUN_HANGS_AFTER_S:.0f} s, and have no time."
        )


def test_curve(client: Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Print start and memory over the number of ranks, which share the two workers."""
    script = tmp_path / "start.py"
    script.write_text(TORCHRUN_START)
    rows = []
    for world_size in (2, 4, 8, 16, 32):
        ours, theirs = [], []
        for number in range(CURVE_ROUNDS):
            began = time.time()
            met = run_gang(
                client,
                timed.meet_and_weigh,
                world_size=world_size,
                ranks_per_worker=world_size // 2,
            )
            ours.append((max(met)[0] - began, statistics.median(pss for _, pss in met)))
            if world_size <= 8 and number < CURVE_OF_TORCHRUN_ROUNDS:
                began, printed, _ = torchrun(script, world_size=world_size)
                met = stamps(printed)
                theirs.append((max(met)[0] - began, statistics.median(pss for _, pss in met)))
        rows.append(
            (str(world_size), *columns(ours), *(columns(theirs) if theirs else ("not run", "")))
        )
    show(capsys, ("ranks", "run_gang, warm: ms", "MB a rank", "torchrun: ms", "MB a rank"), rows)


def columns(met: list[tuple[float, float]]) -> tuple[str, str]:
    """Return the medians of the start in ms and of the PSS in MB."""
    return (
        f"{statistics.median(start for start, _ in met) * 1000:.0f}",
        f"{statistics.median(pss for _, pss in met) / 1024:.0f}",
    )
