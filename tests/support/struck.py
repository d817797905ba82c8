"""The training that a seeded fault strikes: which rank, how, and in which state that rank
and its peers are then."""

import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal

How = Literal[
    "exception", "slow_finally", "SIGKILL", "SIGSEGV", "os_exit", "sys_exit", "return", "memory"
]
State = Literal["asleep", "collective", "forward", "backward", "loader"]

NUM_STEPS = 6
STRUCK_STEPS = (0, 2, 3)
"""Not 1: the forward pass in which DDP lays its buckets out again waits for all ranks, so none
would arrive in a later state."""
BATCH_SIZE = 2
EXIT_CODE = 3
WORDS = "the user's own words"
STRIKE = signal.SIGUSR1
BY_HANDLER: tuple[How, ...] = ("exception", "slow_finally", "sys_exit", "return", "memory")
"""Raised in Python, so no rank that is blocked within C++ can be struck by them."""


@dataclass(frozen=True)
class Fault:
    """One fault, all of it decided beforehand."""

    name: str
    how: How
    culprit: int
    states: tuple[State, ...]
    """Where each rank is when the fault strikes, by rank."""
    step: int
    delay_s: float
    """Between the last rank's arrival in its state and the strike."""
    num_workers: int
    """DataLoader workers of each rank."""
    in_worker: bool
    """Whether it strikes a DataLoader worker of the culprit instead of the rank itself."""
    from_outside: bool
    """Whether another process sends the signal."""
    destroys_group: bool
    """Whether the slow cleanup takes the process group down first, as scripts for torchrun
    do."""


class _LeaveEarly(BaseException):
    """Takes the rank out of whatever it is in, to the return of its function."""


class Spot:
    """The point at which one rank stops and waits for the fault. Travels into forked
    DataLoader workers."""

    def __init__(self, fault: Fault, folder: Path, rank: int) -> None:
        """Take the fault, the folder in which ranks tell that they arrived, and whose spot this
        is."""
        self._fault = fault
        self._folder = folder
        self._rank = rank
        self._heard = threading.Event()
        self.is_culprit = rank == fault.culprit
        _write(folder / f"pid-{rank}", os.getpid())

    def arm(self, step: int) -> None:
        """At the start of the step in question: have the fault strike this process as soon as
        all ranks have arrived."""
        fault = self._fault
        if (
            step == fault.step
            and self.is_culprit
            and not fault.in_worker
            and not fault.from_outside
        ):
            self._arm()

    def _arm(self) -> None:
        threading.Thread(target=self._strike, args=(threading.get_ident(),), daemon=True).start()

    def _strike(self, thread_id: int) -> None:
        wait_for_ranks(self._folder, "ready", len(self._fault.states))
        time.sleep(self._fault.delay_s)
        if self._fault.how == "os_exit":
            os._exit(EXIT_CODE)
        # To the thread that is in the state, as else its system call would not be interrupted.
        number = STRIKE if self._fault.how in BY_HANDLER else signal.Signals[self._fault.how]
        signal.pthread_kill(thread_id, number)
        # Python notes a signal and calls the handler later: one that comes just before `sleep`
        # does wouldn't wake it.
        while not self._heard.wait(0.2):
            signal.pthread_kill(thread_id, number)

    def at(self, state: State, step: int) -> None:
        """Stay here for ever if this is the state and the step; for an early return, until the
        culprit has left."""
        if step != self._fault.step or state != self._fault.states[self._rank]:
            return
        in_worker = os.getpid() != int((self._folder / f"pid-{self._rank}").read_text())
        if in_worker:
            _write(self._folder / f"worker-{self._rank}", os.getpid())
            if self.is_culprit and self._fault.in_worker and not self._fault.from_outside:
                self._arm()
        _write(self._folder / f"ready-{self._rank}", os.getpid())
        # Not Path.exists, which takes the ValueError of a strike for a path that can't be.
        left = str(self._folder / "left")
        while not os.access(left, os.F_OK):
            self._busy(state)

    def _busy(self, state: State) -> None:
        if state in ("asleep", "loader"):
            time.sleep(0.01 if self._fault.how == "return" else 600)
            return
        import torch

        side = torch.ones(64, 64)
        for _ in range(20):
            side @ side

    def in_collective(self, step: int, group: Any) -> None:
        """Be stuck in a collective that not all ranks take part in, if that is the state."""
        if step != self._fault.step or self._fault.states[self._rank] != "collective":
            return
        import torch
        import torch.distributed as dist

        _write(self._folder / f"ready-{self._rank}", os.getpid())
        if not self.is_culprit or self._fault.how not in BY_HANDLER:
            dist.all_reduce(torch.ones(1), group=group)
            return
        work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
        while not work.is_completed():
            time.sleep(0.001)

    def leave_early(self) -> str:
        """Return early, and let the peers continue until they need this rank."""
        _write(self._folder / "left", os.getpid())
        return "early"

    def clean_up(self) -> None:
        if not self.is_culprit or self._fault.how != "slow_finally":
            return
        import torch.distributed as dist

        if self._fault.destroys_group:
            dist.destroy_process_group()
        time.sleep(0.8)

    def on_strike(self, _signal: int, _frame: FrameType | None) -> None:
        """Do what the fault does; runs in the thread and the frame that are in the state."""
        if self._heard.is_set():
            return
        self._heard.set()
        match self._fault.how:
            case "sys_exit":
                sys.exit(EXIT_CODE)
            case "return":
                raise _LeaveEarly
            case "memory":
                bytearray(1 << 60)
        raise ValueError(WORDS)


class _Numbers:
    def __init__(self, spot: Spot) -> None:
        self._spot = spot

    def __len__(self) -> int:
        return NUM_STEPS * BATCH_SIZE

    def __getitem__(self, index: int) -> Any:
        import torch

        self._spot.at("loader", index // BATCH_SIZE)
        return torch.full((4,), float(index))


def train(fault: Fault, folder: str) -> str:
    """Train on all ranks until the fault strikes."""
    spot = Spot(fault, Path(folder), int(os.environ["RANK"]))
    signal.signal(STRIKE, spot.on_strike)
    try:
        _train(fault, spot)
    except _LeaveEarly:
        return spot.leave_early()
    finally:
        spot.clean_up()
    return "done"


def _train(fault: Fault, spot: Spot) -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader

    groups = dist.new_group(), dist.new_group()
    step = 0
    first = torch.nn.Linear(4, 8)
    first.register_forward_hook(lambda *_: spot.at("forward", step))
    first.register_full_backward_hook(lambda *_: spot.at("backward", step))
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(4, 4), first, torch.nn.Linear(8, 1))
    )
    loader: DataLoader[Any] = DataLoader(
        _Numbers(spot),  # type: ignore[arg-type]  # a dataset is what has a length and items
        batch_size=BATCH_SIZE,
        num_workers=fault.num_workers,
        multiprocessing_context="fork" if fault.num_workers else None,
    )
    batches = iter(loader)
    for step in range(NUM_STEPS):
        spot.arm(step)
        batch = next(batches)
        spot.at("asleep", step)
        # Of two groups, so that it does not complete if all ranks are in a collective.
        spot.in_collective(step, groups[spot.is_culprit])
        model(batch).mean().backward()


def wait_for_ranks(folder: Path, what: str, num_ranks: int) -> None:
    """Wait until all ranks have arrived."""
    while len(list(folder.glob(f"{what}-*"))) < num_ranks:
        time.sleep(0.002)


def _write(path: Path, number: int) -> None:
    path.parent.joinpath(f".{path.name}").write_text(str(number))
    path.parent.joinpath(f".{path.name}").rename(path)
