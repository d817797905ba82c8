"""The exact order: one order of all samples per seed and epoch, in global batches and shares."""

import hashlib
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch.utils.data import Sampler

from prefect_torch_ddp.data.lookahead import ahead_of, with_following
from prefect_torch_ddp.errors import InvalidParamsError


class BatchKeys(NamedTuple):
    """What a DataLoader's process is asked for; persistent workers know the pass by it too."""

    epoch: int
    indices: list[int]
    is_training: bool
    """Whether it is a share of a step, and not of a pass of the user's own."""
    draws: Sequence[int] | None = None
    """The number of each draw in its epoch; None: samples aren't drawn, but come once each."""


class BatchShare(NamedTuple):
    """What one rank holds of one global batch."""

    epoch: int
    batch: int
    """Number of the global batch in its epoch, from 0."""
    num_local: int
    """Samples that count on this rank; 0 when the rank only holds a stand-in."""
    num_global: int
    """Samples of the global batch over all ranks."""
    is_last: bool
    """Whether this is the epoch's last global batch."""
    samples: tuple[int, ...] = ()
    """Ids of the samples that count on this rank; only if a ledger is kept."""
    num_skipped: int = 0
    """How many of `num_local` were left out, because they can't be read."""

    @property
    def has_data(self) -> bool:
        """Whether it is of a global batch, and not of a step that has none."""
        return self.num_global > 0


WITHOUT_DATA = BatchShare(0, 0, 0, 0, is_last=False)
"""What a step has whose batch, if any, isn't ours."""


def short_digest(content: bytes | memoryview) -> str:
    """Return twelve hexadecimal digits that tell it from others: an order, or what data are."""
    return hashlib.sha256(content).hexdigest()[:12]


