"""How a rank reads its share of the data: torch's DataLoader over the exact order."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import cache, cached_property
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from prefect_torch_ddp.data.arguments import (
    NoneSamples,
    Order,
    Weights,
    check_choices,
    check_workers,
    checked_weights,
    count_samples,
    has_own_order,
    is_sharded,
    refuse_clashes,
    refuse_orders_of,
)
from prefect_torch_ddp.data.fetching import (
    SeededDataset,
    SeedSamples,
    gives_batches,
    may_skip,
    seeded_fetch,
)
from prefect_torch_ddp.data.own_files import OwnFiles
from prefect_torch_ddp.data.sampler import (
    BatchShare,
    GlobalBatches,
    OwnOrder,
    RankShares,
    ShareSampler,
    VirtualShare,
    VirtualShares,
    mix_seed,
)
from prefect_torch_ddp.data.shards import PositionReader, ReadByPosition, Sharded, ShardReader
from prefect_torch_ddp.data.tagged import Tagged, TaggedCollate
from prefect_torch_ddp.data.traits import Trait, layout_of, traits_of
from prefect_torch_ddp.errors import InvalidParamsError

logger = logging.getLogger(__name__)


class RankLoader:
    """Load a rank's share of each global batch of a map-style dataset, or of one in shards.

    The global batches and their order depend only on the seed and the epoch. They are the same for
    every world size, and each sample appears exactly once per epoch.

    Randomness: without virtual ranks, iterating doesn't touch the global random generators. In
    worker processes (`num_workers` > 0) they are seeded for each sample from (seed, epoch, sample
    index). Augmentation is therefore independent of the number of workers, the world size and the
    batch at which an epoch is resumed, also through torch's `Subset`, `random_split` and
    `StackDataset`. A dataset with its own `__getitems__` is seeded once per fetched batch, by the
    batch's first index; it is reproducible at the same world size. With `num_workers=0` the dataset
    draws from the rank's global generators, in order. Checkpoints restore their state, so a
    resumed training reproduces the draws. No worker starts before the first iteration.

    Args:
        dataset: a dataset with `__len__` and `__getitem__`; one in shards, see
            `data.shards.Sharded`; or a `data.table`.
        global_batch_size: number of samples per step over all ranks together.
        rank: this rank.
        world_size: number of ranks.
        seed: determines the order of every epoch.
        shuffle: use a new order in each epoch; otherwise the dataset's order.
        drop_last: leave out the epoch's uneven tail.
        virtual_ranks: number of shares into which each global batch is split. Each rank loads its
            shares one by one, so that loading doesn't depend on the number of ranks.
        keep_ids: have `lockstep` return the samples of each batch, for a ledger.
        keeps_epoch: returns whether `epoch` stays, since the number of passes isn't saved.
        step_under_way: returns the step of `ctx.steps` whose body runs; None outside of its bodies.
        seed_samples: which generators are seeded. "torch": only torch's, for a dataset and a
            collate_fn that draw from no other, such as torchvision's v2 transforms. False: none,
            for a dataset that draws nothing. Either saves some microseconds a sample, which
            matters if a sample takes less than a millisecond.
        weights: numbers of shape [samples]: how often each sample is drawn, relative to the others.
            An epoch then has as many draws as there are samples, with replacement, in an order that
            depends only on the seed and the epoch. Each draw is augmented separately.
        order: a function that returns the indices of an epoch's samples, from 0, instead of
            `shuffle`: equally many in each epoch, and the same ones on every rank.
        none_samples: what to do about a sample that is None in a step. "refuse": on several ranks
            an error names it before collate_fn gets it, since the others would get too much weight;
            one rank trains on what collate_fn leaves, and the sample doesn't count as used. "keep":
            collate_fn replaces it by another sample, and it counts as planned.
        **dataloader_kwargs: other arguments of torch's DataLoader, such as num_workers, collate_fn
            or pin_memory.

    Raises:
        InvalidParamsError: the dataset or an argument is invalid.
    """

    def __init__(  # noqa: PLR0913 - the arguments of a DataLoader and the rank, all by name
        self,
        dataset: Dataset[Any] | Sharded | ReadByPosition,
        *,
        global_batch_size: int,
        rank: int,
        world_size: int,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        virtual_ranks: int | None = None,
        keep_ids: bool = False,
        keeps_epoch: Callable[[], bool] = lambda: False,
        step_under_way: Callable[[], int | None] = lambda: None,
        seed_samples: SeedSamples = True,
        weights: Weights | None = None,
        order: Order | None = None,
        none_samples: NoneSamples = "refuse",
        **dataloader_kwargs: Any,
    ) -> None:
        refuse_clashes(dataloader_kwargs, rank, world_size)
        self.dataset = dataset
        self.rank, self.world_size = rank, world_size
        self.epoch = 0
        """Whose order `iter(loader)` takes. It isn't saved: your own loop sets it."""
        self._keeps_epoch = keeps_epoch
        self._step_under_way = step_under_way
        self._has_warned = False
        self._keeps_ids = keep_ids
        self._turn = 0
        """Counts passes: persistent workers serve the newest one."""
        self._shares = RankShares.of_rank(rank, world_size, virtual_ranks)
        check_choices(dataset, seed_samples, none_samples, is_virtual=self._shares.is_virtual)
        collate = dataloader_kwargs.pop("collate_fn", None) or _own_collate(dataset)
        fetched: SeededDataset | ShardReader | PositionReader
        refuse_orders_of(dataset, shuffle=shuffle, weights=weights, order=order)
        drawn_by = own_order = of_reader = None
        if has_own_order(dataset):
            fetched, of_reader = self._own_reader(dataset, global_batch_size, seed, shuffle=shuffle)
            num_samples, shuffle = len(fetched), False
        else:
            num_samples = count_samples(dataset)
            drawn_by = None if weights is None else checked_weights(weights, num_samples)
            own_order = None if order is None else OwnOrder(order, num_samples)
            gathers = collate is default_collate
            fetched = self._seeded(dataset, seed, seed_samples, gathers=gathers)
        self.batches = GlobalBatches(
            num_samples, global_batch_size, seed, shuffle, drop_last, drawn_by, own_order
        )
        of_files = f": {files}" if (files := layout_of(dataset)) else ""
        order_name = of_reader or self.batches.order_name()
        self.order = f"{num_samples} samples in {order_name}{of_files}"
        """Describes the order that the global batches are cut from, for all epochs."""
        num_workers = dataloader_kwargs.get("num_workers", 0) if seeded_fetch(dataset) else None
        self._sampler = ShareSampler(self.batches, self._shares, num_workers)
        is_alone = world_size == 1 and not self._shares.is_virtual
        self._keeps_nones = none_samples == "keep"
        self._refuses_nones = not (is_alone or self._keeps_nones)
        self._generator = torch.Generator(device="cpu")
        self._loader = self._make_loader(fetched, collate, dataloader_kwargs)

    def _own_reader(
        self, dataset: Any, global_batch_size: int, seed: int, *, shuffle: bool
    ) -> tuple[ShardReader | PositionReader, str]:
        """Return what reads a dataset by positions in its own order, and what that is."""
        order = f"the order of seed {seed}" if shuffle else "their own order"
        if isinstance(dataset, ReadByPosition):
            batches = GlobalBatches(len(dataset), global_batch_size, seed)
            reader = dataset.reader(batches, self._shares, shuffle=shuffle)
            return reader, f"{order}: {reader.order}"
        is_virtual = self._shares.is_virtual
        shards = ShardReader(dataset, seed, shuffle=shuffle, seeds_here=is_virtual)
        mixed = f", shuffled in blocks of {shards.block_size}" if shuffle else ""
        return shards, f"{order}{mixed}: {shards.layout}"

    def _seeded(
        self, dataset: Any, seed: int, seed_samples: SeedSamples, *, gathers: bool
    ) -> SeededDataset:
        return SeededDataset(
            dataset,
            seed,
            seed_samples,
            seeds_here=self._shares.is_virtual,
            # Alone, a rank has nobody whose gradients make its stand-in's count for nothing.
            stands_in=may_skip(dataset) and self.world_size > 1,
            gathers=gathers,
        )

    def _make_loader(
        self, fetched: Any, collate: Callable[[Any], Any], options: Mapping[str, Any]
    ) -> DataLoader[Any]:
        check_workers(options.get("num_workers", 0))
        batches = cast("Any", self._sampler)
        self._files = OwnFiles(options.get("worker_init_fn"))
        loader: DataLoader[Any] = DataLoader(
            fetched,
            batch_sampler=batches,
            generator=self._generator,
            **{**options, "worker_init_fn": self._files},
        )
        refuses, has_workers = self._refuses_nones, loader.num_workers > 0
        loader.collate_fn = TaggedCollate(collate, refuses, has_workers=has_workers)
        return loader

    @cached_property
    def traits(self) -> dict[str, list[Trait]]:
        """A few values of the dataset as it is when first asked: equal on all ranks."""
        fetched = self._loader.dataset
        return (
            traits_of(self.dataset, self.batches.num_samples)
            if isinstance(fetched, SeededDataset)
            else cast("PositionReader", fetched).traits
        )

    def order_of(self, epoch: int) -> str:
        """Describe the order of an epoch; equal words, equal orders."""
        digest = self.batches.order_digest(epoch)
        return f"{self.order} with the digest {digest}" if digest else self.order

    @property
    def global_batch_size(self) -> int:
        """Samples per step over all ranks together."""
        return self.batches.global_batch_size

    def __len__(self) -> int:
        """Return the global batches per epoch: the optimizer steps of an epoch."""
        return self.batches.num_batches

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's batches of one exact pass, for evaluation or your own loop.

        A pass has the order and augmentation of `epoch`, which advances when the second batch is
        requested: a rank that looks only at a first batch keeps the order of the others. After a
        restart it is 0 again: your own loop tracks its epoch, and sets `epoch` to it.

        Ranks may yield different numbers of batches, since some may have an empty share of the
        tail, so nothing that waits for other ranks belongs in the loop's body.
        """
        return self._pass(self.epoch, self._load(self.epoch, start_batch=0, stand_ins=False))

    def _pass(self, epoch: int, loaded: Iterator[Tagged]) -> Iterator[Any]:
        begun_in = self._step_under_way()
        for tagged in loaded:
            if tagged.samples:
                yield tagged.data
            self._warn_if_continued(begun_in)
            self._pass_counts(epoch)
        self._pass_counts(epoch)  # without a batch, too: other ranks may have one

    def _pass_counts(self, epoch: int) -> None:
        if self.epoch == epoch and not self._keeps_epoch():
            self.epoch = epoch + 1

    def _warn_if_continued(self, begun_in: int | None) -> None:
        """Warn, once, if a pass goes on in another step: its place is in no checkpoint."""
        step = self._step_under_way()
        if self._has_warned or step in (None, begun_in):
            return
        self._has_warned = True
        logger.warning(
            "step %d continues an iteration over a loader from ctx.loader that began before this "
            "step. Its position isn't in checkpoints: a resumed training begins it again, so its "
            "steps get other batches than those of an undisturbed one. To train on two datasets in "
            "each step, make one of both, such as torch.utils.data.StackDataset(first, second)",
            step,
        )

    def lockstep(self, epoch: int, start_batch: int = 0) -> Iterator[tuple[Any, BatchShare]]:
        """Yield (batch, share) for each global batch of an epoch from `start_batch` on.

        Every rank yields equally many. Batches before `start_batch` are not loaded. A rank with
        an empty share gets the global batch's first sample as a stand-in, with `num_local ==
        0`: the caller weighs its gradient with 0.

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
        loaded = self._load(epoch, start_batch, stand_ins=True)
        last = len(self) - 1
        full, tail = self._loads(stand_ins=True)
        for batch in range(start_batch, len(self)):
            num_global, sizes = tail if batch == last else full
            num_local = sum(sizes.values())
            pieces = [next(loaded) for _ in sizes]
            data = pieces[0].data
            if self._shares.is_virtual:
                shares = (
                    VirtualShare(number, size, piece.data)
                    for (number, size), piece in zip(sizes.items(), pieces, strict=True)
                )
                data = VirtualShares(tuple(shares), num_global)
            used = [self._used(piece) for piece in pieces]  # of a stand-in too, to name a None
            ids: tuple[int, ...] = sum(used, ()) if num_local else ()
            kept, num_skipped = ids if self._keeps_ids else (), num_local - len(ids)
            about = epoch, batch, num_local, num_global, batch == last
            yield data, BatchShare(*about, kept, num_skipped)
        for _ in loaded:  # nothing is left: lets the DataLoader end its workers
            pass

    def _used(self, piece: Tagged) -> tuple[int, ...]:
        """Return the ids of the samples that a step trains on; refuse one that is None."""
        if not piece.nones or self._keeps_nones:
            return piece.samples
        if self._refuses_nones:
            msg = (
                f"sample {min(piece.nones)} of the dataset is None. If collate_fn left it out, the "
                "others of its share would count for more than those of other shares, and the "
                "gradient would be wrong. Leave it out of the dataset, as with "
                "torch.utils.data.Subset, have the dataset return another sample in its place, or "
                'pass none_samples="keep" to ctx.loader if your collate_fn puts one there'
            )
            raise InvalidParamsError(msg)
        _warn_of_nones()
        return tuple(sample for sample in piece.samples if sample not in piece.nones)

    def _load(self, epoch: int, start_batch: int, *, stand_ins: bool) -> Iterator[Tagged]:
        had = self.batches.num_samples
        if not is_sharded(self.dataset) and (has := count_samples(self.dataset)) < had:
            what = f"the dataset has {has} samples now and had {had} when ctx.loader was called"
            msg = f"{what}; it must not shrink; it may grow, but added samples aren't used"
            raise InvalidParamsError(msg)
        self._sampler.plan = (epoch, start_batch, stand_ins)
        self._generator.manual_seed(mix_seed(self.batches.seed, epoch))
        if self._loader.num_workers:
            self._files.note()
        # The DataLoader draws its seed on the default device, which may not be the generator's.
        # Not if that is the CPU anyway: worker processes would inherit the mode, and with it
        # a detour of every operation (0.2 ms an augmented image).
        with nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu"):
            loaded = iter(self._loader)
        (_, full), (_, tail) = self._loads(stand_ins=stand_ins)
        num = len(full) * (len(self) - 1 - start_batch) + len(tail)
        self._turn = turn = self._turn + 1
        is_shared = self._loader.persistent_workers
        return _to_the_end(loaded, num, lambda: self._turn == turn or not is_shared)

    def _loads(self, *, stand_ins: bool) -> list[tuple[int, dict[int, int]]]:
        """Return the size of a full global batch and of the last, and of the shares loaded here."""
        stand_in = {self._shares.own[0]: 0} if stand_ins else {}
        sizes = self.global_batch_size, self.batches.num_global(len(self) - 1)
        return [(size, self._shares.sizes(size) or stand_in) for size in sizes]


def _own_collate(dataset: Any) -> Callable[[Any], Any]:
    comes_whole = isinstance(dataset, ReadByPosition) or gives_batches(dataset)
    return _as_it_is if comes_whole else default_collate


def _as_it_is(batch: Any) -> Any:
    """Collate a batch that is one already."""
    return batch


@cache
def _warn_of_nones() -> None:
    """Say it once in a process, not in each epoch."""
    logger.warning(
        "the dataset has samples that are None: they don't count as used, and a ledger reports "
        "them as missing; on several ranks they are an error"
    )


def _to_the_end(
    loaded: Iterator[Tagged], num: int, has_workers: Callable[[], bool]
) -> Iterator[Tagged]:
    """Yield all; refuse a pass that ends earlier, whatever in the DataLoader raised the end.

    Or one whose worker processes have been given another pass: their batches are of that one.
    """
    for num_loaded in range(num):
        if not has_workers():
            msg = (
                f"another pass over this loader began after {num_loaded} of {num} batches of this "
                "one, and persistent workers serve one pass at a time: make another loader for "
                "it, with ctx.loader, or leave persistent_workers out"
            )
            raise InvalidParamsError(msg)
        if (tagged := next(loaded, None)) is None:
            msg = (
                f"the DataLoader's pass ended after {num_loaded} of {num} batches: samples would "
                "be lost; look for a StopIteration in what it calls, such as pin_memory or "
                "worker_init_fn"
            )
            raise RuntimeError(msg)
        yield tagged
    if has_workers():
        next(loaded, None)  # the end, at which the DataLoader ends its workers
