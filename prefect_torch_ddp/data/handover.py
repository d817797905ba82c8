"""How a fetched batch is collated, and gets from a worker process of the loader to the rank.

torch hands each tensor's file descriptor over a new socket, authenticated both ways, by a thread
that waits for the worker's other code: 0.7 ms of processor time a tensor, more than a small batch
takes to make. Here the rank opens the descriptor below /proc, and the worker keeps it meanwhile.
"""

import os
import pickle
import reprlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from io import BytesIO
from multiprocessing.reduction import ForkingPickler
from typing import Any, Self, TypeAlias

import torch
from torch.multiprocessing import get_sharing_strategy
from torch.utils.data import get_worker_info
from torch.utils.data._utils.pin_memory import pin_memory

from prefect_torch_ddp.data.left_out import is_smaller, nones_of

MOST_KEPT = 4 * 1024**2
"""Bytes of a batch that a worker keeps, also while it is idle. What is beyond goes torch's way:
making that takes far longer than handing it over."""

Layout: TypeAlias = tuple[int, tuple[int, ...], tuple[int, ...]]
"""A tensor's offset in its storage, its shape and its strides."""


@dataclass(frozen=True)
class Tagged:
    """A batch with the ids of its samples, from the process that fetched them."""

    samples: tuple[int, ...]
    data: Any
    is_collated: bool = False
    """Whether `data` is a finished batch, which collate_fn isn't given."""
    left_out: tuple[int, ...] = ()
    """Those of `samples` that are None, and that collate_fn left out."""

    def pin_memory(self) -> Self:
        """Pin the batch's tensors, as the DataLoader asks of a type it doesn't know."""
        return replace(self, data=pin_memory(self.data))  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Packed:
    """A batch that arrives as `Tagged` in the process that unpickles it.

    Args:
        pickled: the batch.
        storages: what the rank opens; they have to be kept until it has.
    """

    pickled: bytes
    storages: list[torch.UntypedStorage]

    @classmethod
    def of(cls, batch: Tagged) -> Self:
        """Pack a batch; what can't be pickled is an error here, and a hang in torch's thread."""
        file = BytesIO()
        packer = _Packer(file)
        packer.dump(batch)
        return cls(file.getvalue(), packer.storages)

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (self.pickled,)


class _Packer(ForkingPickler):
    def __init__(self, file: BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.storages: list[torch.UntypedStorage] = []
        self._room = MOST_KEPT

    def reducer_override(self, value: object) -> Any:
        if type(value) is torch.Tensor and _is_plain(value):
            value = value.resolve_conj().resolve_neg()  # torch's own way loses that they are
            layout = value.storage_offset(), tuple(value.shape), value.stride()
            return _view, (value.untyped_storage(), value.dtype, layout)
        # A storage comes once, however many tensors it has.
        if type(value) is torch.UntypedStorage and self._can_keep(value):
            descriptor, size = value._share_fd_cpu_()  # as torch's own reduction does
            self.storages.append(value)
            self._room -= size
            return _open, (os.getpid(), descriptor, _file_of(descriptor), size)
        return NotImplemented

    def _can_keep(self, storage: torch.UntypedStorage) -> bool:
        if storage.device.type != "cpu" or not storage.nbytes():
            return False
        strategy = get_sharing_strategy()  # type: ignore[no-untyped-call]
        has_room = storage.nbytes() <= self._room
        return has_room and strategy == "file_descriptor" and _can_be_opened()


def _is_plain(tensor: torch.Tensor) -> bool:
    is_strided = tensor.layout is torch.strided and not tensor.is_nested
    is_special = tensor.requires_grad or tensor.is_quantized
    return tensor.device.type == "cpu" and is_strided and not is_special


@cache
def _can_be_opened() -> bool:
    """Tell whether a process and its parent may open each other's files below /proc."""
    folder = f"/proc/{os.getppid()}/fd"
    try:
        number = os.listdir(folder)[0]  # noqa: PTH208 - a name alone
        os.readlink(f"{folder}/{number}")  # noqa: PTH115
    except (OSError, IndexError):
        return False
    return True


def _file_of(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _open(pid: int, number: int, file: tuple[int, int], size: int) -> torch.UntypedStorage:
    descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if _file_of(descriptor) != file:
            msg = f"the shared memory of a batch is gone from the loader's worker process {pid}"
            raise RuntimeError(msg)
        storage_class: Any = torch.UntypedStorage
        storage: torch.UntypedStorage = storage_class._new_shared_fd_cpu(  # noqa: SLF001
            descriptor, size
        )
        return storage
    finally:
        os.close(descriptor)


def _view(storage: torch.UntypedStorage, dtype: torch.dtype, layout: Layout) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage, *layout)


@dataclass(frozen=True)
class TaggedCollate:
    """The user's collate function, around which the ids travel.

    Args:
        collate: the user's.
        prefetch_factor: so many batches of a worker may be on their way to the rank; 0: there
            are no workers.
    """

    collate: Callable[[Any], Any]
    prefetch_factor: int
    _kept: deque[list[torch.UntypedStorage]] = field(default_factory=deque, init=False)

    def __call__(self, fetched: Tagged) -> Tagged | Packed:
        """Collate a fetched batch; in a worker process, pack it as well."""
        # A worker is asked for a batch once the rank has the one so many before it.
        while len(self._kept) > max(self.prefetch_factor - 1, 0):
            self._kept.popleft()
        # Before collate_fn, which may change the list of samples.
        nones = () if fetched.is_collated else nones_of(fetched.data, fetched.samples)
        try:
            data = fetched.data if fetched.is_collated else self.collate(fetched.data)
            lacks = nones and is_smaller(data, len(fetched.samples), len(nones))
            batch = Tagged(fetched.samples, data, left_out=nones if lacks else ())
        except StopIteration as error:
            raise ended_early(self.collate, fetched.samples) from error
        # A loader without workers may be read in another one's worker.
        if not self.prefetch_factor or get_worker_info() is None:
            return batch
        packed = Packed.of(batch)
        self._kept.append(packed.storages)
        return packed


def ended_early(what: object, loaded: Sequence[Any]) -> RuntimeError:
    """Return the error in place of a StopIteration, at which a DataLoader's pass just ends."""
    name = getattr(what, "__qualname__", type(what).__name__)
    return RuntimeError(
        f"{name} raised StopIteration, reading {reprlib.repr(list(loaded))}: it would end the "
        "epoch there and lose samples; give next() a default, or catch it"
    )
