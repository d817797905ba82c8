"""Functions without a context: what ranks are, are given and return, and odd ones that end well.

Torch is imported inside: the test process need not load it.
"""

import atexit
import collections
import ctypes
import dataclasses
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests.support.waiting import wait_until
from tests.workloads import write_pid

CONTRACT = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
)
NAMES = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR")
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_SOCKET_FAMILY")


@dataclasses.dataclass
class Point:
    """A value of a user's own class."""

    x: int


class Squares:
    """A dataset of the squares of 0 to n-1, which spawned DataLoader workers can import."""

    def __init__(self, num_samples: int, transform: Callable[[int], int] | None = None) -> None:
        self._num_samples = num_samples
        self._transform = transform

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> int:
        square = index * index
        return self._transform(square) if self._transform else square


def sum_of_ones() -> float:
    """All-reduce a one; every rank gets world_size."""
    import torch
    import torch.distributed as dist

    ones = torch.ones(1)
    dist.all_reduce(ones)
    return float(ones)


def awkward_names(  # noqa: PLR0917 - names that launchers like to steal
    key: int,
    retries: int,
    rank: int,
    workers: int,
    backend: str = "mine",
    timeout: float = 1.5,
    world_size: int = 9,
) -> Any:
    """Return the arguments, whose names launchers like to steal."""
    return locals()


def values() -> dict[str, Any]:
    """Return values of all kinds, marked with the rank."""
    import numpy as np
    import torch

    rank = int(os.environ["RANK"])
    counts: dict[str, int] = collections.defaultdict(int)
    counts["a"] = rank
    return {
        "none": None,
        "defaultdict": counts,
        "dataclass": Point(rank),
        "numpy": np.full(3, rank),
        "tensor": torch.full((2,), float(rank)),
        "nested": {"loss": [rank, (rank, {"x": torch.tensor(rank)})]},
    }


def environment() -> dict[str, str]:
    """Return the rank's environment."""
    return dict(os.environ)


def process_id() -> int:
    """Return the rank's process id."""
    return os.getpid()


def torchrun_style() -> float:
    """Initialise the process group as everything written for torchrun does."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = sum_of_ones()
    dist.destroy_process_group()
    return total


def speak_many_tongues() -> None:
    """Print and log what neither ASCII nor Latin-1 has, and what no encoding has."""
    print("grün \U0001f600", "lone \udcfc")
    print("häßlich \U0001f600", file=sys.stderr)
    logging.getLogger("user.code").warning("größer \U0001f600")


def speak(text: str) -> None:
    """Print, write to stderr and log."""
    print(f"printed {text}")
    print(f"complained {text}", file=sys.stderr)
    logging.getLogger("user.code").warning("logged %s", text)


def flood(num_lines: int) -> None:
    """Print many lines on each rank, with a record of the last rank's in their midst."""
    rank = int(os.environ["RANK"])
    for number in range(num_lines):
        print(f"rank {rank} prints line {number}")
        if number == num_lines // 2 and rank == int(os.environ["WORLD_SIZE"]) - 1:
            logging.getLogger("user.code").warning("half of it\nis done")


def say_the_same_and_fail(rank: int) -> None:
    """Say the same on all ranks, print on one, and fail there once the others wait for it."""
    import torch.distributed as dist

    print("all say this")
    logging.getLogger("prefect_torch_ddp.own").info("all log this")
    dist.barrier()
    if dist.get_rank() == rank:
        print("my last words")
        msg = "a bug"
        raise ValueError(msg)
    dist.barrier()


def load_with_workers(context: str | None) -> int:
    """Read a dataset through two DataLoader workers."""
    from torch.utils.data import DataLoader

    squares: Any = Squares(10, (lambda x: x + 1) if context == "fork" else None)
    loader = DataLoader(squares, batch_size=2, num_workers=2, multiprocessing_context=context)
    return int(sum(batch.sum() for batch in loader))


def time_of_first_all_reduce() -> float:
    """Return when this rank's first all-reduce was done, in seconds since the epoch."""
    sum_of_ones()
    return time.time()


def whereabouts() -> dict[str, Any]:
    """All-reduce over the default group and one of our own; tell the sum, the environment and
    the addresses in use."""
    import torch
    import torch.distributed as dist

    total = torch.ones(1)
    dist.all_reduce(total)
    dist.all_reduce(total, group=dist.new_group(backend="gloo"))
    connections = psutil.Process().net_connections("tcp")

    def addresses(status: str) -> list[str]:
        # An IPv4 address may be written as an IPv6 one.
        own = (each.laddr.ip for each in connections if each.status == status)
        return sorted({address.removeprefix("::ffff:") for address in own})

    found = {
        "sum": float(total),
        "env": {name: os.environ.get(name) for name in (*NAMES, *INTERFACES)},
        "listens_at": addresses(psutil.CONN_LISTEN),
        "talks_from": addresses(psutil.CONN_ESTABLISHED),
    }
    dist.barrier()  # peers look at their connections to us too
    return found


def meet_after_rank_0_returned() -> int:
    """On rank 1, use the store and make a group long after rank 0 returned."""
    import torch.distributed as dist

    if dist.get_rank() == 1:
        time.sleep(4)
        group = dist.new_group([1], use_local_synchronization=True)
        dist.barrier(group)
    return dist.get_rank()


def kill_worker_at_exit() -> int:
    """Return, and kill the Dask worker from the rank's exit handlers, while the worker still
    has the value to hand over."""
    # There may be two between rank and worker.
    server = "prefect_torch_ddp.rank.process.fork_server"
    above = (each for each in psutil.Process().parents() if server not in each.cmdline())
    atexit.register(os.kill, next(above).pid, signal.SIGKILL)
    return 8


def end_well_oddly(*hows: str) -> int:
    """Do what a launcher does not expect, and return."""
    for how in hows:
        _be_odd(how)
    return 9


def _be_odd(how: str) -> None:  # noqa: C901 - one branch an oddity
    match how:
        case "closes_stdout":
            sys.stdout.close()
        case "logs_much":
            logging.getLogger("user.code").info("\U0001f600" * 100_000)
        case "leaves_a_writer":
            subprocess.Popen(["yes"])
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


def meet_until(folder: str) -> float:
    """All-reduce until rank 0 sees the file `enough`, then once more in a group made then."""
    import torch
    import torch.distributed as dist

    if dist.get_rank() == 0:
        write_pid(folder, "port", os.environ["MASTER_PORT"])
    write_pid(folder, dist.get_rank())
    is_over = torch.zeros(1)
    while not is_over:
        if dist.get_rank() == 0 and Path(folder, "enough").exists():
            is_over += 1
        dist.all_reduce(is_over)
        time.sleep(0.01)  # the pace of a step with work in it
    total = torch.ones(1)
    dist.all_reduce(total, group=dist.new_group(backend="gloo"))
    return float(total)


def attempt_once_released(folder: str) -> int:
    """Wait for the file `release`; return how many attempts were made before this one."""
    write_pid(folder, os.environ["RANK"])
    wait_until(Path(folder, "release").exists)
    return int(os.environ["TORCHELASTIC_RESTART_COUNT"])
