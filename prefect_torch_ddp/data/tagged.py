"""A fetched batch on its way to the rank: with the ids of its samples, collated, pickled."""

import pickle
import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.reduction import ForkingPickler
from typing import Any, Self

from torch.utils.data import get_worker_info
from torch.utils.data._utils.pin_memory import pin_memory


@dataclass(frozen=True)
class Tagged:
    """A batch with the ids of its samples, from the process that fetched them."""

    samples: tuple[int, ...]
    data: Any
    is_collated: bool = False
    """Whether `data` is a finished batch, which collate_fn isn't given."""
    is_training: bool = False
    """Whether it is a share of a step, whose gradient counts by the planned number of samples."""
    nones: tuple[int, ...] = ()
    """Those of `samples` that are None."""

    def pin_memory(self) -> Self:
        """Pin the batch's tensors, as the DataLoader asks of a type it doesn't know."""
        return replace(self, data=pin_memory(self.data))  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Pickled:
    """A batch that arrives as `Tagged` in the process that unpickles it.

    It is pickled by the worker's main thread, torch's own way. torch would do so in a thread of
    its queue, where an error reaches nobody and the rank waits for ever.
    """

    data: bytes

    @classmethod
    def of(cls, batch: Tagged) -> Self:
        """Pickle a batch; raises what pickle raises."""
        return cls(bytes(ForkingPickler.dumps(batch)))

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (self.data,)


@dataclass(frozen=True)
class TaggedCollate:
    """The user's collate function, around which the ids travel.

    Args:
        collate: the user's.
        refuses_nones: samples of a step that are None don't reach it; the rank raises the error.
        has_workers: it runs in worker processes of its loader.
    """

    collate: Callable[[Any], Any]
    refuses_nones: bool
    has_workers: bool

    def __call__(self, fetched: Tagged) -> Tagged | Pickled:
        """Collate a fetched batch; in a worker process, pickle it as well."""
        if not fetched.is_collated:
            # Before collate_fn, which may change the list of samples.
            fetched = replace(fetched, nones=_nones_of(fetched))
            if fetched.nones and fetched.is_training and self.refuses_nones:
                return replace(fetched, data=None)
            try:
                fetched = replace(fetched, data=self.collate(fetched.data))
            except StopIteration as error:
                raise ended_early(self.collate, fetched.samples) from error
        # A loader without workers may be read in a worker of another one.
        in_worker = self.has_workers and get_worker_info() is not None
        return Pickled.of(fetched) if in_worker else fetched


def _nones_of(fetched: Tagged) -> tuple[int, ...]:
    """Return the ids of the fetched samples that are None."""
    # A stand-in for skipped images has no id; a `__getitems__` may give something else than a list.
    if not isinstance(fetched.data, list) or len(fetched.data) != len(fetched.samples):
        return ()
    pairs = zip(fetched.samples, fetched.data, strict=True)
    return tuple(number for number, sample in pairs if sample is None)


def ended_early(what: object, loaded: Sequence[Any]) -> RuntimeError:
    """Return the error in place of a StopIteration, at which a DataLoader's pass just ends."""
    name = getattr(what, "__qualname__", type(what).__name__)
    return RuntimeError(
        f"{name} raised StopIteration, reading {reprlib.repr(list(loaded))}: it would end the "
        "epoch there and lose samples; give next() a default, or catch it"
    )
