"""A training in a loop of its own, without ctx.steps, that is killed where a plan says.

Torch is imported inside.
"""

import hashlib
import resource
import signal
from typing import TYPE_CHECKING, Any

from tests.workloads.killed import Executioner, Plan

if TYPE_CHECKING:
    import torch

    from prefect_torch_ddp import RankContext

NUM_ROUNDS, SAVE_EVERY = 9, 2
"""The last round has no checkpoint of its own."""


class Progress:
    """How far the loop is, as user code keeps it."""

    def __init__(self) -> None:
        self.num_rounds = 0

    def state_dict(self) -> dict[str, Any]:
        """Return it."""
        return {"num_rounds": self.num_rounds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it over."""
        self.num_rounds = state["num_rounds"]


def train(ctx: "RankContext", plan: Plan) -> dict[str, Any]:
    """Train with data and dropout from the global generators; say what all that is tracked
    hashes to."""
    import torch
    from torch import nn

    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    signal.signal(
        signal.SIGXFSZ, signal.SIG_DFL
    )  # Python ignores it: a write beyond the limit would be an OSError
    executioner = Executioner(plan, ctx.attempt)
    torch.manual_seed(3)
    bare = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1)).double()
    torch.manual_seed(100 + ctx.rank)
    model = ctx.wrap(bare)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    progress = Progress()
    ctx.track(model=model, optimizer=optimizer, progress=progress)
    executioner.pass_by("tracked")
    began = progress.num_rounds
    while progress.num_rounds < NUM_ROUNDS:
        executioner.pass_by("begin", progress.num_rounds + 1)
        optimizer.zero_grad()
        loss = model(torch.randn(6, 4, dtype=torch.float64)).square().mean()
        loss.backward()
        executioner.pass_by("backward", progress.num_rounds + 1)
        optimizer.step()
        ctx.report(loss=loss)
        progress.num_rounds += 1
        if progress.num_rounds % SAVE_EVERY == 0:
            ctx.checkpoint(force=True)
        executioner.pass_by("end", progress.num_rounds)
    return {
        "began": began,
        "attempt": ctx.attempt,
        "sha256": _sha256([bare.state_dict(), optimizer.state_dict()]),
    }


def _sha256(states: list[dict[str, Any]]) -> str:
    digest = hashlib.sha256()
    for state in states:
        for tensor in _tensors(state):
            digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def _tensors(state: Any) -> "list[torch.Tensor]":
    import torch

    if isinstance(state, torch.Tensor):
        return [state]
    return (
        [tensor for value in state.values() for tensor in _tensors(value)]
        if isinstance(state, dict)
        else []
    )
