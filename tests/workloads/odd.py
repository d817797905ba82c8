"""Functions that behave oddly and end well, or whose end must be told right."""

import atexit
import ctypes
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

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
    """Return, and kill the Dask worker from the rank's exit handlers, while the worker still
    has the value to hand over."""
    atexit.register(lambda: os.kill(psutil.Process().parent().ppid(), signal.SIGKILL))  # type: ignore[union-attr]
    return 8


class _Endless(Exception):  # noqa: N818 - what it is matters, not its name
    def __str__(self) -> str:
        return str(self)

    def __reduce__(self) -> Any:
        return self.__reduce__()


class _Angry(Exception):  # noqa: N818
    def __str__(self) -> str:
        raise SystemExit(9)

    def __reduce__(self) -> Any:
        raise KeyboardInterrupt


def _recurse(depth: int) -> int:
    return _recurse(depth + 1) + 1


def _long_chain() -> None:
    error: Exception | None = None
    for number in range(1_000):
        following = ValueError(f"link {number}")
        following.__cause__ = error
        error = following
    assert error is not None
    raise error


def fail_oddly(how: str) -> None:  # noqa: C901, PLR0912 - one branch an oddity
    """Fail on rank 1 in a way that is hard to tell of; rank 0 waits for it in a collective."""
    import torch.distributed as dist

    if dist.get_rank() != 1:
        dist.barrier()
        return
    match how:
        case "endless":
            raise _Endless
        case "angry":
            raise _Angry
        case "huge":
            raise ValueError("x" * 50_000_000)
        case "group":
            msg = "several"
            raise ExceptionGroup(
                msg, [ValueError("one"), ExceptionGroup("inner", [OSError("two")])]
            )
        case "chain":
            _long_chain()
        case "generator_exit":
            raise GeneratorExit
        case "exit_text":
            sys.exit("a text")
        case "abort":
            os.abort()
        case "recursion":
            _recurse(0)
        case "c_stack":
            sys.setrecursionlimit(10**9)
            repeat: Any = []
            for _ in range(1_000_000):
                repeat = [repeat]
            json.dumps(repeat)
        case "fatal":
            ctypes.pythonapi.Py_FatalError(b"no way on")
        case "no_files":
            os.closerange(3, 1_000)
            msg = "without files"
            raise ValueError(msg)
        case "bad_handler":
            logging.getLogger().handlers[0].emit = None  # type: ignore[method-assign, assignment]
            logging.getLogger("user").warning("unheard")
            msg = "after the log"
            raise ValueError(msg)


def end_well_oddly(how: str) -> int:  # noqa: C901 - one branch an oddity
    """Do what a launcher does not expect, and return."""
    match how:
        case "thread":
            threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
        case "handlers":
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
        case "folder":
            gone = Path(tempfile.mkdtemp())
            os.chdir(gone)
            gone.rmdir()
        case "faulthandler":
            import faulthandler

            faulthandler.enable()
            faulthandler.dump_traceback()
        case "no_death_signal":
            ctypes.CDLL(None).prctl(1, 0)
        case "other_group":
            subprocess.Popen(["sleep", "30"], process_group=0)
        case "holds_stdout":
            subprocess.Popen(["sleep", "3"], start_new_session=True)
    return 9
