"""Owns functions that behave oddly and end well, or whose end must be told right."""

import atexit
import logging
import os
import signal
import subprocess
import sys
import time

import psutil


def close_stdout() -> int:
    """Close what the launcher flushes."""
    sys.stdout.close()
    return 5


def log_much() -> int:
    """Log one record that is long and not ASCII."""
    logging.getLogger("user.code").info("\U0001f600" * 100_000)
    return 6


def leave_a_writer() -> int:
    """Leave a process behind that writes for ever."""
    subprocess.Popen(["yes"])
    return 7


def meet_after_rank_0_returned() -> int:
    """On rank 1, use the store and make a group long after rank 0 returned."""
    import torch.distributed as dist

    if dist.get_rank() == 1:
        time.sleep(4)
        group = dist.new_group([1], use_local_synchronization=True)
        dist.barrier(group)
    return dist.get_rank()


class _Mute:
    def __str__(self) -> str:
        msg = "no text"
        raise ValueError(msg)


def raise_mute() -> None:
    """Raise an exception that can't be turned into text."""
    raise RuntimeError(_Mute())


def print_then_fail_together(num_lines: int) -> None:
    """Print, meet, and fail on all ranks at once: some are killed before they can say so."""
    import torch.distributed as dist

    if os.environ["RANK"] == "0":
        for number in range(num_lines):
            print(f"line {number}")
    dist.barrier()
    msg = "all at once"
    raise ValueError(msg)


def kill_worker_at_exit() -> int:
    """Return, and kill the Dask worker from the rank's exit handlers, while the worker still has the value to hand over."""
    atexit.register(lambda: os.kill(psutil.Process().parent().ppid(), signal.SIGKILL))  # type: ignore[union-attr]
    return 8
