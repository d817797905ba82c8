"""A benchmark that is ended leaves nothing running."""

import signal
import subprocess
import sys
from pathlib import Path

import psutil

from tests.support.waiting import HANG_S, wait_until

BENCH = """
from pathlib import Path
from tests.benchmarks import steady
from tests.benchmarks.taking_turns import trainer

def test_two(tmp_path):
    turns = steady.Turns(str(tmp_path / "turns"), 1, [(1, 1)])
    with trainer(["sh", "-c", "echo $$ > {pid}.new; sleep 1000"], turns):
        import time
        while not Path("{pid}.new").exists() or not Path("{pid}.new").read_text():
            time.sleep(0.02)
        Path("{pid}.new").rename("{pid}")
        while True:  # a signal just before a long sleep would be handled after it
            time.sleep(0.02)
"""


def test_trainers_end_with_a_benchmark_that_sigterm_ends(tmp_path: Path) -> None:
    """As `make bench` is ended by a job's end; its trainers are sessions of their own."""
    pid = tmp_path / "pid"
    bench = tmp_path / "bench_ended.py"
    bench.write_text(BENCH.replace("{pid}", str(pid)), encoding="utf-8")
    options = ["-o", "python_files=bench_*.py", "-p", "tests.benchmarks.conftest"]
    command = [sys.executable, "-m", "pytest", "-q", *options, str(bench)]
    with subprocess.Popen(command) as pytests:
        wait_until(pid.exists, HANG_S)
        trainer = psutil.Process(int(pid.read_text()))
        pytests.send_signal(signal.SIGTERM)
        wait_until(lambda: pytests.poll() is not None, what="the end of pytest")
        assert pytests.returncode == 128 + signal.SIGTERM
    assert not trainer.is_running()
