"""What a strategy is asked: how the ranks' gradients become the global batch's, who saves what."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import nn

    from prefect_torch_ddp.checkpoint.shard import Shard
    from prefect_torch_ddp.checkpoint.state.replicas import Replicas
    from prefect_torch_ddp.data.sampler import BatchShare, GlobalBatches


class Strategy(Protocol):
    """Combines the gradients of the models that it wrapped; one for each rank of a training.

    It knows what of a model a rank holds, so it also says what a rank saves. It neither reads nor
    writes. A loop is a call of `ctx.steps`.
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

    def take_replicas(self) -> "Replicas":
        """Return what all ranks hold the same, with the backward passes since the last call.

        There are none of these if each step sums once, whatever the training does.
        """
        ...

    def micro_batches(self, batch: Any, max_samples: int | None, /) -> Iterator[tuple[Any, float]]:
        """Yield (micro-batch, weight); after the last one gradients are the global batch's."""
        ...

    def tracked(self, objects: Mapping[str, Any], /) -> dict[str, Any]:
        """Return what has the states of the objects that user code tracks, by name.

        Such as the model that `wrap` was given for what it returned.

        Raises:
            InvalidParamsError: a state can't be saved, since this rank has only a part of it.
        """
        ...

    def shares(self, objects: Mapping[str, Any], /) -> "Mapping[Shard, Any]":
        """Return which shards of the tracked objects this rank saves, each with what has its state.

        All ranks' shares are each object once; a commit checks that. It is asked at each save,
        without any communication.
        """
        ...

    def close(self) -> None:
        """Give back what it changed in the process."""
        ...
