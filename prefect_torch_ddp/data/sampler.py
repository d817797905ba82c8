"""Owns the exact data order: one order of all samples per seed and epoch, cut into global
batches, shared among the ranks.

Owns which parts of a global batch a rank holds: one, or under elastic determinism one for each
of its virtual ranks.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import torch

from prefect_torch_ddp.errors import InvalidParamsError

BATCHES_AT_ONCE = 64
"""A call of torch costs more than a few dozen numbers of its result."""


class BatchShare(NamedTuple):
    """What one rank holds of one global batch."""

    epoch: int
    batch: int
    """Place of the global batch in its epoch, from 0."""
    num_local: int
    """Samples that count on this rank; 0 when the rank only holds a stand-in."""
    num_global: int
    """Samples of the global batch over all ranks."""
    is_last: bool
    """Whether this is the epoch's last global batch."""
    samples: tuple[int, ...] = ()
    """Ids of the samples that count on this rank, as they came with the batch; only where a
    ledger is kept."""
    num_skipped: int = 0
    """How many of `num_local` the dataset left out of the batch, because they can't be read."""


def mix_seed(*parts: int) -> int:
    """Mix whole numbers into one seed of 63 bits: the same on every machine, Python and
    process.

    Python's `hash` isn't stable and a sum isn't safe: seed 1 in epoch 2 would repeat seed 2 in
    epoch 1.
    """
    digest = hashlib.sha256("/".join(str(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def share_range(num_global: int, rank: int, world_size: int) -> range:
    """Return the places of a global batch that a rank holds: contiguous, sizes differ by at
    most one, the first ranks larger.
    """
    size, remainder = divmod(num_global, world_size)
    start = rank * size + min(rank, remainder)
    return range(start, start + size + (rank < remainder))


@dataclass
class GlobalBatches:
    """The global batches of a dataset, epoch after epoch; the world size has no part in them.

    Every sample is in exactly one global batch of an epoch (none is repeated to even out
    shares; with `drop_last` the uneven tail is left out). Memory: 4 bytes a sample for the
    current epoch's order (8 from 2**31 samples on), nothing without `shuffle`.

    Raises:
        InvalidParamsError: there is no sample, no room in a batch, or no batch.
    """

    num_samples: int
    global_batch_size: int
    """Samples per optimizer step over all ranks together."""
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False
    _order: tuple[int, torch.Tensor] | None = field(
        default=None, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        """Refuse sizes that can't work."""
        if self.num_samples < 1:
            msg = f"the dataset has {self.num_samples} samples; at least one is needed"
            raise InvalidParamsError(msg)
        if self.global_batch_size < 1:
            msg = f"global_batch_size is {self.global_batch_size}; it must be at least 1"
            raise InvalidParamsError(msg)
        if self.num_batches == 0:
            msg = (
                f"drop_last leaves no batch: {self.num_samples} samples don't fill a global batch of {self.global_batch_size}; "
                "lower global_batch_size or use drop_last=False"
            )
            raise InvalidParamsError(msg)

    @property
    def num_batches(self) -> int:
        """Global batches per epoch."""
        full, tail = divmod(self.num_samples, self.global_batch_size)
        return full if self.drop_last or tail == 0 else full + 1

    def num_global(self, batch: int) -> int:
        """Return how many samples a global batch has; only the last one may be smaller."""
        return len(self._places(batch))

    def share(self, epoch: int, batch: int, rank: int, world_size: int) -> list[int]:
        """Return the sample indices of a rank's share of a global batch; empty when the batch
        has fewer samples than ranks.
        """
        places = self._places(batch)
        own = share_range(len(places), rank, world_size)
        return self._samples(epoch, places[own.start : own.stop])

    def shares(
        self, epoch: int, start_batch: int, rank: int, world_size: int
    ) -> Iterator[list[int]]:
        """Yield a rank's share of each global batch of an epoch from one on, as `share` returns
        it, at a fraction of the cost.
        """
        own = share_range(self.global_batch_size, rank, world_size)
        num_full = self.num_samples // self.global_batch_size
        for first in range(start_batch, num_full, BATCHES_AT_ONCE):
            yield from self._full_shares(
                epoch, range(first, min(first + BATCHES_AT_ONCE, num_full)), own
            )
        for batch in range(max(start_batch, num_full), self.num_batches):
            yield self.share(epoch, batch, rank, world_size)

    def _full_shares(self, epoch: int, batches: range, own: range) -> list[list[int]]:
        size = self.global_batch_size
        if not self.shuffle:
            return [
                list(range(batch * size + own.start, batch * size + own.stop)) for batch in batches
            ]
        order = self._epoch_order(epoch)[batches.start * size : batches.stop * size]
        shares: list[list[int]] = order.view(len(batches), size)[:, own.start : own.stop].tolist()
        return shares

    def _places(self, batch: int) -> range:
        if not 0 <= batch < self.num_batches:
            msg = f"batch {batch} is outside the epoch's {self.num_batches} global batches"
            raise InvalidParamsError(msg)
        start = batch * self.global_batch_size
        return range(start, min(start + self.global_batch_size, self.num_samples))

    def _samples(self, epoch: int, places: range) -> list[int]:
        if not self.shuffle or not places:
            return list(places)
        order: list[int] = self._epoch_order(epoch)[places.start : places.stop].tolist()
        return order

    def _epoch_order(self, epoch: int) -> torch.Tensor:
        """Return the permutation of an epoch, whole numbers of shape [num_samples], on the
        CPU.
        """
        if self._order is None or self._order[0] != epoch:
            self._order = None  # or two permutations would be in memory at once
            generator = torch.Generator(device="cpu").manual_seed(mix_seed(self.seed, epoch))
            # The device is named because a user's torch.set_default_device("cuda") would clash
            # with the generator's.
            dtype = (
                torch.int32 if self.num_samples < 2**31 else torch.int64
            )  # half the memory, and the same order
            self._order = (
                epoch,
                torch.randperm(self.num_samples, generator=generator, device="cpu", dtype=dtype),
            )
        return self._order[1]


@dataclass(frozen=True)
class RankShares:
    """Each global batch is cut into `num_shares`, of which this rank holds those numbered
    `own`.
    """

    own: range
    num_shares: int
    is_virtual: bool

    @classmethod
    def of_rank(cls, rank: int, world_size: int, virtual_ranks: int | None) -> "RankShares":
        """Return a rank's part; where there are virtual ranks, those of as many of them as each
        rank holds, in order.

        Raises:
            InvalidParamsError: the ranks can't hold equally many virtual ranks.
        """
        if virtual_ranks is None:
            return cls(range(rank, rank + 1), world_size, is_virtual=False)
        if virtual_ranks < 1 or virtual_ranks % world_size:
            msg = (
                f"virtual_ranks is {virtual_ranks} and there are {world_size} ranks; their number must divide virtual_ranks, so "
                "that each rank holds equally many"
            )
            raise InvalidParamsError(msg)
        each = virtual_ranks // world_size
        return cls(range(rank * each, (rank + 1) * each), virtual_ranks, is_virtual=True)

    def sizes(self, num_global: int) -> dict[int, int]:
        """Return the samples of each of this rank's parts that isn't empty, by its number."""
        sizes = {part: len(share_range(num_global, part, self.num_shares)) for part in self.own}
        return {part: size for part, size in sizes.items() if size}

    def num_local(self, num_global: int) -> int:
        """Return how many samples of a global batch this rank holds."""
        return sum(self.sizes(num_global).values())

    def gathered(self, loaded: Iterator[Any], nums_global: Iterable[int]) -> Iterator[Any]:
        """Yield a rank's batch for each global batch of those sizes, from what was loaded part
        by part.
        """
        for num_global in nums_global:
            # Where all parts are empty there is a stand-in, or a rank would have nothing to
            # show for the step.
            sizes = self.sizes(num_global) or {self.own[0]: 0}
            yield VirtualShares(
                tuple(VirtualShare(part, size, next(loaded)) for part, size in sizes.items()),
                num_global,
            )
        yield from loaded  # nothing is left: lets the DataLoader end its workers


@dataclass(frozen=True)
class VirtualShare:
    """What one virtual rank has of a global batch."""

    virtual_rank: int
    num_samples: int
    """0 for a stand-in."""
    batch: Any


class VirtualShares:
    """A rank's batch under elastic determinism, for `ctx.micro_batches` alone; any other use of
    it is an error that says so.
    """

    def __init__(self, shares: tuple[VirtualShare, ...], num_global: int) -> None:
        """Keep them.

        Args:
            shares: those of this rank's virtual ranks that have samples; else one stand-in.
            num_global: samples of the global batch.
        """
        self.shares = shares
        self.num_global = num_global

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse()

    def __getitem__(self, _key: object) -> Any:
        _refuse()

    def __iter__(self) -> Iterator[Any]:
        _refuse()

    def __len__(self) -> int:  # noqa: PLE0303 - it never returns
        _refuse()


def _refuse() -> NoReturn:
    msg = (
        "determinism='elastic' cuts the batch by virtual ranks: don't use it as it is, but take each piece from "
        "`for piece, weight in ctx.micro_batches(batch):` and call backward on its weighted loss"
    )
    raise InvalidParamsError(msg)
