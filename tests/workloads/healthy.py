"""A small float64 workload whose results compare to the last bit, and the means to run
functions on real gloo ranks."""

import hashlib
import io
import json
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from prefect_torch_ddp import RankContext, Report
from prefect_torch_ddp.checkpoint.manifest import list_manifests
from prefect_torch_ddp.data.sampler import mix_seed

NUM_CLASSES = 3
PEER_S = 2.0


def prepare(ctx: RankContext) -> None:
    """Write `num_samples` points of 4 numbers, float64, and their classes."""
    inputs, targets = points(ctx.options.get("num_samples", 33))
    torch.save({"inputs": inputs, "targets": targets}, ctx.data / "points.pt")


def train(ctx: RankContext) -> dict[str, Any]:
    """Train with batch norm, dropout, momentum and a schedule; say what the weights hash to.

    Dies where the options say.
    """
    data = ctx.data / "points.pt"
    dataset = TensorDataset(*torch.load(data, weights_only=True).values())
    return fit(ctx, dataset)


def evaluate(ctx: RankContext) -> Report:
    """Say what the restored weights amount to."""
    model = make_net()
    ctx.track(model=model)
    points = torch.load(ctx.data / "points.pt", weights_only=True)
    model.eval()
    right = (model(points["inputs"]).argmax(dim=1) == points["targets"]).double().mean()
    return Report(
        num_samples=len(points["targets"]), accuracy=right.item(), metrics={"step": ctx.step}
    )


def points(num_samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs float64 [n, 4] and targets int64 [n], the same ones always."""
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(num_samples, 4, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(NUM_CLASSES, (num_samples,), generator=generator)


def make_net(dropout: float = 0.25) -> nn.Sequential:
    """Return a float64 network from [batch, 4] to [batch, 3]."""
    layers = (
        nn.Linear(4, 16),
        nn.BatchNorm1d(16),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(16, NUM_CLASSES),
    )
    return nn.Sequential(*layers).double()


def fit(ctx: RankContext, dataset: Dataset[Any]) -> dict[str, Any]:
    """Train; options: epochs, global_batch_size, die_at (step), die_on (rank), stop_at,
    save_at."""
    options = ctx.options
    bare = make_net()
    model = ctx.wrap(bare)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)
    ctx.track(optimizer=optimizer, model=model, scheduler=scheduler)
    loader = ctx.loader(dataset, global_batch_size=options.get("global_batch_size", 12))
    for inputs, targets in ctx.steps(loader, epochs=options.get("epochs", 4)):
        loss = nn.functional.cross_entropy(model(inputs.to(ctx.device)), targets.to(ctx.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        ctx.report(loss=loss)
        if ctx.step == options.get("stop_at") and ctx.rank == options.get("stop_on", 0):
            ctx.request_stop("the test says so")
        if ctx.step == options.get("die_at") and ctx.rank == options.get("die_on", 0):
            _die_after_checkpoint(ctx, options.get("die_after"))
    return {"sha256": sha256_of_weights(bare), "steps": ctx.step}


def _die_after_checkpoint(ctx: RankContext, step: int | None) -> None:
    """Kill this process, once the checkpoint of a step is on record: otherwise there may be
    none to resume from."""
    deadline = time.monotonic() + 20
    while step is not None and time.monotonic() < deadline:
        if step in {manifest.step for manifest in list_manifests(ctx.config.storage, ctx.run_id)}:
            break
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def sha256_of_weights(model: nn.Module) -> str:
    """Hash parameters and buffers, to the last bit."""
    digest = hashlib.sha256()
    for name, value in model.state_dict().items():
        buffer = io.BytesIO()
        buffer.write(name.encode())
        buffer.write(value.detach().cpu().contiguous().numpy().tobytes())
        digest.update(buffer.getvalue())
    return digest.hexdigest()


def draw(ctx: RankContext) -> dict[str, Any]:
    """Say what the random generators give before the first step, and in it."""
    before = torch.rand(1).item()
    dataset = TensorDataset(torch.arange(8))
    inside = [
        torch.rand(1).item() for _ in ctx.steps(ctx.loader(dataset, global_batch_size=4), epochs=1)
    ]
    return {"before": before, "inside": json.dumps(inside), "mixed": mix_seed(ctx.seed)}


# ---- Real ranks without a cluster.


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
    context.set_forkserver_preload(
        ["torch", "torchvision", "prefect_torch_ddp.rank.stages", "tests.workloads.healthy"]
    )
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
