"""The dataset that a DataLoader reads: the user's own, seeded for each sample, with sample ids."""

import operator
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Protocol, TypeAlias, TypeGuard, cast, runtime_checkable

import numpy as np
import torch
from torch.utils.data import Dataset, StackDataset, Subset, TensorDataset, get_worker_info
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map

from prefect_torch_ddp.data.lookahead import Ahead, ahead_of
from prefect_torch_ddp.data.sampler import BatchKeys, mix_seed, short_digest
from prefect_torch_ddp.data.tagged import Tagged, ended_early
from prefect_torch_ddp.errors import CorruptImageError

NUM_STAND_INS = 16
"""So many neighbours are tried before all of a batch that can't be read is an error."""

SeedSamples: TypeAlias = bool | Literal["torch"]
"""Which generators are seeded for each sample in worker processes: python's, NumPy's and
torch's; only torch's; none."""

BeforeEach: TypeAlias = Callable[[int], None] | None
"""Is called with a sample's position in its batch before the sample is made."""

Fetch: TypeAlias = Callable[[Sequence[int], BeforeEach], tuple[Sequence[int], list[Any]]]


# `seed_samples` is a choice of three.
def seed_on_cpu(seed: int, seed_samples: SeedSamples = True) -> None:  # noqa: FBT002
    """Seed the global generators that datasets draw from."""
    if seed_samples is True:
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002 - user code draws from the global generator
    # Not torch.manual_seed: before CUDA is up it queues one call per sample, forever.
    torch.default_generator.manual_seed(seed)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Put python's, NumPy's and torch's global generators back at the end."""
    numpy_state = np.random.get_state()  # noqa: NPY002
    states = random.getstate(), numpy_state, torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        torch.default_generator.set_state(states[2])


@runtime_checkable
class FetchesSeeded(Protocol):
    """A dataset that reads batches at once and ahead of use, and seeds each sample of one."""

    @property
    def may_skip(self) -> bool:
        """Whether it may leave samples out of a batch."""
        ...

    def fetch_seeded(
        self, indices: Sequence[int], before_each: BeforeEach = None
    ) -> tuple[Sequence[int], list[Any]]:
        """Return which of the batch came, as positions in it, and their samples."""
        ...


class HasLayout(ABC):
    """A dataset that knows what its samples are read from: not the user's to derive."""

    @property
    @abstractmethod
    def layout(self) -> str:
        """Names what they are read from, with a digest that differs for other samples."""


class WholeBatches(Dataset[Any], HasLayout):
    """A map-style dataset whose batches come as they are to be: not the user's to derive.

    A loader gives collate_fn such a batch, also of torch's Subset of it.
    """

    blocks: Sequence[np.ndarray[Any, Any]]
    """Where the samples are: arrays [samples, ...]."""
    meaning: Mapping[str, str]
    """Digests that differ if the numbers mean something else, by what they are digests of."""

    @abstractmethod
    def batch_of(self, indices: Sequence[int]) -> Any:
        """Return the batch of these samples."""


class HasCategories(ABC):
    """A dataset in which codes stand for texts: not the user's to derive."""

    @property
    @abstractmethod
    def categories(self) -> Mapping[str, tuple[str, ...]]:
        """The values of each category by column name; a value's code is its position."""

    @property
    @abstractmethod
    def in_order(self) -> tuple[str, ...]:
        """The features and targets, as they lie in x and y; none if batches are dicts."""


def lists_of(dataset: object) -> dict[str, Sequence[str]]:
    """Return the lists by whose order a model knows what a table's numbers mean, by name."""
    inner = _without_subsets(dataset)[0]
    if not isinstance(inner, HasCategories):
        return {}
    lists: dict[str, Sequence[str]] = {
        f"categories of {name}": values for name, values in inner.categories.items()
    }
    if not inner.in_order:
        return lists
    # Other columns are no other order of these.
    names = short_digest(repr(sorted(inner.in_order)).encode(errors="surrogatepass"))
    return {**lists, f"features and targets ({names})": inner.in_order}


def categories_of(dataset: object) -> Mapping[str, tuple[str, ...]]:
    """Return the categories of such a dataset, or of torch's Subset of it; else none.

    In a dataset of others an attribute of that name means something else.
    """
    inner = _without_subsets(dataset)[0]
    return inner.categories if isinstance(inner, HasCategories) else {}


def gives_batches(dataset: object) -> bool:
    """Tell whether a dataset, or torch's Subset of it, gives whole batches."""
    return isinstance(_without_subsets(dataset)[0], WholeBatches)


