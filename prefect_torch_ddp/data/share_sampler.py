"""Owns what a DataLoader is told to fetch: a rank's share of each global batch of a pass, and those that follow."""

from collections.abc import Iterator

from torch.utils.data import Sampler

from prefect_torch_ddp.data.fetching import BatchKeys
from prefect_torch_ddp.data.lookahead import ahead_of, with_following
from prefect_torch_ddp.data.sampler import GlobalBatches
from prefect_torch_ddp.data.virtual import Parts


class ShareSampler(Sampler[BatchKeys]):
    """Yields a rank's share of each global batch of the planned pass, part by part."""

    def __init__(self, batches: GlobalBatches, parts: Parts, num_workers: int | None) -> None:
        """Plan the first epoch."""
        self.batches = batches
        self.parts = parts
        self.num_workers = num_workers
        """The DataLoader's, where the dataset looks ahead."""
        self.plan = (0, 0, False)
        """Epoch, first batch, whether an empty share becomes a stand-in."""

    def __len__(self) -> int:
        """Return the global batches of an epoch."""
        return self.batches.num_batches

    def __iter__(self) -> Iterator[BatchKeys]:
        """Yield the planned pass."""
        shares = self._shares(*self.plan)  # read now: a pass under way keeps its plan when the next one is made
        if self.num_workers is None:
            return shares
        return with_following(shares, _told, max(self.num_workers, 1), depth=1)

    def _shares(self, epoch: int, start_batch: int, stand_ins: bool) -> Iterator[BatchKeys]:  # noqa: FBT001 - unpacked from the plan
        shares = (self.batches.shares(epoch, start_batch, part, self.parts.num_parts) for part in self.parts.mine)
        for batch, parts in enumerate(zip(*shares, strict=True), start_batch):
            for indices in parts:
                if indices:
                    yield epoch, indices
            if stand_ins and not any(parts):
                yield epoch, self.batches.share(epoch, batch, 0, self.parts.num_parts)[:1]


def _told(keys: BatchKeys, following: list[BatchKeys]) -> BatchKeys:
    epoch, indices = keys
    return epoch, ahead_of(indices, (others for _, others in following))
