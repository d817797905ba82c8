"""Plain torch, under `torchrun --max-restarts`.

As in PyTorch's tutorial "Fault-tolerant Distributed Training with torchrun": rank 0 writes a
snapshot, and every start loads it if there is one. The rename, so that a kill leaves no half of a
file, is what its users add. In the middle of an epoch the batches that were done are skipped.
"""

import json
from itertools import islice

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from tests.benchmarks.peers.training import (
    BATCH_SIZE,
    EPOCHS,
    FOLDER,
    LR,
    REPORT_EVERY,
    SAVE_EVERY,
    Observed,
    make_data,
    make_model,
)


def main() -> None:
    """Train on one rank."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    observed = Observed(rank)
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    data = make_data()
    sampler: DistributedSampler[object] = DistributedSampler(data)
    loader = DataLoader(data, BATCH_SIZE, sampler=sampler)
    snapshot, step = FOLDER / "snapshot.pt", 0
    if snapshot.exists():
        saved = torch.load(snapshot)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    for epoch in range(step // len(loader), EPOCHS):
        sampler.set_epoch(epoch)
        for inputs, targets in islice(loader, step % len(loader), None):
            loss = cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % REPORT_EVERY == 0 and rank == 0:
                with observed.reporting():
                    print(json.dumps({"step": step, "loss": loss.item()}), flush=True)
            observed.step(step)
            if step % SAVE_EVERY == 0 and rank == 0:
                parts = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**parts, "step": step}, FOLDER / "snapshot.new")
                (FOLDER / "snapshot.new").replace(snapshot)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
