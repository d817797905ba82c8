"""A training that leaves all there is in a storage: checkpoints, records and a file; it
may fail on the way."""

from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from prefect_torch_ddp import RankContext
from prefect_torch_ddp.storage.s3 import transfer
from tests.workloads.healthy import sha256_of_weights

NUM_STEPS = 12
FAILS_AT, RESUMES_FROM = 7, 6
"""Checkpoints come every other step."""
PART_BYTES = 5 * 2**20
NOTE = b"what user code saved"


def train(ctx: RankContext, fails: bool, is_big: bool) -> dict[str, Any]:
    """Train on two ranks.

    Args:
        ctx: the context.
        fails: whether rank 0 raises in step 7, when the checkpoint of step 6 is on record.
        is_big: whether its checkpoints are uploaded to S3 in parts.
    """
    if is_big:
        transfer.MULTIPART_FROM_BYTES = transfer.PART_BYTES = PART_BYTES
    torch.manual_seed(3)
    bare = nn.Sequential(
        nn.Linear(8, 1200 if is_big else 16), nn.Tanh(), nn.Linear(1200 if is_big else 16, 1200)
    ).double()
    model = ctx.wrap(bare)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ctx.track(model=model, optimizer=optimizer)
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(12, 8, generator=generator, dtype=torch.float64)
    first = None
    for (batch,) in ctx.steps(
        ctx.loader(TensorDataset(inputs), global_batch_size=4), epochs=NUM_STEPS // 3
    ):
        first = first or ctx.step
        if fails and ctx.rank == 0 and ctx.step == FAILS_AT:
            ctx._parts.tracker._checkpointer.wait()
            msg = "as the test wants it"
            raise RuntimeError(msg)
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ctx.report(loss=loss)
    if ctx.rank == 0:
        ctx.save("note.txt", NOTE)
    return {"sha256": sha256_of_weights(bare), "first": first}
