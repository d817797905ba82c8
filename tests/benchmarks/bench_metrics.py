"""What metrics cost: a call of `ctx.report`, and a million records written, read and drawn."""

import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks.beside import AS_A_USER, rounds, show

pytestmark = pytest.mark.timeout(900)
ROUNDS = rounds(5)
REPORT_CODE = r"""
from pathlib import Path
from prefect_torch_ddp import RankContext
from prefect_torch_ddp.data.sampler import BatchShare
from prefect_torch_ddp.protocol.heartbeat import Phase
num = 20_000
with RankContext.local(storage=Path(sys.argv[1])) as ctx:
    ctx.report(loss=0.5, learning_rate=0.1)
    began = time.perf_counter()
    for i in range(num):
        ctx.report(loss=0.5 + i, learning_rate=0.1)
    report_s = (time.perf_counter() - began) / num
    num *= 10
    heartbeat, timing = ctx._assembly.link.heartbeat, ctx._assembly.reporter._timing
    began = time.perf_counter()
    for step in range(num):
        heartbeat.enter(Phase.LOADING)
        heartbeat.begin_step(step, 1, is_last=False)
        heartbeat.enter(Phase.STEP_END)
    mark_s = (time.perf_counter() - began) / num / 3
    ctx._progress.share = BatchShare(0, 0, 8, 16, is_last=False)
    began = time.perf_counter()
    for step in range(num):
        timing.end_step()
    print(report_s, mark_s, (time.perf_counter() - began) / num)
    ctx._progress.share = None
"""
RECORDS_CODE = r"""
from pathlib import Path
from prefect_torch_ddp.records.log import RecordLog
from prefect_torch_ddp.records import metrics
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.tasks.report.curves import MetricCurves
from prefect_torch_ddp.tasks.report.page.plot import render_curves

what, num, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
storage = DirectoryStorage(folder / "store")
began = time.perf_counter()
if what == "write":
    for rank in range(4):
        log = RecordLog(
            storage, "run", "metrics", rank=rank, attempt=1, copies=folder / "copies",
            first_interval_s=0.5,
        )
        for step in range(1, num // 4 + 1):
            log.append({
                "step": step, "epoch": 1 + step // 1000, "rank": rank, "attempt": 1,
                "time": time.time(), "num_samples": 32,
                "metrics": {"loss": 1 / step, "learning_rate": 0.1},
            })
        log.close()
else:
    records = metrics.reported(metrics.read_new_records(storage, "run", set()))
    records = metrics.surviving_records(records)
    assert len(records) == num
    if what == "read and draw":
        assert render_curves(MetricCurves(records).snapshot()) and metrics.epoch_rows(records)
print(time.perf_counter() - began, time.process_time(), peak_mb())
"""


STATUS_CODE = r"""
import re, sys, time

def peak_mb():
    return int(re.search(r"VmHWM:\s+([0-9]+) kB", open("/proc/self/status").read())[1]) / 1024
"""


def in_fresh_processes(code: str, *arguments: str, num: int = 1) -> list[float]:
    """Run code several times, each in a new process; return the medians of the numbers that
    it prints. STATUS_CODE precedes the code."""
    command = [*AS_A_USER, sys.executable, "-c", STATUS_CODE + code, *arguments]
    printed = [
        subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        for _ in range(num)
    ]
    return [statistics.median(map(float, column)) for column in zip(*printed, strict=True)]


def test_report(tmp_path: Path) -> None:
    """Print the microseconds of a report of two numbers outside of steps, a record each; of a mark
    of a phase; and of counting a step for the timing record."""
    seconds = in_fresh_processes(REPORT_CODE, str(tmp_path), num=ROUNDS)
    names = "ctx.report", "a mark", "a step's count"
    rows = [(name, f"{its * 1e6:.2f}") for name, its in zip(names, seconds, strict=True)]
    show("what | median µs", rows)


def test_records(tmp_path: Path) -> None:
    """Print seconds, those of the whole process's processor time, and its memory at its peak."""
    rows = []
    for what in ("write", "read", "read and draw"):
        wall_s, cpu_s, mb = in_fresh_processes(
            RECORDS_CODE, what, "1000000", str(tmp_path), num=1 if what == "write" else ROUNDS
        )
        rows.append((f"a million records: {what}", f"{wall_s:.2f}", f"{cpu_s:.2f}", f"{mb:.0f}"))
    show("what | s | processor time s | peak of memory MB", rows)
