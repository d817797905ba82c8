"""The objects of a checkpoint: several at once are read, verified and decoded.

What could not be read back is refused before it is written.

An object's digest is its BLAKE3 (https://github.com/BLAKE3-team/BLAKE3), as the command `b3sum`
shows it; it takes a third of the time of sha256.
"""

import os
import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from blake3 import blake3

from prefect_torch_ddp.checkpoint.manifest import Manifest, ManifestObject
from prefect_torch_ddp.checkpoint.state.serial import (
    NUMPYS,
    PYTHONS,
    from_bytes,
    from_file,
    is_dense_tensor,
    map_tensors,
    to_bytes,
)
from prefect_torch_ddp.errors import (
    CheckpointError,
    DamagedObjectError,
    InvalidParamsError,
    NewerFormatError,
    ObjectNotFoundError,
    StorageError,
)
from prefect_torch_ddp.storage.protocol import Storage

NUM_THREADS = 4
"""Hashing, copying and waiting for a storage leave Python's lock to others."""
PIECE_BYTES = 2**21
"""Few enough to stay in a processor's cache between reading and hashing."""
_LARGE_BYTES = 2**26
"""From here on an object is hashed by several threads."""
LOCAL = frozenset({"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs"})
"""A file that is open or mapped there stays readable after its name is gone."""
_SURE = PYTHONS | NUMPYS - {np.bytes_}
"""What can always be read back."""
_SHORTAGE = re.compile(r"allocate memory|Too many open files")
"""What this machine is short of, in torch's words: a RuntimeError."""


def read_object(storage: Storage, manifest: Manifest, item: ManifestObject) -> bytes:
    """Return the bytes of a checkpoint's object.

    Raises:
        CheckpointError: it is missing or isn't what was written; names it.
        NewerFormatError: it is what was written, and this version of torch can't read it.
        StorageError: the storage failed, which says nothing about the object.
    """
    with _explained(manifest, item):
        data = storage.read(item.key)
    digest = _hasher(len(data)).update(data).hexdigest()
    _check_digest(manifest, item, len(data), digest)
    return data


def read_state(storage: Storage, manifest: Manifest, item: ManifestObject) -> Any:
    """Return the state that an object holds, its tensors on the CPU; raises as `read_object`.

    Those of a module may be the object's file, mapped: to be copied, not to be kept, since a
    mapping holds a deleted checkpoint's room on the disk.
    """
    with _explained(manifest, item):
        if (opened := storage.open_file(item.key)) is not None:
            with opened as file:
                if is_local(file):
                    return _map_state(file, storage, manifest, item)
        return from_bytes(read_object(storage, manifest, item))


def read_states(
    storage: Storage, manifest: Manifest, items: Iterable[ManifestObject]
) -> dict[str, Any]:
    """Return the states of several objects by name; see `read_state`."""
    # The largest first: what remains at the end is short.
    by_size = sorted(items, key=lambda item: -item.num_bytes)
    pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="prefect-torch-ddp-restore")
    try:
        states = pool.map(lambda item: read_state(storage, manifest, item), by_size)
        return {item.name: state for item, state in zip(by_size, states, strict=True)}
    finally:
        pool.shutdown(cancel_futures=True)


def _map_state(file: BinaryIO, storage: Storage, manifest: Manifest, item: ManifestObject) -> Any:
    # By reading, not by the mapping: a disk's error is then an error and no signal.
    num_bytes = os.fstat(file.fileno()).st_size
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
    digest, piece = _hasher(num_bytes), memoryview(bytearray(PIECE_BYTES))
    try:
        while num_read := os.readv(file.fileno(), [piece]):
            digest.update(piece[:num_read])
    except OSError as error:
        msg = f"can't read {item.key} in {storage.uri}: {error.strerror}; check the disk"
        raise StorageError(msg) from error
    _check_digest(manifest, item, num_bytes, digest.hexdigest())
    state = from_file(file)
    return state if item.is_module else map_tensors(state, torch.clone)


