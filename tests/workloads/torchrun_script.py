"""A program as people write them for torchrun: its own process group, loop and checkpoints."""

import argparse
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from prefect_torch_ddp import current_context


def main() -> None:
    """Train for some steps; save after each; die in one of them, once, if that is asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--die-at", type=int)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    saved, first = args.folder / "checkpoint.pt", 0
    if args.resume:
        state = torch.load(saved, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
        print(f"resumed at step {first}")
    for step in range(first, 8):
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (ctx := current_context()) is not None:
            ctx.progress(step + 1)
            ctx.report(loss=loss)
        if dist.get_rank() == 0:
            parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**parts, "step": step + 1}, args.folder / "unfinished.pt")
            (args.folder / "unfinished.pt").rename(saved)
        dist.barrier()
        if step + 1 == args.die_at and not args.resume and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), args.folder / "final.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
