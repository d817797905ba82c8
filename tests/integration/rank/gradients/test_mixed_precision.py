"""Mixed precision on real ranks, with accumulation: a GradScaler changes no bit."""

from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from prefect_torch_ddp import RankContext
from tests.support.ranks import config_for, train_on
from tests.workloads import healthy


def scaled_and_clipped(ctx: RankContext, how: str) -> tuple[list[torch.Tensor], str]:
    """Train with autocast, with or without a GradScaler, one of whose steps overflows; clip
    what was unscaled."""
    torch.manual_seed(3)
    net, scales = nn.Linear(4, 3), how == "scaled"
    model = ctx.wrap(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    # Powers of two, so that scaling changes no bit.
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2, enabled=scales)
    ctx.track(model=model, optimizer=optimizer, scaler=scaler)
    norms = []
    inputs, targets = healthy.points(11)
    for batch in ctx.steps(
        ctx.loader(TensorDataset(inputs.float(), targets), global_batch_size=5), epochs=2
    ):
        optimizer.zero_grad()
        for (x, y), weight in ctx.micro_batches(batch, max_samples=1):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(model(x), y)
            if ctx.step == 3:
                loss = loss * float("inf")
            scaler.scale(loss * weight).backward()
        scaler.unscale_(optimizer)
        norms.append(torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5))
        if scales or ctx.step != 3:
            scaler.step(optimizer)
        scaler.update()
    return norms, healthy.sha256_of_weights(net)


def test_mixed_precision_and_clipping(tmp_path: Path) -> None:
    """Unscale, then clip: the norms and weights of a training without a scaler; all ranks leave
    out the step that overflows."""
    with_it, without = (
        train_on(2, config_for(tmp_path / how), scaled_and_clipped, how)
        for how in ("scaled", "unscaled")
    )
    assert with_it[0][1] == with_it[1][1] == without[0][1]
    for step, (norm, right) in enumerate(zip(with_it[0][0], without[0][0], strict=True), start=1):
        assert not torch.isfinite(norm) if step == 3 else torch.equal(norm, right)
