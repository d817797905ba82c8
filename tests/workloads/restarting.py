"""Functions that fail in some attempts and not in others.

Torch is imported inside: the test process need not load it.
"""

import json
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefect_torch_ddp.checkpoint.manifest import list_checkpoints

if TYPE_CHECKING:
    from prefect_torch_ddp import RankContext

LATER = ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "WORLD_SIZE", "RANK")


def attempt_now() -> int:
    """Return the attempt that this rank belongs to, from 1."""
    return int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1


def fail_in(attempts: list[int], how: str, folder: str) -> dict[str, Any]:
    """Leave the parent's pid in the folder; fail on the last rank in the attempts named; else
    return what the rank was told."""
    import torch
    import torch.distributed as dist

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    Path(folder, f"{attempt_now()}-{rank}").write_text(str(os.getppid()))
    dist.barrier()
    if attempt_now() in attempts and rank == size - 1:
        fail(how)
    total = torch.ones(1)
    dist.all_reduce(total)
    return {
        "total": float(total),
        "value": attempt_now(),
        **{name: os.environ[name] for name in LATER},
    }


def fail(how: str) -> None:
    """Fail in the way named."""
    match how:
        case "ValueError":
            msg = "told to fail"
            raise ValueError(msg)
        case "OSError":
            msg = "the shelf is empty"
            raise OSError(msg)
        case "ImportError":
            import no_such_module  # noqa: F401  # type: ignore[import-not-found]
        case "all":
            msg = "bad lr"
            raise ValueError(msg)
        case _:
            os.kill(os.getpid(), signal.Signals[how])


def fail_everywhere() -> None:
    """Fail on every rank in the same way, once all are there."""
    import torch.distributed as dist

    dist.barrier()
    fail("all")


def hold_in_first(folder: str) -> int:
    """In the first attempt write this rank's pid and wait to be killed; later return the
    world's size."""
    import torch
    import torch.distributed as dist

    if attempt_now() == 1:
        path = Path(folder, os.environ["RANK"])
        path.with_suffix(".tmp").write_text(str(os.getppid()))
        path.with_suffix(".tmp").rename(path)
        signal.pause()
    total = torch.ones(1)
    dist.all_reduce(total)
    return int(total)


def train_with_ledger(
    ctx: "RankContext", folder: str, plan: dict[int, dict[str, Any]], epochs: int = 3
) -> dict[str, Any]:
    """Train, and write down which samples were in which step; in the attempts planned fail, or
    wait to be killed, at a step.

    Args:
        ctx: the context.
        folder: for a line per step, attempt and rank, and for a file of this rank's pid when it
            waits.
        plan: by attempt: {"step", "how"}, where how is a way to fail or "wait".
        epochs: over 24 samples in batches of 4.
    """
    import torch
    from torch.utils.data import TensorDataset

    model = ctx.wrap(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    ctx.track(model=model, optimizer=optimizer)
    loader = ctx.loader(
        TensorDataset(torch.arange(24), torch.linspace(-1, 1, 24)[:, None]), global_batch_size=4
    )
    with Path(folder, f"ledger-{ctx.attempt}-{ctx.rank}.jsonl").open("a", buffering=1) as ledger:
        for numbers, x in ctx.steps(loader, epochs=epochs):
            loss = (model(x) - 3 * x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ctx.report(loss=loss)
            line = {
                "step": ctx.step,
                "epoch": ctx.epoch,
                "samples": numbers.tolist(),
                "rank": ctx.rank,
            }
            ledger.write(
                json.dumps(line | {"attempt": ctx.attempt, "world_size": ctx.world_size}) + "\n"
            )
            fault = plan.get(ctx.attempt)
            if fault and ctx.step == fault["step"]:
                _fail_as_planned(ctx, fault["how"], folder)
    return {"attempt": ctx.attempt, "world_size": ctx.world_size}


def _fail_as_planned(ctx: "RankContext", how: str, folder: str) -> None:
    while not any(ref.step < ctx.step for ref in list_checkpoints(ctx.config.storage, ctx.run_id)):
        time.sleep(0.02)  # else there may be nothing to resume from
    if how == "wait":
        Path(folder, f"waits-{ctx.attempt}-{ctx.rank}").write_text(str(os.getpid()))
        signal.pause()
    if ctx.rank == ctx.world_size - 1:
        fail(how)