def seeded_fetch(dataset: object) -> Fetch | None:
    """Return what fetches a batch of such a dataset, or of torch's Subset of one; else None."""
    if isinstance(dataset, FetchesSeeded):
        return dataset.fetch_seeded
    if not _is_subset(dataset):
        return None
    inner = seeded_fetch(dataset.dataset)
    if inner is None:
        return None
    chosen: Sequence[int] = dataset.indices

    def fetch(indices: Sequence[int], before_each: BeforeEach) -> tuple[Sequence[int], list[Any]]:
        following = indices.following if isinstance(indices, Ahead) else ()
        # Plain numbers: a batch that was read ahead is found by them, and no two tensors are equal.
        batches = [[operator.index(chosen[i]) for i in batch] for batch in (indices, *following)]
        return inner(ahead_of(batches[0], batches[1:]), before_each)

    return fetch


def may_skip(dataset: object) -> bool:
    """Tell whether a dataset, or torch's Subset of it, may leave samples out of a batch."""
    inner = _without_subsets(dataset)[0]
    return isinstance(inner, FetchesSeeded) and inner.may_skip


def whole_batch(dataset: object, indices: Sequence[int]) -> Any:
    """Return the batch of these samples of a dataset that gives whole batches."""
    inner, choices = _without_subsets(dataset)
    return cast("WholeBatches", inner).batch_of(_chosen_by(choices, indices))


def reads_at_once(dataset: object) -> bool:
    """Tell whether a dataset has a `__getitems__` that is more than torch's loop over samples."""
    if _is_subset(dataset):
        return reads_at_once(dataset.dataset)
    if getattr(type(dataset), "__getitems__", None) is StackDataset.__getitems__:
        stacked = dataset.datasets  # type: ignore[attr-defined]
        return any(map(reads_at_once, stacked.values() if isinstance(stacked, dict) else stacked))
    return getattr(dataset, "__getitems__", None) is not None


def gathered(dataset: object, indices: Sequence[int]) -> list[torch.Tensor] | None:
    """Return a batch of torch's TensorDataset, or of its Subset, as default_collate would make it.

    It takes one call for each tensor, instead of one for each sample: for small samples a tenth of
    the time. None: the samples have to be asked for, as where they give an error.
    """
    dataset, choices = _without_subsets(dataset)
    if not isinstance(dataset, TensorDataset) or hasattr(dataset, "__getitems__"):
        return None
    is_torchs = type(dataset).__getitem__ is TensorDataset.__getitem__
    is_torchs &= default_collate_fn_map.get(torch.Tensor) is collate_tensor_fn
    if not is_torchs or not all(map(_stacks_by_index, dataset.tensors)):
        return None
    indices = _chosen_by(choices, indices)
    num_samples = min(map(len, dataset.tensors))
    if {*map(type, indices)} != {int} or min(indices) < 0 or max(indices) >= num_samples:
        return None
    index = torch.tensor(indices, device="cpu")
    return [tensor.index_select(0, index) for tensor in dataset.tensors]


def _without_subsets(dataset: object) -> tuple[object, list[Any]]:
    """Return what is below torch's Subsets, and the indices of each, the outermost first."""
    choices = []
    while _is_subset(dataset):
        choices.append(dataset.indices)
        dataset = dataset.dataset
    return dataset, choices


def _chosen_by(choices: Sequence[Any], indices: Sequence[int]) -> Sequence[int]:
    for chosen in choices:
        indices = _chosen(chosen, indices)
    return indices


def _chosen(chosen: Any, indices: Sequence[int]) -> Sequence[int]:
    """Return a Subset's indices of samples; as plain numbers, where an array has them."""
    is_array = isinstance(chosen, np.ndarray)
    if is_array or (isinstance(chosen, torch.Tensor) and chosen.dtype is torch.int64):
        of_samples: list[int] = chosen[[*indices]].tolist()
        return of_samples
    return [chosen[i] for i in indices]


def _stacks_by_index(tensor: object) -> bool:
    """Whether index_select gives what torch.stack would of the samples, to the strides."""
    if type(tensor) is not torch.Tensor or tensor.device.type != "cpu" or tensor.is_nested:
        return False
    is_strided = tensor.layout is torch.strided and not tensor.is_quantized
    # Of samples with four dimensions and more, stack keeps channels_last.
    return is_strided and (tensor.dim() <= 4 or tensor.is_contiguous())  # noqa: PLR2004


