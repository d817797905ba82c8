"""Functions that fail, each in one way, in all attempts or in some.

Torch is imported inside: the test process need not load it.
"""

import argparse
import ctypes
import json
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.workloads import write_pid

if TYPE_CHECKING:
    from prefect_torch_ddp import RankContext

LATER = ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "WORLD_SIZE", "RANK")
WORDS = "the user's own words"


class AwkwardError(Exception):
    """Pickles but doesn't unpickle: its arguments aren't its constructor's."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{reason} ({code})")


class _MuteError(Exception):
    def __str__(self) -> str:
        raise ValueError


class _EndlessError(Exception):
    def __str__(self) -> str:
        return str(self)

    def __reduce__(self) -> Any:
        return self.__reduce__()


class _AngryError(Exception):
    def __str__(self) -> str:
        raise SystemExit(9)

    def __reduce__(self) -> Any:
        raise KeyboardInterrupt


def _wait_in_collective() -> None:
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(1))


def only_on(culprit: int, how: str) -> str:  # noqa: C901 - one branch a fault
    """Fail on one rank in the way named; the others wait for it in a collective."""
    if int(os.environ["RANK"]) != culprit:
        _wait_in_collective()
        return "done"
    match how:
        case "raise":
            raise ValueError(WORDS)
        case "raise_awkward":
            raise AwkwardError(3, "won't unpickle")
        case "raise_timeout":
            msg = "the user's own timeout"
            raise TimeoutError(msg)
        case "slow_finally" | "slow_after_leaving" | "collective_in_finally":
            try:
                raise ValueError(WORDS)
            finally:
                _clean_up(how)
        case "sys_exit" | "sys_exit_0" | "sys_exit_none":
            sys.exit({"sys_exit": 3, "sys_exit_0": 0}.get(how))
        case "os_exit":
            os._exit(3)
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


def _clean_up(how: str) -> None:
    import torch.distributed as dist

    if how == "collective_in_finally":
        _wait_in_collective()
        _wait_in_collective()
        return
    if how == "slow_after_leaving":
        dist.destroy_process_group()
    time.sleep(1.5)


def fail_oddly(how: str) -> None:  # noqa: C901, PLR0912, PLR0915 - one branch an oddity
    """Fail on rank 1 in a way that is hard to report; rank 0 waits for it in a collective."""
    import torch.distributed as dist

    if dist.get_rank() != 1:
        dist.barrier()
        return
    match how:
        case "mute":
            raise _MuteError
        case "endless":
            raise _EndlessError
        case "angry":
            raise _AngryError
        case "huge":
            raise ValueError("x" * 50_000_000)
        case "group":
            inner = ExceptionGroup("inner", [OSError("two")])
            msg = "several"
            raise ExceptionGroup(msg, [ValueError("one"), inner])
        case "chain":
            error = ValueError("link 0")
            for number in range(1, 1_000):
                following = ValueError(f"link {number}")
                following.__cause__ = error
                error = following
            raise error
        case "generator_exit":
            raise GeneratorExit
        case "exit_text":
            sys.exit("a text")
        case "usage":
            parser = argparse.ArgumentParser()
            parser.add_argument("--lr", required=True)
            parser.parse_args([])
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


def _recurse(depth: int) -> int:
    return _recurse(depth + 1) + 1


def print_then_fail_together(num_lines: int) -> None:
    """Print, meet, and fail on all ranks at once: some are killed before they can say so."""
    import torch.distributed as dist

    if os.environ["RANK"] == "0":
        for number in range(num_lines):
            print(f"line {number}")
    dist.barrier()
    msg = "all at once"
    raise ValueError(msg)


def die_while_loading(context: str) -> None:
    """Be killed on rank 1 with two DataLoader workers under it, as on rank 0, which waits in a
    collective."""
    from torch.utils.data import DataLoader

    from tests.workloads.plain import Squares

    squares: Any = Squares(10)
    loader = DataLoader(squares, batch_size=2, num_workers=2, multiprocessing_context=context)
    batches = iter(loader)
    next(batches)
    _wait_in_collective()
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    _wait_in_collective()


def sleep_for_ever(pid_folder: str) -> None:
    """Write this rank's pid, then sleep."""
    write_pid(pid_folder, os.environ["RANK"])
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


def leave_early(ctx: "RankContext", leaver: int) -> int:
    """Track and step as a workload does; the leaver returns in step 5."""
    import torch
    from torch.utils.data import TensorDataset

    model = ctx.wrap(torch.nn.Linear(1, 1))
    ctx.track(model=model)
    loader = ctx.loader(TensorDataset(torch.ones(32, 1)), global_batch_size=8)
    for (x,) in ctx.steps(loader, epochs=5):
        if ctx.step == 5 and ctx.rank == leaver:
            break
        model(x).sum().backward()
    return ctx.step


# ---- In some attempts, and not in others.


def attempt_now() -> int:
    """Return the attempt that this rank belongs to, from 1."""
    return int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1


def fail_in(attempts: list[int], how: str, folder: str) -> dict[str, Any]:
    """Leave the parent's pid in the folder; fail on the last rank in the attempts named;
    else return the rank's number of restarts."""
    import torch
    import torch.distributed as dist

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    Path(folder, f"{attempt_now()}-{rank}").write_text(str(os.getppid()))
    dist.barrier()
    if attempt_now() in attempts and rank == size - 1:
        fail(how)
    total = torch.ones(1)
    dist.all_reduce(total)
    told = {name: os.environ[name] for name in LATER}
    return {"total": float(total), "value": attempt_now(), **told}


def fail(how: str) -> None:
    """Fail in the way named."""
    match how:
        case "ValueError":
            msg = "told to fail"
            raise ValueError(msg)
        case "OSError":
            msg = "the shelf is empty"
            raise OSError(msg)
        case _:
            os.kill(os.getpid(), signal.Signals[how])


def fail_everywhere() -> None:
    """Fail on every rank in the same way, once all are there."""
    import torch.distributed as dist

    dist.barrier()
    msg = "bad lr"
    raise ValueError(msg)


def hold_in_first(folder: str) -> int:
    """In the first attempt write the parent's pid and wait to be killed; later return the
    world's size."""
    import torch
    import torch.distributed as dist

    if attempt_now() == 1:
        write_pid(folder, os.environ["RANK"], os.getppid())
        signal.pause()
    total = torch.ones(1)
    dist.all_reduce(total)
    return int(total)
