"""Functions on real gloo ranks without a cluster."""

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

PEER_S = 2.0
PRELOADED = ["torch", "torchvision", "prefect_torch_ddp.rank.stages", "tests.workloads.healthy"]


@dataclass(frozen=True)
class Died:
    """A rank that left no value."""

    exit_code: int | None


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 60.0
) -> list[Any]:
    """Run `fn(*args)` on gloo ranks that die alone, with torchrun's environment; return values
    or `Died`, by rank.

    When a rank dies the others are killed at once, as a gang is. An exception of a rank fails
    the test with its traceback.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes, processes = [], []
    for rank in range(world_size):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(
            target=_be_rank, args=(sender, store.port, rank, world_size, fn, args), daemon=True
        )
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)
    try:
        return _gather(pipes, processes, time.monotonic() + timeout_s)
    finally:
        for process, pipe in zip(processes, pipes, strict=True):
            process.kill()
            process.join()
            process.close()
            pipe.close()


def _gather(pipes: list[Connection], processes: list[Any], deadline: float) -> list[Any]:
    values: list[Any] = [None] * len(pipes)
    open_pipes = dict(enumerate(pipes))
    while open_pipes:
        ready = wait(list(open_pipes.values()), max(0.0, deadline - time.monotonic()))
        assert ready, f"ranks {sorted(open_pipes)} did not end in time"
        for rank, pipe in list(open_pipes.items()):
            if pipe not in ready:
                continue
            del open_pipes[rank]
            try:
                kind, values[rank] = pipe.recv()
            except EOFError:
                processes[rank].join()
                values[rank] = Died(processes[rank].exitcode)
                return values
            if kind != "value" and wait([process.sentinel for process in processes], PEER_S):
                continue  # it failed because a peer died, and was heard of first
            assert kind == "value", f"rank {rank} failed:\n{values[rank]}"
    return values


def _be_rank(  # noqa: PLR0917 - positional, as Process passes them
    sender: Connection,
    port: int,
    rank: int,
    world_size: int,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    place = {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": world_size,
        "GROUP_RANK": 0,
    }
    os.environ.update({name: str(value) for name, value in place.items()}, GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    try:
        if world_size > 1:
            store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        sender.send(("value", fn(*args)))
    except BaseException:  # noqa: BLE001 - whatever it is, the test shall show it
        sender.send(("error", traceback.format_exc()))
    # Peers may still read what this rank sent last: the test ends the process.
    time.sleep(600)