def mix_seed(*parts: int) -> int:
    """Mix whole numbers into one seed of 63 bits: the same on every machine and Python.

    Python's `hash` isn't stable and a sum isn't safe: seed 1 in epoch 2 would repeat seed 2 in
    epoch 1.
    """
    digest = hashlib.sha256("/".join(str(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def whole_number(name: str, value: Any, least: int) -> int:
    """Return what a user gave, of whatever type of number, as an int; refuse anything else."""
    try:
        is_whole = isinstance(value, float) and value.is_integer()
        number = int(value if is_whole else operator.index(value))
    except TypeError:
        number = least - 1
    if number < least:
        msg = f"{name} is {value!r}; give a whole number, at least {least}"
        raise InvalidParamsError(msg)
    return number


def refuse_set(name: str, value: object) -> None:
    """Refuse a set of what is used in an order, which would be another one in each process."""
    if isinstance(value, set | frozenset):
        msg = f"{name} is a set, which has another order in each process: give a list"
        raise InvalidParamsError(msg)


def share_range(num_global: int, rank: int, world_size: int) -> range:
    """Return the positions of a global batch that a rank holds: contiguous, the first larger."""
    size, remainder = divmod(num_global, world_size)
    start = rank * size + min(rank, remainder)
    return range(start, start + size + (rank < remainder))


@dataclass
class OwnOrder:
    """An order of the user's own for each epoch: any samples, each as often as it says."""

    make: Callable[[int], Any]
    """Returns whole numbers [samples of an epoch] for an epoch, from 0."""
    num_samples: int
    """Of the dataset."""
    digests: dict[int, str] = field(default_factory=dict)
    """Of the epochs that were asked for."""

    def of_epoch(self, epoch: int) -> np.ndarray[Any, Any]:
        """Return the indices of an epoch's samples, a copy.

        Raises:
            InvalidParamsError: they aren't of this dataset, or others than before.
        """
        given = self.make(epoch)
        values = np.asarray(given.detach().cpu() if isinstance(given, torch.Tensor) else given)
        if values.ndim != 1 or not len(values) or not np.issubdtype(values.dtype, np.integer):
            what = f"{type(given).__name__} of {values.dtype} {list(values.shape)}"
            says = "order of ctx.loader has to return the indices of an epoch's samples"
            msg = f"{says}, as whole numbers in a list, an array or a tensor, not a {what}"
            raise InvalidParamsError(msg)
        wrong = np.flatnonzero((values < 0) | (values >= self.num_samples))
        if len(wrong):
            what = f"order({epoch})[{wrong[0]}] is {values[wrong[0]]}"
            msg = f"{what}, and the dataset has samples 0 to {self.num_samples - 1}"
            raise InvalidParamsError(msg)
        values = values.astype(np.int32 if self.num_samples < 2**31 else np.int64)
        digest = short_digest(values.tobytes())
        if self.digests.setdefault(epoch, digest) != digest:
            msg = (
                f"order({epoch}) returned other samples than before: it may depend on the epoch "
                "only. Seed what it draws, such as by torch.Generator().manual_seed(epoch)"
            )
            raise InvalidParamsError(msg)
        return values


@dataclass
class GlobalBatches:
    """The global batches of a dataset, epoch after epoch; the world size has no part in them.

    Every sample is in exactly one global batch of an epoch (none is repeated to even out
    shares; with `drop_last` the uneven tail is left out). Memory: 4 bytes a sample for the
    current epoch's order (8 from 2**31 samples on), nothing without `shuffle`.

    With weights an epoch is as many draws, with replacement: 12 bytes a sample. With an order of
    the user's own it is as many samples as that says, the same number in each epoch.

    Raises:
        InvalidParamsError: there is no sample, no room in a batch, or no batch.
    """

    num_samples: int
    global_batch_size: int
    """Samples per optimizer step over all ranks together."""
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False
    weights: np.ndarray[Any, Any] | None = field(default=None, repr=False, compare=False)
    """How often each sample is drawn, in relation to the others: float64 [num_samples]."""
    own_order: OwnOrder | None = field(default=None, repr=False, compare=False)
    """In place of `shuffle` and `weights`."""
    num_places: int = field(default=0, init=False)
    """Samples of an epoch; as many as there are, but by an order of the user's own."""
    _order: tuple[int, np.ndarray[Any, Any]] | None = field(
        default=None, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            msg = f"the dataset has {self.num_samples} samples; at least one is needed"
            raise InvalidParamsError(msg)
        self.global_batch_size = whole_number("global_batch_size", self.global_batch_size, 1)
        self.num_places = self.num_samples
        if self.own_order is not None:
            self._order = 0, self.own_order.of_epoch(0)
            self.num_places = len(self._order[1])
        if self.num_batches == 0:
            msg = (
                f"drop_last leaves no batch: {self.num_places} samples don't fill a global batch "
                f"of {self.global_batch_size}; lower global_batch_size or use drop_last=False"
            )
            raise InvalidParamsError(msg)

    @property
    def is_drawn(self) -> bool:
        """Whether a sample may come several times in an epoch, or not at all."""
        return self.weights is not None or self.own_order is not None

    @property
    def num_batches(self) -> int:
        """Global batches per epoch."""
        full, tail = divmod(self.num_places, self.global_batch_size)
        return full if self.drop_last or tail == 0 else full + 1

    def num_global(self, batch: int) -> int:
        """Return how many samples a global batch has; only the last one may be smaller."""
        return len(self._positions(batch))

    def share(self, epoch: int, batch: int, rank: int, world_size: int) -> list[int]:
        """Return the sample indices of a rank's share of a global batch, possibly none."""
        return self.indices(epoch, self.positions(batch, rank, world_size))

    def positions(self, batch: int, rank: int, world_size: int) -> range:
        """Return the places in the epoch's order of a rank's share, possibly none."""
        positions = self._positions(batch)
        own = share_range(len(positions), rank, world_size)
        return positions[own.start : own.stop]

    def indices(self, epoch: int, positions: range) -> list[int]:
        """Return the samples at these places in an epoch's order."""
        if not self.shuffle and self.own_order is None:
            return list(positions)
        indices: list[int] = self._epoch_order(epoch)[positions.start : positions.stop].tolist()
        return indices

    def _positions(self, batch: int) -> range:
        if not 0 <= batch < self.num_batches:
            msg = f"batch {batch} is outside the epoch's {self.num_batches} global batches"
            raise InvalidParamsError(msg)
        start = batch * self.global_batch_size
        return range(start, min(start + self.global_batch_size, self.num_places))

    def order_name(self) -> str:
        """Describe the order of all epochs; equal words, equal orders, but for the user's own."""
        if self.own_order is not None:
            return "an order of your own"
        if self.weights is not None:
            digest = short_digest(self.weights.tobytes())
            return f"draws of seed {self.seed} by weights with the digest {digest}"
        return f"the order of seed {self.seed}" if self.shuffle else "their own order"

    def order_digest(self, epoch: int) -> str:
        """Return a digest of an epoch's order, if it is the user's own; else nothing."""
        if self.own_order is None:
            return ""
        self._epoch_order(epoch)
        return self.own_order.digests[epoch]

    def _own(self, own_order: OwnOrder, epoch: int) -> np.ndarray[Any, Any]:
        order = own_order.of_epoch(epoch)
        if len(order) != self.num_places:
            msg = (
                f"order({epoch}) has {len(order)} samples and order(0) has {self.num_places}: each "
                "epoch has to have equally many, since its steps are counted ahead. Repeat some, "
                "or make a loader and a call of ctx.steps for each length"
            )
            raise InvalidParamsError(msg)
        return order

    def _epoch_order(self, epoch: int) -> np.ndarray[Any, Any]:
        """Return the order of an epoch: whole numbers [num_places]."""
        if self._order is None or self._order[0] != epoch:
            self._order = None  # or two permutations would be in memory at once
            if self.own_order is not None:
                self._order = epoch, self._own(self.own_order, epoch)
                return self._order[1]
            # The device is named because torch.set_default_device("cuda") would clash with the
            # generator's. int32 takes half the memory, and gives the same order.
            generator = torch.Generator(device="cpu").manual_seed(mix_seed(self.seed, epoch))
            dtype = torch.int32 if self.num_samples < 2**31 else torch.int64
            if self.weights is None:
                order = torch.randperm(
                    self.num_samples, generator=generator, device="cpu", dtype=dtype
                )
            else:
                order = self._draw(self.weights, generator).to(dtype)
            self._order = (epoch, order.numpy())  # sliced in a tenth of the time
        return self._order[1]

    def _draw(self, weights: np.ndarray[Any, Any], generator: torch.Generator) -> torch.Tensor:
        # Not torch.multinomial, which takes at most 2**24 weights; sums in float32 drop small ones.
        ends = np.cumsum(weights)
        like: Any = {"generator": generator, "device": "cpu", "dtype": torch.float64}
        drawn = torch.rand(self.num_samples, **like).numpy() * ends[-1]
        # A product may be rounded up to the end, where no sample is.
        last = int(np.flatnonzero(weights)[-1])
        return torch.from_numpy(np.minimum(np.searchsorted(ends, drawn, side="right"), last))


@dataclass(frozen=True)
class RankShares:
    """Which shares of each global batch a rank holds: its own, or those of its virtual ranks."""

    own: range
    """Numbers of the shares."""
    num_shares: int
    """Into so many each global batch is cut."""
    is_virtual: bool

    @classmethod
    def of_rank(cls, rank: int, world_size: int, virtual_ranks: int | None) -> "RankShares":
        """Return a rank's share, or those of as many virtual ranks as each rank holds, in order.

        Raises:
            InvalidParamsError: the ranks can't hold equally many virtual ranks.
        """
        if virtual_ranks is None:
            return cls(range(rank, rank + 1), world_size, is_virtual=False)
        if virtual_ranks < 1 or virtual_ranks % world_size:
            msg = (
                f"virtual_ranks is {virtual_ranks} and there are {world_size} ranks; their number "
                "must divide virtual_ranks, so that each rank holds equally many"
            )
            raise InvalidParamsError(msg)
        each = virtual_ranks // world_size
        return cls(range(rank * each, (rank + 1) * each), virtual_ranks, is_virtual=True)

    def sizes(self, num_global: int) -> dict[int, int]:
        """Return the samples of each share that isn't empty, by its number."""
        sizes = {share: len(share_range(num_global, share, self.num_shares)) for share in self.own}
        return {share: size for share, size in sizes.items() if size}


class ShareSampler(Sampler[BatchKeys]):
    """Yields a rank's shares of each global batch of the planned pass.

    Args:
        batches: the global batches.
        shares: which of each the rank holds.
        num_workers: the DataLoader's, if the dataset looks ahead; otherwise None.
    """

    def __init__(self, batches: GlobalBatches, shares: RankShares, num_workers: int | None) -> None:
        self.batches = batches
        self.plan = (0, 0, False)
        """Epoch, first batch, whether a stand-in takes the place of an empty share."""
        self._shares = shares
        self._num_workers = num_workers

    def __len__(self) -> int:
        return self.batches.num_batches

    def __iter__(self) -> Iterator[BatchKeys]:
        # The plan is read now: a pass under way keeps its own when the next one is planned.
        epoch, start_batch, stand_ins = self.plan
        keys = self._keys(epoch, start_batch, stand_ins=stand_ins)
        if self._num_workers is None:
            return keys
        return (
            each._replace(indices=ahead_of(each.indices, [other.indices for other in following]))
            for each, following in with_following(keys, self._num_workers)
        )

    def _keys(self, epoch: int, start_batch: int, *, stand_ins: bool) -> Iterator[BatchKeys]:
        num_shares = self._shares.num_shares
        for batch in range(start_batch, len(self)):
            shares = (
                self.batches.positions(batch, number, num_shares) for number in self._shares.own
            )
            own = [positions for positions in shares if positions]
            if stand_ins and not own:
                own = [self.batches.positions(batch, 0, num_shares)[:1]]
            for positions in own:
                draws = positions if self.batches.is_drawn else None
                indices = self.batches.indices(epoch, positions)
                yield BatchKeys(epoch, indices, stand_ins, draws)


@dataclass(frozen=True)
class VirtualShare:
    """What one virtual rank has of a global batch."""

    virtual_rank: int
    num_samples: int
    """0 for a stand-in."""
    batch: Any


def _refuse(*_: object) -> NoReturn:
    msg = (
        "determinism='elastic' splits the batch by virtual ranks: don't use it directly, but take "
        "each piece from `for piece, weight in ctx.micro_batches(batch):` and call backward on "
        "its weighted loss"
    )
    raise InvalidParamsError(msg)


class VirtualShares:
    """A rank's batch under elastic determinism; any use but by `ctx.micro_batches` is an error.

    Args:
        shares: those of this rank's virtual ranks that have samples; else one stand-in.
        num_global: samples of the global batch.
    """

    def __init__(self, shares: tuple[VirtualShare, ...], num_global: int) -> None:
        self.shares = shares
        self.num_global = num_global

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse()

    __getitem__ = __iter__ = __len__ = _refuse