def _is_subset(dataset: object) -> TypeGuard[Subset[Any]]:
    """Tell whether a dataset is torch's Subset, or a class of it that reads batches as it does."""
    return getattr(type(dataset), "__getitems__", None) is Subset.__getitems__


class SeededDataset(Dataset[Any]):
    """The user's dataset, with the generators of a worker process seeded for each sample.

    `get_worker_info().dataset` is this object: what a `worker_init_fn` reads from it or sets on
    it goes to the user's own.

    Args:
        dataset: the user's.
        seed: of the training.
        seed_samples: which generators are seeded.
        seeds_here: in the rank's own process too.
        stands_in: fetch another sample if nothing of a batch can be read.
        gathers: take a TensorDataset's batches from its tensors at once; only if collate_fn is
            default_collate.
    """

    def __init__(  # noqa: PLR0913 - each its own choice, by name
        self,
        dataset: Dataset[Any],
        seed: int,
        seed_samples: SeedSamples,
        *,
        seeds_here: bool,
        stands_in: bool,
        gathers: bool = False,
    ) -> None:
        self.__dict__.update(
            _dataset=dataset,
            _seed=seed,
            _seed_samples=seed_samples,
            _seeds_here=seeds_here,
            _stands_in=stands_in,
            _gathers=gathers and not seeds_here,
            # Asked once: to compare with a protocol takes longer than to fetch some samples.
            _looks_ahead=seeded_fetch(dataset) is not None,
            _reads_at_once=reads_at_once(dataset),
            _gives_batches=gives_batches(dataset),
        )

    def __getitems__(self, keys: BatchKeys) -> Tagged:
        epoch, indices, is_training, draws = keys
        try:
            tagged = self._fetch_tagged(epoch, indices, indices if draws is None else draws)
            return replace(tagged, is_training=is_training)
        except StopIteration as error:
            raise ended_early(self._dataset, indices) from error

    def _fetch_tagged(self, epoch: int, indices: list[int], numbers: Sequence[int]) -> Tagged:
        """Fetch a batch; `numbers` seed its samples, each its own draw's if it is drawn."""
        if not self._looks_ahead:
            # Worker processes seed each sample, and collate right into memory that is shared.
            batch = None
            if self._gathers and get_worker_info() is None:
                batch = gathered(self._dataset, indices)
            if batch is not None:
                return Tagged(tuple(indices), batch, is_collated=True)
            return Tagged(tuple(indices), self._fetch(epoch, indices, numbers))

        def seed(position: int) -> None:
            seed_on_cpu(mix_seed(self._seed, epoch, numbers[position]), self._seed_samples)

        fetch = cast("Fetch", seeded_fetch(self._dataset))
        try:
            positions, data = fetch(indices, seed if self._seeds() else None)
        except CorruptImageError:
            if not self._stands_in:
                raise
            for number in range(indices[0] + 1, indices[0] + 1 + NUM_STAND_INS):
                with suppress(CorruptImageError):
                    return Tagged((), fetch([number % len(self._dataset)], None)[1])
            raise
        return Tagged(tuple(indices[position] for position in positions), data)

    def _fetch(self, epoch: int, indices: list[int], numbers: Sequence[int]) -> Any:
        dataset, seed_samples, seeds = self._dataset, self._seed_samples, self._seeds()
        fetch_all = getattr(dataset, "__getitems__", None)
        if self._gives_batches:
            fetch_all = partial(whole_batch, dataset)
        if fetch_all is not None and (self._reads_at_once or not seeds):
            if seeds:
                seed_on_cpu(mix_seed(self._seed, epoch, numbers[0]), seed_samples)
            return fetch_all(indices)
        if not seeds:
            return [dataset[index] for index in indices]
        # All seeds in one go: after a sample, whose data fill the processor's caches, making
        # one takes ten times as long.
        seed_of = [mix_seed(self._seed, epoch, number) for number in numbers]
        samples = []
        for index, seed in zip(indices, seed_of, strict=True):
            seed_on_cpu(seed, seed_samples)
            samples.append(dataset[index] if fetch_all is None else fetch_all([index])[0])
        return samples

    def _seeds(self) -> bool:
        # In the rank itself the generators belong to the training, unless that seeds them for
        # each step.
        is_asked = self._seed_samples is not False
        return is_asked and (self._seeds_here or get_worker_info() is not None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_dataset" not in self.__dict__:  # being unpickled
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._dataset, name, value)
