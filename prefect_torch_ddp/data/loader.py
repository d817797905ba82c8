"""Owns how a rank reads its share of the data: torch's DataLoader over the exact order, started
at any batch.

Owns what a DataLoader is told to fetch: a rank's share of each global batch of a pass, and
those that follow.
"""

from collections.abc import Iterator, Sized
from contextlib import nullcontext
from functools import cache
from typing import Any, TypeGuard, cast

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, default_collate

from prefect_torch_ddp.data.fetching import (
    BatchKeys,
    SeededDataset,
    SeedSamples,
    TaggedCollate,
    check_seed_samples,
    may_skip,
    seeded_fetch,
    untagged,
)
from prefect_torch_ddp.data.lookahead import ahead_of, with_following
from prefect_torch_ddp.data.sampler import BatchShare, GlobalBatches, RankShares, mix_seed
from prefect_torch_ddp.data.shards import Sharded, ShardReader
from prefect_torch_ddp.errors import InvalidParamsError


class ShareSampler(Sampler[BatchKeys]):
    """Yields a rank's share of each global batch of the planned pass, part by part."""

    def __init__(self, batches: GlobalBatches, parts: RankShares, num_workers: int | None) -> None:
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
        shares = self._shares(
            *self.plan
        )  # read now: a pass under way keeps its plan when the next one is made
        if self.num_workers is None:
            return shares
        return with_following(shares, _told, max(self.num_workers, 1), depth=1)

    def _shares(self, epoch: int, start_batch: int, stand_ins: bool) -> Iterator[BatchKeys]:
        shares = (
            self.batches.shares(epoch, start_batch, part, self.parts.num_shares)
            for part in self.parts.own
        )
        for batch, parts in enumerate(zip(*shares, strict=True), start_batch):
            for indices in parts:
                if indices:
                    yield epoch, indices
            if stand_ins and not any(parts):
                yield epoch, self.batches.share(epoch, batch, 0, self.parts.num_shares)[:1]


def _told(keys: BatchKeys, following: list[BatchKeys]) -> BatchKeys:
    epoch, indices = keys
    return epoch, ahead_of(indices, (others for _, others in following))


