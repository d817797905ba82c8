"""What a strategy of gradients is asked: how the ranks' gradients become the global batch's."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import nn

    from prefect_torch_ddp.data.sampler import BatchShare, GlobalBatches


class Strategy(Protocol):
    """Combines the gradients of the models that it wrapped; one for each rank of a training.

    A loop is a call of `ctx.steps`. What a rank saves of the models isn't asked: with both
    strategies every rank holds them whole.
    """

    def wrap(
        self, model: "nn.Module", device: "torch.device", ddp_kwargs: dict[str, Any], /
    ) -> "nn.Module":
        """Move a model to the device, and return what the training calls."""
        ...

    def begin_loop(self, batches: "GlobalBatches | None", /) -> None:
        """Take the global batches of a loop, or none; every rank calls it.

        Raises:
            InvalidParamsError: a wrapped model can't be trained on them.
        """
        ...

    def leave_loop(self) -> None:
        """End a loop, in whatever way it was left."""
        ...

    def begin_step(self, step: int, share: "BatchShare | None", /) -> None:
        """Take this rank's share of the global batch; None: all ranks count the same."""
        ...

    def end_step(self, step: int, /) -> None:
        """End a step.

        Raises:
            InvalidParamsError: its gradients aren't those of the global batch.
        """
        ...

    def take_passes(self) -> list[tuple[int, int]]:
        """Return from which steps on how many backward passes were summed, since the last call.

        Empty if each step sums once, whatever the training does.
        """
        ...

    def micro_batches(self, batch: Any, max_samples: int | None, /) -> Iterator[tuple[Any, float]]:
        """Yield (micro-batch, weight); after the last one gradients are the global batch's."""
        ...

    def close(self) -> None:
        """Give back what it changed in the process."""
        ...
