"""Functions and trainings on real gloo ranks without a cluster."""

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from prefect_torch_ddp.checkpoint.attempts import claim_attempt
from prefect_torch_ddp.params import CheckpointParams
from prefect_torch_ddp.rank.config import RankConfig
from prefect_torch_ddp.rank.process.failure import is_collateral
from prefect_torch_ddp.rank.stages import run_with_context
from prefect_torch_ddp.storage.directory import DirectoryStorage
from tests.support.waiting import HANG_S


@dataclass(frozen=True)
class Died:
    """A rank that left no value."""

    exit_code: int | None


def config_for(folder: Path, every_steps: int | None = 2, **fields: Any) -> RankConfig:
    """Describe a training whose checkpoints come so often; claims the run's next attempt."""
    storage = DirectoryStorage(folder)
    policy = CheckpointParams(every_steps=every_steps, every_s=None)
    attempt = claim_attempt(storage, "run")
    return RankConfig("run", attempt, "train", storage, checkpoint=policy, **fields)


def train_on(world_size: int, config: RankConfig, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Run `fn(context, *args)` on so many ranks."""
    return run_ranks(run_with_context, world_size, config, fn, args)


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Run `fn(*args)` on gloo ranks that die alone, with torchrun's environment; return values
    or `Died`, by rank.

    When a rank dies the others are killed at once, as a gang is. An exception of a rank fails
    the test with its traceback.
    """
    context = multiprocessing.get_context("forkserver")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes, processes = [], []
    for rank in range(world_size):
        receiver, sender = context.Pipe(duplex=False)
        place = {"rank": rank, "world_size": world_size}
        process = context.Process(target=_be_rank, args=(sender, store.port, place, fn, args))
        process.daemon = True
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)
    try:
        return _gather(pipes, processes)
    finally:
        for process, pipe in zip(processes, pipes, strict=True):
            process.kill()
            process.join()
            process.close()
            pipe.close()


def _gather(pipes: list[Connection], processes: list[Any]) -> list[Any]:
    values: list[Any] = [None] * len(pipes)
    failed: list[str] = []
    open_pipes = dict(enumerate(pipes))
    deadline = time.monotonic() + HANG_S
    while open_pipes:
        ready = wait(list(open_pipes.values()), max(0.0, deadline - time.monotonic()))
        assert ready, f"ranks {sorted(open_pipes)} did not end; others failed: {failed}"
        for rank, pipe in [(rank, pipe) for rank, pipe in open_pipes.items() if pipe in ready]:
            del open_pipes[rank]
            try:
                kind, values[rank] = pipe.recv()
            except EOFError:
                processes[rank].join()
                values[rank] = Died(processes[rank].exitcode)
                return values
            if kind != "value":
                failed.append(f"rank {rank} failed:\n{values[rank]}")
            # A peer's failure is heard of before the one that it follows from, now and then.
            assert kind != "cause", failed[-1]
    assert not failed, failed
    return values


def _be_rank(
    sender: Connection,
    port: int,
    place: dict[str, int],
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    names = {"rank": "LOCAL_RANK", "world_size": "LOCAL_WORLD_SIZE"}
    for name, value in place.items():
        os.environ[name.upper()] = os.environ[names[name]] = str(value)
    os.environ.update(GROUP_RANK="0", GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    try:
        if place["world_size"] > 1:
            store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
            dist.init_process_group("gloo", store=store, **place)
        sender.send(("value", fn(*args)))
    except BaseException as error:  # noqa: BLE001 - whatever it is, the test shall show it
        kind = "consequence" if is_collateral(error) else "cause"
        sender.send((kind, traceback.format_exc()))
    # Peers may still read what this rank sent last: the test ends the process.
    time.sleep(600)