def is_local(file: BinaryIO) -> bool:
    """Return whether a file is known to be on a file system of this machine (on Linux only).

    One mapped from elsewhere ends the process by SIGBUS if its server fails.
    """
    with suppress(OSError):
        # Not the file's own device, which is none of the mounted where an overlay has layers on
        # several disks.
        device = Path(file.name).parent.stat().st_dev
        name = f"{os.major(device)}:{os.minor(device)}"
        text = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
        # proc(5): mount id, parent id, device, root, mount point, options, tags, "-", file system
        of_device = (line for line in text.splitlines() if line.split()[2] == name)
        kinds = {line.partition(" - ")[2].split()[0] for line in of_device}
        return bool(kinds) and kinds <= LOCAL
    return False


def content_digest(data: bytes | memoryview) -> str:
    """Return the content's BLAKE3 in hex; by one thread, as a training needs the others."""
    return blake3(data).hexdigest()


def _hasher(num_bytes: int) -> blake3:
    return blake3(max_threads=NUM_THREADS if num_bytes >= _LARGE_BYTES else 1)


def _check_digest(manifest: Manifest, item: ManifestObject, num_bytes: int, digest: str) -> None:
    if digest != item.digest:
        reason = f"is damaged ({num_bytes} bytes of {item.num_bytes}; the digest differs)"
        raise _unreadable(manifest, item, reason)


def _unreadable(manifest: Manifest, item: ManifestObject, reason: str) -> CheckpointError:
    checkpoint = f"checkpoint of step {manifest.step} of run {manifest.run_id}"
    return CheckpointError(f"{checkpoint}: its object {item.key} {reason}")


@contextmanager
def _explained(manifest: Manifest, item: ManifestObject) -> Iterator[None]:
    try:
        yield
    except ObjectNotFoundError as error:
        raise _unreadable(manifest, item, "is missing") from error
    except DamagedObjectError as error:
        raise _unreadable(manifest, item, f"is damaged: {error}") from error
    except (CheckpointError, StorageError):
        raise
    except Exception as error:  # torch refuses in every way
        if isinstance(error, MemoryError | OSError) or _SHORTAGE.search(str(error)):
            raise  # the object is whole: an older checkpoint must not be taken instead
        reason = f"is what was written, and torch {torch.__version__} can't read it: {error}"
        remedy = "install the torch that wrote it, or a newer one"
        msg = f"{_unreadable(manifest, item, reason)}; {remedy}"
        raise NewerFormatError(msg) from error


def check_loadable(name: str, state: Any) -> None:
    """Refuse a state that couldn't be read back, by InvalidParamsError with place and type.

    Only what isn't surely readable is tried, with empty tensors, so it costs little.
    """
    unsure = list(_unsure(state))
    error = _refusal(unsure) if unsure else None
    if error is None:
        return
    place, part = "", state
    while True:  # to the innermost part that is refused
        is_sequence = isinstance(part, list | tuple)
        items = part.items() if isinstance(part, dict) else enumerate(part if is_sequence else ())
        refused = ((key, value) for key, value in items if _refusal(value) is not None)
        if (found := next(refused, None)) is not None:
            place, part = f"{place}[{found[0]!r}]", found[1]
            continue
        keys = part if isinstance(part, dict) else ()
        if (key := next((key for key in keys if _refusal(key) is not None), None)) is not None:
            place, part = f"{place} has a key that", key
        break
    kind = f"{type(part).__module__}.{type(part).__qualname__}"
    msg = (
        f"the state of the tracked object {name!r} can't be read back with "
        f"torch.load(weights_only=True): state_dict(){place} is a {kind}; "
        "it should hold tensors, numbers, texts, lists and plain dicts"
    )
    raise InvalidParamsError(msg) from error


def _unsure(part: Any) -> Iterator[Any]:
    """Give the parts of a state that might not be read back; tensors and numbers surely are."""
    kind = type(part)
    if kind is dict:
        inner = (*part, *part.values())
    elif kind is OrderedDict:  # with attributes, such as a module's _metadata
        inner = (*part, *part.values(), *vars(part).values())
    elif kind in (list, tuple):
        inner = part
    else:
        if kind not in _SURE and not is_dense_tensor(part):
            yield part
        return
    if not _SURE.issuperset(map(type, inner)):
        for item in inner:
            yield from _unsure(item)


def _refusal(state: Any) -> Exception | None:
    try:
        from_bytes(to_bytes(map_tensors(state, lambda tensor: tensor.new_empty(0))))
    except Exception as error:  # noqa: BLE001 - pickle and torch refuse in every way
        return error
    return None
