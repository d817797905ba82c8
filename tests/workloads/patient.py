"""Healthy programs that look like hangs to a watch: each ends well if no watch ends it."""

import ctypes
import os
import pdb  # noqa: T100 - what is tested
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import Dataset, TensorDataset

from prefect_torch_ddp import RankContext
from prefect_torch_ddp.data import table
from prefect_torch_ddp.protocol.heartbeat import PHASE, Phase
from prefect_torch_ddp.rank.link import current_link
from tests.support.waiting import wait_until
from tests.workloads.hanging import work


def works_on(how: str, seconds: float) -> str:
    """Communicate; then rank 0 is at something else for long, while the others have returned."""
    _communicate(how)
    if dist.get_rank() == 0:
        _be_busy(how, seconds)
    return how


def _communicate(how: str) -> None:
    dist.all_reduce(torch.ones(1))
    rank, others = dist.get_rank(), range(1, dist.get_world_size())
    if how == "messages":
        for _ in range(3):
            if rank:
                dist.send(torch.ones(1), 0)
            for other in () if rank else others:
                dist.recv(torch.ones(1), other)
    if how == "barrier":
        dist.monitored_barrier()


def _be_busy(how: str, seconds: float) -> None:
    if how == "computing":
        work(seconds)
    elif how in ("in a C function", "holding the lock"):
        library = ctypes.PyDLL(None) if how == "holding the lock" else ctypes.CDLL(None)
        assert library.usleep(int(seconds * 1e6)) == 0, "a signal has cut it short"
    else:
        time.sleep(seconds)


def tracks_and_works_on(ctx: RankContext, how: str, seconds: float) -> int:
    """Do the same after a training that is tracked."""
    model = ctx.wrap(torch.nn.Linear(1, 1))
    ctx.track(model=model)
    loader = ctx.loader(TensorDataset(torch.ones(8, 1)), global_batch_size=2)
    for (x,) in ctx.steps(loader, epochs=1):
        model(x).sum().backward()
    works_on(how, seconds)
    return ctx.step


def breakpoint_in_a_step(ctx: RankContext, seconds: float) -> int:
    """Rank 1 stops at a breakpoint in step 2, and a person continues it much later."""
    loader = ctx.loader(TensorDataset(torch.ones(4)), global_batch_size=ctx.world_size)
    for _ in ctx.steps(loader, epochs=1):
        if ctx.rank == 1 and ctx.step == 2:
            _wait_at_breakpoint(seconds)
        dist.all_reduce(torch.ones(1))
    return ctx.step


def _wait_at_breakpoint(seconds: float) -> None:
    reads, writes = os.pipe()
    person = threading.Timer(seconds, os.write, (writes, b"continue\n"))
    person.start()
    with open(reads) as typed, open(os.devnull, "w") as shown:  # noqa: PTH123 - a descriptor
        pdb.Pdb(stdin=typed, stdout=shown).set_trace()
        person.join()
    os.close(writes)


def forks_a_child_that_returns() -> str:
    """Return what the parent is at by its own heartbeat, once the child has left this function."""
    child = os.fork()
    if child == 0:
        return "child"
    os.waitpid(child, 0)
    return Phase(current_link().heartbeat._words[PHASE]).name


def held_by_a_tracer(ctx: RankContext, folder: str) -> int:
    """Rank 1 prints its process id in step 2, and continues when it is released."""
    loader = ctx.loader(TensorDataset(torch.ones(6)), global_batch_size=ctx.world_size)
    for _ in ctx.steps(loader, epochs=1):
        if ctx.rank == 1 and ctx.step == 2:
            Path(folder, "written").write_text(str(os.getpid()))
            Path(folder, "written").rename(Path(folder, "pid"))
            wait_until(Path(folder, "goes on").exists)
        dist.all_reduce(torch.ones(1))
    return ctx.step


class SlowLater(Dataset[torch.Tensor]):
    """Samples of which all but the first take long on rank 0."""

    def __init__(self, seconds: float) -> None:
        """Take so long for each of them."""
        self._seconds = seconds

    def __len__(self) -> int:
        """Have two samples for each of two ranks."""
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        """Load one."""
        self._num_loaded = getattr(self, "_num_loaded", 0) + 1
        if self._num_loaded > 1 and dist.get_rank() == 0:
            time.sleep(self._seconds)
        return torch.ones(1)


def receives_from_a_rank_ahead(ctx: RankContext, seconds: float) -> int:
    """Rank 0 sends in its second step what rank 1 waits for in its first, and loads for long."""
    loader = ctx.loader(SlowLater(seconds), global_batch_size=2)
    for _ in ctx.steps(loader, epochs=1):
        if ctx.rank == 0 and ctx.step == 2:
            dist.send(torch.ones(1), 1)
        elif ctx.rank == 1 and ctx.step == 1:
            dist.recv(torch.ones(1), 0)
    return ctx.step


def leaves_the_loop(ctx: RankContext) -> int:
    """Rank 0 leaves the loop by itself, and a collective follows in which all ranks wait."""
    model = ctx.wrap(torch.nn.Linear(1, 1))
    loader = ctx.loader(TensorDataset(torch.ones(32, 1)), global_batch_size=4)
    for (x,) in ctx.steps(loader, epochs=1):
        model(x).sum().backward()
        if ctx.rank == 0 and ctx.step == 3:
            break
    dist.barrier()
    return ctx.step


def messages_to_a_sleeper(ctx: RankContext) -> int:
    """Ranks 1 and 2 send rank 0 something in each step; it sleeps in the third for ever."""
    loader = ctx.loader(TensorDataset(torch.ones(12)), global_batch_size=3)
    for _ in ctx.steps(loader, epochs=1):
        if ctx.rank == 0 and ctx.step == 3:
            time.sleep(300.0)
        for other in range(1, ctx.world_size):
            if ctx.rank == other:
                dist.send(torch.ones(1), 0)
            elif ctx.rank == 0:
                dist.recv(torch.ones(1), other)
        dist.all_reduce(torch.ones(1))
    return ctx.step


def steps_for(ctx: RankContext, seconds: float, folder: str) -> int:
    """Make steps for a while, and say in a file that they are under way."""
    loader = ctx.loader(TensorDataset(torch.ones(4000)), global_batch_size=ctx.world_size)
    ends_s = time.monotonic() + seconds
    for _ in ctx.steps(loader, epochs=1):
        stops = torch.tensor(float(time.monotonic() > ends_s))
        dist.all_reduce(stops)
        if ctx.step == 3 and ctx.rank == 0:
            open(f"{folder}/moves", "x").close()  # noqa: PTH123
        if stops:
            break
        time.sleep(0.05)
    return ctx.step


def opens_a_copy(where: str, copies: str) -> int:
    """Open a table's local copy, for which another process may hold the lock."""
    return len(table(where, local_copy=copies))
