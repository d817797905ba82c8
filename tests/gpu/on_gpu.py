"""Functions that run in ranks on CUDA devices and report their place, and a small workload."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from prefect_torch_ddp import RankContext, Report
from prefect_torch_ddp.examples import digits
from tests.workloads import tiny


def where() -> dict[str, Any]:
    """All-reduce CUDA and CPU tensors; tell the device, the backend that took them, and what
    forked us."""
    import torch.distributed as dist

    from prefect_torch_ddp.rank.distributed import current_device, device_name

    device = current_device()
    on_device, on_cpu = torch.ones(1000, device=device), torch.ones(1)
    dist.all_reduce(on_device)
    dist.all_reduce(on_cpu)
    return {
        "device": str(device),
        "current": torch.cuda.current_device(),
        "name": device_name(device),
        "sums": (float(on_device.mean()), float(on_cpu)),
        "backend": dist.group.WORLD._get_backend(device).name(),  # type: ignore[union-attr]
        "parent": Path(f"/proc/{os.getppid()}/comm").read_text(encoding="ascii").strip(),
        "parents_devices": _nvidia_files(os.getppid()),
        "own_devices": _nvidia_files(os.getpid()),
    }


def all_reduce_on_cuda() -> tuple[str, float]:
    """All-reduce a CUDA tensor with only NCCL."""
    import torch.distributed as dist

    device = torch.device("cuda", torch.cuda.current_device())
    value = torch.ones(1, device=device)
    dist.all_reduce(value)
    return str(device), float(value)


def cuda_without_group() -> tuple[str, float]:
    """Compute on the rank's device with no process group."""
    from prefect_torch_ddp.rank.distributed import current_device

    return str(current_device()), float(torch.ones(10, device=current_device()).sum())


def partly_trained() -> nn.Module:
    """Return a model whose bias isn't trained."""
    model = nn.Linear(2, 1).cuda()
    model.bias.requires_grad_(requires_grad=False)
    return model


def run_out_of_memory() -> None:
    """Ask the device for a petabyte."""
    torch.empty(2**50, dtype=torch.uint8, device="cuda")


def tensors() -> dict[str, Any]:
    """Return a tensor that lies on the device."""
    return {"on_gpu": torch.arange(3.0, device="cuda")}


def prepare(ctx: RankContext) -> None:
    """Write the points of the tiny workload."""
    tiny.prepare(ctx)


def train(ctx: RankContext) -> dict[str, Any]:
    """Train with dropout, so that the device's random generator counts, in the way that the
    options name; be killed at the step that they name."""
    assert ctx.device.type == "cuda"
    way = ctx.options.get("way", "plain")
    net = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 2))
    model = ctx.wrap(net)
    call = torch.compile(model) if way == "compiled" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cuda", enabled=way == "scaled", growth_interval=5)
    ctx.track(model=model, optimizer=optimizer, scaler=scaler)
    for points, labels in ctx.steps(
        ctx.loader(tiny.read(ctx, "train"), global_batch_size=8), epochs=4
    ):
        if ctx.attempt == 1 and ctx.step == ctx.options.get("die_at_step"):
            os.kill(os.getpid(), signal.SIGKILL)
        with torch.autocast("cuda", torch.float16, enabled=way == "scaled"):
            loss = cross_entropy(call(points.to(ctx.device)), labels.to(ctx.device))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        ctx.report(loss=loss)
    return {"device": str(ctx.device)}


class Elastic:
    """The tiny workload with dropout, by micro-batches, on any number of ranks."""

    prepare = staticmethod(prepare)

    @staticmethod
    def train(ctx: RankContext) -> dict[str, Any]:
        """Train; be killed as `train` is, on the last rank."""
        assert ctx.device.type == "cuda"
        torch.manual_seed(ctx.seed)
        net = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 2))
        model = ctx.wrap(net)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        ctx.track(model=model, optimizer=optimizer)
        loader = ctx.loader(tiny.read(ctx, "train"), global_batch_size=8)
        for batch in ctx.steps(loader, epochs=4):
            if ctx.attempt == 1 and ctx.step == ctx.options.get("die_at_step"):
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            for (points, labels), weight in ctx.micro_batches(batch):
                loss = cross_entropy(model(points.to(ctx.device)), labels.to(ctx.device))
                (loss * weight).backward()
            optimizer.step()
        return {"world_size": ctx.world_size}

    @staticmethod
    def evaluate(ctx: RankContext) -> Report:
        """Score nothing."""
        return Report(num_samples=1)


def never_come(ctx: RankContext) -> None:
    """Wait in step 2 for rank 1, which sleeps there, with work on the device before it."""
    import torch.distributed as dist

    for (number,) in ctx.steps(ctx.loader(_numbers(8), global_batch_size=2), epochs=1):
        if ctx.step == 2 and ctx.rank == 1:
            time.sleep(600)
        dist.all_reduce(number.to(ctx.device))


def kernels_of(ctx: RankContext, seconds: float) -> int:
    """Have the device work for so long in each of two steps, while the rank waits for it."""
    clock_hz = 1000 * torch.cuda.get_device_properties(ctx.device).clock_rate
    for (number,) in ctx.steps(ctx.loader(_numbers(2), global_batch_size=1), epochs=1):
        torch.cuda._sleep(int(seconds * clock_hz))  # type: ignore[no-untyped-call]
        number.to(ctx.device).item()
        torch.cuda.synchronize()
    return ctx.step


def _numbers(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(float(count)))


def evaluate(ctx: RankContext) -> Report:
    """Score nothing: these tests look at the weights."""
    return Report(num_samples=1)


def _nvidia_files(pid: int) -> int:
    """Count the device files that a process has open: CUDA opens them when it is first used."""
    count = 0
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            count += fd.readlink().name.startswith("nvidia")
        except OSError:  # closed meanwhile
            continue
    return count


class Digits:
    """The digits, which fail if their ranks aren't on a CUDA device."""

    @staticmethod
    def prepare(ctx: RankContext) -> None:
        digits.prepare(ctx)

    @staticmethod
    def train(ctx: RankContext) -> dict[str, Any]:
        assert ctx.device.type == "cuda"
        return dict(digits.train(ctx))

    @staticmethod
    def evaluate(ctx: RankContext) -> Report:
        assert ctx.device.type == "cuda"
        return digits.evaluate(ctx)