OURS = frozenset({"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "generator"})


class RankLoader:
    """Load a rank's share of each global batch of a map-style dataset, or of one that gives
    shards.

    The global batches and their order follow from the seed and the epoch alone: the same for
    every world size, each sample exactly once per epoch.

    What holds for randomness: without virtual ranks, iterating doesn't touch the global random
    generators. In worker processes (`num_workers` > 0) python's, numpy's and torch's generators
    are seeded anew for each sample from (seed, epoch, sample index), so augmentation is the
    same whatever the number of workers, the world size or the batch an epoch is resumed at (a
    dataset with `__getitems__` is seeded once per fetched batch, by its first index: the same
    at the same world size). With `num_workers=0` the dataset draws from the rank's own global
    generators, in order: it is reproduced on resume when their state is restored, as
    checkpoints do.
    """

    def __init__(  # noqa: PLR0913 - the arguments of a DataLoader and a rank's place, all by name
        self,
        dataset: Dataset[Any] | Sharded,
        *,
        global_batch_size: int,
        rank: int,
        world_size: int,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        virtual_ranks: int | None = None,
        keep_ids: bool = False,
        seed_samples: SeedSamples = True,
        **dataloader_kwargs: Any,
    ) -> None:
        """Make the loader; no worker starts before it is iterated.

        Args:
            dataset: has `__len__` and `__getitem__`; or gives shards, see
                `data.shards.Sharded`.
            global_batch_size: samples per step over all ranks together.
            rank: this rank.
            world_size: all ranks.
            seed: decides the order of every epoch.
            shuffle: a new order each epoch; otherwise the dataset's own.
            drop_last: leave out the epoch's uneven tail.
            virtual_ranks: cut each global batch into so many parts, of which each rank loads
                its own one by one, so that nothing that is loaded depends on the number of
                ranks.
            keep_ids: have `lockstep` tell which samples each batch was made of, for a ledger.
            seed_samples: see above. "torch": seed torch's generator alone, for a dataset and a
                collate_fn that draw from no other one, as torchvision's v2 transforms do;
                False: seed none, for those that draw nothing. Either saves some microseconds a
                sample, which count where a sample takes less than a millisecond.
            **dataloader_kwargs: anything else for torch's DataLoader, such as num_workers,
                collate_fn or pin_memory.

        Raises:
            InvalidParamsError: the dataset or an argument can't work.
        """
        _refuse_clashes(dataloader_kwargs)
        if not 0 <= rank < world_size:
            msg = f"rank is {rank} and world_size is {world_size}; ranks count from 0 to world_size - 1"
            raise InvalidParamsError(msg)
        self.dataset = dataset
        self.rank = rank
        self.world_size = world_size
        self._parts = RankShares.of_rank(rank, world_size, virtual_ranks)
        skips = may_skip(dataset)
        if skips and self._parts.is_virtual:
            msg = "on_error='skip' can't be used with determinism='elastic': pass on_error='raise', and replace what can't be read"
            raise InvalidParamsError(msg)
        check_seed_samples(seed_samples)
        if seed_samples is not True and (self._parts.is_virtual or _is_sharded(dataset)):
            msg = f"seed_samples={seed_samples!r} can't be used with determinism='elastic' or a dataset in shards: leave it out"
            raise InvalidParamsError(msg)
        fetched: SeededDataset | ShardReader
        order = f"the order of seed {seed}" if shuffle else "their own order"
        if _is_sharded(dataset):
            fetched = ShardReader(dataset, seed, shuffle=shuffle, keep_ids=keep_ids)
            # Of places, not ids: the order is the reader's.
            self.batches = GlobalBatches(
                len(fetched), global_batch_size, seed, shuffle=False, drop_last=drop_last
            )
            order += f", shuffled in blocks of {fetched.block_size}" if shuffle else ""
        else:
            by_index = cast("Dataset[Any]", dataset)
            self.batches = GlobalBatches(
                _num_samples(by_index), global_batch_size, seed, shuffle, drop_last
            )
            # Alone, a rank has nobody whose gradients make its stand-in's count for nothing.
            stands_in = skips and world_size > 1
            fetched = SeededDataset(
                by_index,
                seed,
                seeds_here=self._parts.is_virtual,
                keep_ids=keep_ids or skips,
                stands_in=stands_in,
                seed_samples=seed_samples,
            )
        self.order = f"{self.batches.num_samples} samples in {order}"
        """Says in words which order the global batches are cut from; equal words, equal
        orders."""
        self.epoch = 0
        """The epoch whose order `iter(loader)` takes."""
        self._generator = torch.Generator(device="cpu")
        num_workers = dataloader_kwargs.get("num_workers", 0)
        self._sampler = ShareSampler(
            self.batches, self._parts, num_workers if seeded_fetch(dataset) else None
        )
        self._keeps_ids, self._is_tagged = keep_ids, keep_ids or skips
        if self._is_tagged:
            dataloader_kwargs["collate_fn"] = TaggedCollate(
                dataloader_kwargs.get("collate_fn") or default_collate
            )
        self._loader: DataLoader[Any] = DataLoader(
            fetched,
            batch_sampler=cast("Any", self._sampler),
            generator=self._generator,
            **dataloader_kwargs,
        )

    @property
    def global_batch_size(self) -> int:
        """Samples per step over all ranks together."""
        return self.batches.global_batch_size

    def __len__(self) -> int:
        """Return the global batches per epoch: the optimizer steps of an epoch."""
        return self.batches.num_batches

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's batches of one exact pass; a rank with an empty share of the tail
        yields one batch fewer.

        For evaluation: ranks may yield different numbers of batches, so nothing that waits for
        other ranks belongs in its body.
        """
        batches = self._load(self.epoch, start_batch=0, stand_ins=False)
        return (tagged.data for tagged in batches if tagged.samples) if self._is_tagged else batches

    def lockstep(self, epoch: int, start_batch: int = 0) -> Iterator[tuple[Any, BatchShare]]:
        """Yield (batch, share) for each global batch of an epoch from `start_batch` on, equally
        many on every rank.

        Batches before `start_batch` are not loaded. A rank with an empty share gets the global
        batch's first sample as a stand-in, with `num_local == 0`: the caller weighs its
        gradient with 0.

        Raises:
            InvalidParamsError: the epoch has no such batch; `start_batch == len(loader)` is
                allowed and yields nothing.
        """
        if not 0 <= start_batch <= len(self):
            msg = f"can't start at batch {start_batch}: an epoch has {len(self)} global batches"
            raise InvalidParamsError(msg)
        return self._lockstep(epoch, start_batch)

    def _lockstep(self, epoch: int, start_batch: int) -> Iterator[tuple[Any, BatchShare]]:
        if start_batch == len(self):
            return
        ids: list[int] = []
        loaded = self._load(epoch, start_batch, stand_ins=True)
        if self._is_tagged:
            loaded = untagged(loaded, ids)
        if self._parts.is_virtual:
            loaded = self._parts.gathered(
                loaded, map(self.batches.num_global, range(start_batch, len(self)))
            )
        last, full = len(self) - 1, self.global_batch_size
        num_local_of = cache(
            self._parts.num_local
        )  # of two sizes at most, the full one and the tail's
        for batch, data in enumerate(loaded, start=start_batch):
            num_global = full if batch < last else self.batches.num_global(last)
            num_local = num_local_of(num_global)
            if not self._is_tagged:
                yield data, BatchShare(epoch, batch, num_local, num_global, batch == last)
                continue
            samples = tuple(ids) if num_local else ()
            ids.clear()
            kept = samples if self._keeps_ids else ()
            yield (
                data,
                BatchShare(
                    epoch,
                    batch,
                    num_local,
                    num_global,
                    batch == last,
                    kept,
                    num_local - len(samples),
                ),
            )

    def _load(self, epoch: int, start_batch: int, *, stand_ins: bool) -> Iterator[Any]:
        self._sampler.plan = (epoch, start_batch, stand_ins)
        self._generator.manual_seed(mix_seed(self.batches.seed, epoch))
        # The DataLoader draws its seed on the default device, which may not be the generator's.
        # Not where that is the CPU anyway: worker processes would inherit the mode, and with it
        # a detour of every operation (0.2 ms an augmented image).
        with nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu"):
            return iter(self._loader)


def _refuse_clashes(dataloader_kwargs: dict[str, Any]) -> None:
    clashes = sorted(OURS & dataloader_kwargs.keys())
    if clashes:
        msg = (
            f"{', '.join(clashes)} can't be passed to the DataLoader: the loader decides the order and the batches itself, "
            "so that each sample is used once; use global_batch_size, shuffle, drop_last and seed of the loader"
        )
        raise InvalidParamsError(msg)
    if not dataloader_kwargs.get("in_order", True):
        msg = (
            "in_order=False can't be passed to the DataLoader: batches would come in another order than they are counted in, and "
            "be lost or repeated at a resume; leave it out"
        )
        raise InvalidParamsError(msg)


def _is_sharded(dataset: object) -> TypeGuard[Sharded]:
    """Tell a dataset that gives shards and has no items of its own; torch's base class has a
    method that only raises.
    """
    own = getattr(type(dataset), "__getitem__", None)
    has_items = own is not None and own is not Dataset.__getitem__ and isinstance(dataset, Sized)
    return isinstance(dataset, Sharded) and (isinstance(dataset, IterableDataset) or not has_items)


def _num_samples(dataset: Dataset[Any]) -> int:
    if isinstance(dataset, IterableDataset):
        msg = (
            f"{type(dataset).__name__} is an IterableDataset, which can't promise each sample exactly once over all ranks; "
            "use a map-style dataset, with __len__ and __getitem__, or give it shards: the methods shards() -> Sequence, "
            "num_samples(shard) -> int and iter_shard(shard) -> Iterator"
        )
        raise InvalidParamsError(msg)
    if not isinstance(dataset, Sized):
        msg = f"{type(dataset).__name__} has no __len__; a dataset needs __len__ and __getitem__"
        raise InvalidParamsError(msg)
    return len(dataset)
