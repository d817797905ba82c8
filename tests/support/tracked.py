"""A value that user code tracks in addition to models; and steps over numbers, for tests
that need any."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import TensorDataset

from prefect_torch_ddp import RankContext


@dataclass
class Tracked:
    """One value, kept in checkpoints."""

    value: Any = 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def steps_over(
    ctx: RankContext, num_samples: int = 4, size: int = 1, epochs: int = 1, **options: Any
) -> Any:
    """Return the steps over the numbers from 0 on, in global batches of that size."""
    numbers = TensorDataset(torch.arange(num_samples))
    return ctx.steps(ctx.loader(numbers, global_batch_size=size, **options), epochs=epochs)
