"""Ranks that go wrong, each in one way.

Torch is imported inside: the test process need not load it.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any


class AwkwardError(Exception):
    """An exception that pickles but doesn't unpickle: its arguments aren't its
    constructor's."""

    def __init__(self, code: int, reason: str) -> None:
        """Keep one text only."""
        super().__init__(f"{reason} ({code})")


def _wait_in_collective() -> None:
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(1))


def only_on(  # noqa: C901, PLR0912 - one branch a fault
    culprit: int, how: str, code: int = 3
) -> str:
    """Fail on one rank in the way named; the others wait for it in a collective."""
    if int(os.environ["RANK"]) != culprit:
        _wait_in_collective()
        return "done"
    match how:
        case "raise":
            msg = "the user's own words"
            raise ValueError(msg)
        case "raise_awkward":
            raise AwkwardError(code, "won't unpickle")
        case "raise_timeout":
            msg = "the user's own timeout"
            raise TimeoutError(msg)
        case "slow_finally":
            try:
                msg = "the user's own words"
                raise ValueError(msg)
            finally:
                time.sleep(1.0)
        case "slow_after_leaving":
            return _slow_after_leaving()
        case "collective_in_finally":
            return _collective_in_finally()
        case "sys_exit":
            sys.exit(code)
        case "os_exit":
            os._exit(code)
        case "return":
            return "early"
        case "interrupt":
            raise KeyboardInterrupt
        case "memory":
            raise MemoryError
        case _:
            print("last words", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.Signals[how])
            time.sleep(60)
    return "unreachable"


def _slow_after_leaving() -> str:
    import torch.distributed as dist

    try:
        msg = "the user's own words"
        raise ValueError(msg)
    finally:
        dist.destroy_process_group()
        time.sleep(1.5)


def _collective_in_finally() -> str:
    import torch
    import torch.distributed as dist

    try:
        msg = "the user's own words"
        raise ValueError(msg)
    finally:
        dist.all_reduce(torch.ones(1))
        dist.all_reduce(torch.ones(1))


def die_while_loading(context: str) -> None:
    """Be killed on rank 1 with two DataLoader workers under it, as on rank 0, which waits in a
    collective."""
    from torch.utils.data import DataLoader

    from tests.workloads.squares import Squares

    batches = iter(
        DataLoader(Squares(10), batch_size=2, num_workers=2, multiprocessing_context=context)
    )
    next(batches)
    _wait_in_collective()
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    _wait_in_collective()


def sleep_for_ever(pid_folder: str) -> None:
    """Write this rank's pid, then sleep."""
    path = Path(pid_folder, os.environ["RANK"])
    path.with_suffix(".tmp").write_text(str(os.getpid()))
    path.with_suffix(".tmp").rename(path)
    time.sleep(600)


def unpicklable_value() -> Any:
    """Return what no pickle takes, on rank 1."""
    return threading.Lock() if os.environ["RANK"] == "1" else None


def initialise_again() -> None:
    """Do what scripts for torchrun do."""
    import torch.distributed as dist

    dist.init_process_group("gloo")


def stamp_and_die(path: str) -> None:
    """Meet, write the time, and be killed, on rank 1; the others wait for it in a
    collective."""
    _wait_in_collective()
    if os.environ["RANK"] == "1":
        Path(path).write_text(repr(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    _wait_in_collective()
