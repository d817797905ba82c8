"""A dataset that is read shard by shard, in an exact order, from any position."""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils.data import Dataset, get_worker_info

from prefect_torch_ddp.data.fetching import generators_kept, seed_on_cpu
from prefect_torch_ddp.data.sampler import (
    BatchKeys,
    GlobalBatches,
    RankShares,
    mix_seed,
    short_digest,
)
from prefect_torch_ddp.data.tagged import Tagged, ended_early
from prefect_torch_ddp.data.traits import Trait, spread, values_at
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.lazy import exported_by

SHUFFLE_BUFFER = 1024
"""Samples that are in memory at a time, if the dataset doesn't set `shuffle_buffer`."""

_SHARDS, _BLOCK, _DRAWS, _BATCH = range(4)


@exported_by("prefect_torch_ddp.data")
@runtime_checkable
class Sharded(Protocol):
    """What a dataset without `__getitem__` needs for `ctx.loader`: shards of known sizes.

    They are equal on all ranks. An attribute `shuffle_buffer` may say how many samples are
    shuffled among one another, and are in memory for it. Default: 1,024.

    Example:
        Samples in two shards, which could be files:

            class Numbers:
                def shards(self):
                    return [0, 100]

                def num_samples(self, shard):
                    return 100

                def iter_shard(self, shard):
                    yield from range(shard, shard + 100)

            loader = ctx.loader(Numbers(), global_batch_size=10)
    """

    def shards(self) -> Sequence[Any]:
        """Return what names the shards: paths, keys, numbers; in the same order always."""
        ...

    def num_samples(self, shard: Any) -> int:
        """Return the size of a shard."""
        ...

    def iter_shard(self, shard: Any) -> Iterator[Any]:
        """Yield the samples of a shard, in the same order always."""
        ...


class PositionReader(Protocol):
    """What fetches a rank's batches by their positions in an epoch, as finished batches."""

    order: str
    """Describes the order; equal words, equal orders."""

    @property
    def traits(self) -> dict[str, list[Trait]]:
        """A few values that are equal on all ranks."""
        ...

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def __getitems__(self, keys: BatchKeys) -> Tagged:
        """Return the batch of these positions."""
        ...


class ReadByPosition(ABC):
    """A dataset of batches in its own order, such as a table's: not the user's to derive."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abstractmethod
    def reader(
        self, batches: GlobalBatches, shares: RankShares, *, shuffle: bool
    ) -> PositionReader:
        """Return what reads a rank's shares of the global batches."""


