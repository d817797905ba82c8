"""A rank's stacks can be read while it holds the interpreter's lock."""

import subprocess
import sys
from contextlib import closing

from prefect_torch_ddp.gang.worker.rank_io import HeartbeatPage
from prefect_torch_ddp.protocol.heartbeat import LOOK_SIGNAL, PAGE_BYTES, Phase
from tests.support.waiting import wait_until

HOLDS_THE_LOCK = """
import ctypes, os, sys
from prefect_torch_ddp.rank.heartbeat import HeartbeatWriter

def hold_the_lock():
    ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)

HeartbeatWriter.shared(int(sys.argv[1]))
hold_the_lock()
"""


def test_the_stack_of_a_process_that_holds_the_interpreters_lock() -> None:
    """LOOK_SIGNAL writes all stacks while C code keeps Python from running; it lives on."""
    with closing(HeartbeatPage()) as page:
        command = [sys.executable, "-c", HOLDS_THE_LOCK, str(page.fileno())]
        with subprocess.Popen(command, pass_fds=[page.fileno()]) as process:

            def shows_its_stack() -> bool:
                process.send_signal(LOOK_SIGNAL)
                return "hold_the_lock" in page.stacks(PAGE_BYTES)

            try:
                wait_until(lambda: page.read().phase is Phase.STARTING)
                wait_until(shows_its_stack)
                assert process.poll() is None
            finally:
                process.kill()