class ShardReader(Dataset[Any]):
    """Fetches samples by their position in an epoch.

    The order: all shards, shuffled, one after the other; that is cut into blocks of
    `shuffle_buffer` samples, and each block is shuffled. It depends only on seed and epoch.
    A process reads forward, block by block; to begin in the middle it skips to the block within
    a shard, and opens no shard of which it needs nothing.

    The random generators are seeded for each block from (seed, epoch, block), and put back
    afterwards: what `iter_shard` draws is the same on every rank, for every number of workers,
    and after a resume.

    Raises:
        InvalidParamsError: a size or the buffer isn't a number that can be.
    """

    def __init__(
        self, dataset: Sharded, seed: int, *, shuffle: bool, seeds_here: bool = False
    ) -> None:
        self._dataset = dataset
        self._seeds_here = seeds_here
        self._shards = list(dataset.shards())
        self._sizes = [dataset.num_samples(shard) for shard in self._shards]
        self.block_size = getattr(dataset, "shuffle_buffer", SHUFFLE_BUFFER)
        if self.block_size < 1 or any(size < 0 for size in self._sizes):
            msg = (
                f"{type(dataset).__name__}: shuffle_buffer has to be at least 1, "
                "and no shard's num_samples negative"
            )
            raise InvalidParamsError(msg)
        self._seed = seed
        self._shuffle = shuffle
        self._first_ids = [0, *accumulate(self._sizes)]
        self._epoch: tuple[int, list[int], list[int]] | None = None
        self._block: tuple[int, int, list[tuple[int, Any]]] | None = None
        # The shard that is open: epoch, number, its samples; and how far it was read.
        self._open: tuple[int, int, Iterator[Any]] | None = None
        self._position = 0

    def __len__(self) -> int:
        return self._first_ids[-1]

    @property
    def traits(self) -> dict[str, list[Trait]]:
        """A few names and sizes of shards: equal on all ranks."""
        some = spread(len(self._shards))
        # The only one may be this rank's own copy of it, by whatever name.
        names = {"shards": values_at(self._shards, some)} if len(self._shards) > 1 else {}
        return {**names, "num_samples(shard)": values_at(self._sizes, some)}

    @property
    def layout(self) -> str:
        """Names the sizes of all shards, which determine the order, by a digest.

        Names of shards don't count: they may be paths of each rank's own copies.
        """
        digest = short_digest(repr([*map(int, self._sizes)]).encode())
        return f"{len(self._sizes)} shards of sizes with the digest {digest}"

    def __getitems__(self, keys: BatchKeys) -> Tagged:
        """Return the samples at these positions; an id counts the samples before in `shards()`."""
        epoch, positions, is_training, _ = keys
        found = [self._at(epoch, position) for position in positions]
        if self._seeds_here or get_worker_info() is not None:
            # For what collate_fn draws: as for tables.
            seed_on_cpu(mix_seed(self._seed, epoch, positions[0], _BATCH))
        ids, samples = tuple(number for number, _ in found), [sample for _, sample in found]
        return Tagged(ids, samples, is_training=is_training)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is open, so that worker processes can be given it."""
        return self.__dict__ | {"_open": None, "_block": None}

    def _at(self, epoch: int, position: int) -> tuple[int, Any]:
        block, offset = divmod(position, self.block_size)
        if self._block is None or self._block[:2] != (epoch, block):
            self._block = None  # or two blocks would be in memory at once
            self._block = (epoch, block, self._read_block(epoch, block))
        return self._block[2][offset]

    def _read_block(self, epoch: int, block: int) -> list[tuple[int, Any]]:
        with generators_kept():
            shard, start = self._locate(epoch, block * self.block_size)
            self._seek(epoch, shard, start)  # before seeding: what is skipped may draw too
            seed_on_cpu(mix_seed(self._seed, epoch, block, _DRAWS))
            samples = list(self._read(epoch, block))
        if not self._shuffle:
            return samples
        return [samples[i] for i in self._permutation(len(samples), epoch, block, _BLOCK)]

    def _read(self, epoch: int, block: int) -> Iterator[tuple[int, Any]]:
        """Yield (id, sample) of a block, in the order of the shards."""
        position = block * self.block_size
        end = min(position + self.block_size, len(self))
        while position < end:
            shard, start = self._locate(epoch, position)
            num = min(end - position, self._sizes[shard] - start)
            self._seek(epoch, shard, start)
            yield from enumerate(self._take(num), start=self._first_ids[shard] + start)
            position += num

    def _locate(self, epoch: int, position: int) -> tuple[int, int]:
        """Return the shard that a position lies in, and how far from its beginning."""
        order, starts = self._order(epoch)
        nth = bisect_right(starts, position) - 1
        return order[nth], position - starts[nth]

    def _seek(self, epoch: int, shard: int, start: int) -> None:
        is_open = self._open is not None and self._open[:2] == (epoch, shard)
        if not is_open or self._position > start:
            name = self._shards[shard]
            try:
                self._open = (epoch, shard, iter(self._dataset.iter_shard(name)))
            except StopIteration as error:
                raise ended_early(self._dataset, [name]) from error
            self._position = 0
        for _ in self._take(start - self._position):
            pass

    def _take(self, num: int) -> Iterator[Any]:
        """Yield the next samples of the open shard; refuse one of another size than it says."""
        assert self._open is not None
        _, shard, samples = self._open
        end, size = self._position + num, self._sizes[shard]
        for sample in islice(samples, num):
            self._position += 1
            yield sample
        is_short = self._position < end
        is_long = num and end == size and next(samples, self) is not self
        if is_short or is_long:
            msg = (
                f"shard {self._shards[shard]!r} has {'fewer' if is_short else 'more'} samples than "
                f"num_samples says, {size}: samples would be lost or come twice"
            )
            raise InvalidParamsError(msg)

    def _order(self, epoch: int) -> tuple[list[int], list[int]]:
        """Return an epoch's shards that aren't empty, in order, and where each begins."""
        if self._epoch is None or self._epoch[0] != epoch:
            num = len(self._shards)
            order = self._permutation(num, epoch, 0, _SHARDS) if self._shuffle else list(range(num))
            order = [shard for shard in order if self._sizes[shard]]
            starts = list(accumulate((self._sizes[shard] for shard in order), initial=0))[:-1]
            self._epoch = (epoch, order, starts)
        return self._epoch[1:]

    def _permutation(self, num: int, *parts: int) -> list[int]:
        generator = torch.Generator(device="cpu").manual_seed(mix_seed(self._seed, *parts))
        order: list[int] = torch.randperm(num, generator=generator, device="cpu").tolist()
        return order
