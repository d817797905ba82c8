"""Owns how the objects of a checkpoint are read: several at once, and hashed while they arrive;
what verifies is decoded.

Owns the digest of a checkpoint's object: over those of its parts, so that several cores may
verify one object.

BLAKE3 (https://github.com/BLAKE3-team/BLAKE3), since it takes a third of the time of sha256,
even where a CPU has instructions for that: the hashing is most of what verifying costs, and a
part of each save.
"""

import os
import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from blake3 import blake3

from prefect_torch_ddp.checkpoint.manifest import Manifest, ManifestObject
from prefect_torch_ddp.checkpoint.serial import from_bytes, from_file, map_tensors
from prefect_torch_ddp.errors import (
    CheckpointError,
    DamagedObjectError,
    ObjectNotFoundError,
    StorageError,
)
from prefect_torch_ddp.storage.protocol import HasFiles, ShowsContent, Storage

NUM_THREADS = 4
"""Hashing, copying and waiting for a storage leave Python's lock to others."""
NUM_AHEAD = 32
"""Objects that are asked for at a time: each may be an open file, and a gang of a thousand
ranks has a thousand objects."""
PIECE_BYTES = 2**18
"""Few enough to stay in a core's cache between reading and hashing."""
_WANT = re.compile(r"allocate memory|Too many open files")
"""What this machine is short of, in torch's words: a RuntimeError."""


def read_object(storage: Storage, manifest: Manifest, item: ManifestObject) -> memoryview:
    """Return the bytes of a checkpoint's object.

    Raises:
        CheckpointError: it is missing or isn't what was written; names it.
        StorageError: the storage failed, which says nothing about the object.
    """
    digest = Digest()
    with _explained_absence(manifest, item):
        if isinstance(storage, ShowsContent):
            data = storage.read_seen(item.key, digest.update)
        else:
            data = memoryview(storage.read(item.key))
            digest.update(data)
    _check_digest(manifest, item, len(data), digest.hexdigest())
    return data


@dataclass(frozen=True)
class ReadState:
    """A state that was read and verified, its tensors on the CPU."""

    state: Any
    """Where it is mapped its tensors are the object's file itself: to be copied from, and not
    to be kept."""
    is_mapped: bool

    def to_keep(self) -> Any:
        """Return a state whose tensors may be kept: who keeps a mapped one keeps a deleted
        checkpoint's room on the disk.
        """
        return map_tensors(self.state, torch.clone) if self.is_mapped else self.state


def read_state(storage: Storage, manifest: Manifest, item: ManifestObject) -> ReadState:
    """Return the state that an object holds; raises as `read_object`."""
    return read_states(storage, manifest, [item])[item.name]


def read_states(
    storage: Storage,
    manifest: Manifest,
    items: Iterable[ManifestObject],
    kept: Collection[str] = (),
) -> dict[str, ReadState]:
    """Return the states of several objects by name; raises as `read_object`.

    Args:
        storage: where they are.
        manifest: what they belong to.
        items: which.
        kept: the names of those whose tensors will be kept: copied here, while others are still
            being verified.
    """
    # The largest first: what remains at the end is short.
    ordered = sorted(items, key=lambda item: -item.num_bytes)
    states = {}
    with ExitStack() as files, _threads() as pool:
        to_come = iter(ordered)
        waits = deque(
            (item, _ask_for(pool, files, storage, manifest, item))
            for item in islice(to_come, NUM_AHEAD)
        )
        while waits:
            item, wait = waits.popleft()
            state = wait()
            states[item.name] = (
                ReadState(state.to_keep(), is_mapped=False) if item.name in kept else state
            )
            waits.extend(
                (item, _ask_for(pool, files, storage, manifest, item))
                for item in islice(to_come, 1)
            )
    return states


@contextmanager
def _threads() -> Iterator[Executor]:
    """Open threads that, after an error, do nothing more than what they are at."""
    pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="prefect-torch-ddp-restore")
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _ask_for(
    pool: Executor, files: ExitStack, storage: Storage, manifest: Manifest, item: ManifestObject
) -> Callable[[], ReadState]:
    """Have an object read and hashed by the pool; return what waits for that and decodes it."""
    file = None
    if isinstance(storage, HasFiles):
        with _explained_absence(manifest, item):
            file = storage.open_file(item.key)
    if file is None:
        whole = pool.submit(read_object, storage, manifest, item)

        def wait() -> ReadState:
            data = whole.result()
            with _explained_decoding(manifest, item):
                return ReadState(from_bytes(data), is_mapped=False)

        return wait
    descriptor = files.enter_context(file).fileno()
    num_bytes = os.fstat(descriptor).st_size
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
    starts = range(0, max(num_bytes, item.num_bytes), PART_BYTES)
    parts = [pool.submit(_hash_part, descriptor, start) for start in starts]

    def wait_for_parts() -> ReadState:
        try:
            digest = digest_of_parts([part.result() for part in parts])
        except OSError as error:
            msg = f"can't read {item.key} in {storage.uri}: {error.strerror}; check the disk"
            raise StorageError(msg) from error
        _check_digest(manifest, item, num_bytes, digest)
        with file, _explained_decoding(manifest, item):
            return ReadState(from_file(file), is_mapped=True)

    return wait_for_parts


def _hash_part(descriptor: int, start: int) -> bytes:
    """Return the digest of a part of a file.

    By reading, not by the mapping: a disk's error is then an error and no signal.
    """
    piece, digest, at, end = memoryview(bytearray(PIECE_BYTES)), blake3(), start, start + PART_BYTES
    while num_read := os.preadv(descriptor, [piece[: end - at]], at):
        digest.update(piece[:num_read])
        at += num_read
    return digest.digest()


def _check_digest(manifest: Manifest, item: ManifestObject, num_bytes: int, digest: str) -> None:
    if digest != item.digest:
        msg = (
            f"checkpoint of step {manifest.step} of run {manifest.run_id}: its object {item.key} is damaged "
            f"({num_bytes} bytes of {item.num_bytes}; the digest differs)"
        )
        raise CheckpointError(msg)


@contextmanager
def _explained_absence(manifest: Manifest, item: ManifestObject) -> Iterator[None]:
    try:
        yield
    except ObjectNotFoundError as error:
        msg = f"checkpoint of step {manifest.step} of run {manifest.run_id}: its object {item.key} is missing"
        raise CheckpointError(msg) from error
    except DamagedObjectError as error:
        msg = f"checkpoint of step {manifest.step} of run {manifest.run_id}: its object {item.key} is damaged: {error}"
        raise CheckpointError(msg) from error


@contextmanager
def _explained_decoding(manifest: Manifest, item: ManifestObject) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # torch refuses in every way
        if isinstance(error, MemoryError | OSError) or _WANT.search(str(error)):
            raise  # the object is whole: the one before it must not be taken for that
        msg = (
            f"checkpoint of step {manifest.step} of run {manifest.run_id}: its object {item.key} is what was written, and "
            f"this version of torch can't read it: {error}"
        )
        raise CheckpointError(msg) from error


PART_BYTES = 2**23


def digest_of(data: bytes | memoryview) -> str:
    """Return the BLAKE3 over the BLAKE3 of each 8 MiB of `data` (each 32 bytes, in order), in
    hex.
    """
    digest = Digest()
    digest.update(memoryview(data))
    return digest.hexdigest()


def digest_of_parts(digests: Iterable[bytes]) -> str:
    """Return the same of parts whose digests are known."""
    return blake3(b"".join(digests)).hexdigest()


class Digest:
    """Takes content as it comes."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._parts: list[bytes] = []
        self._part = blake3()
        self._room = PART_BYTES

    def update(self, data: memoryview) -> None:
        """Take what comes next."""
        while len(data):
            piece = data[: self._room]
            self._part.update(piece)
            self._room -= len(piece)
            if not self._room:
                self._parts.append(self._part.digest())
                self._part, self._room = blake3(), PART_BYTES
            data = data[len(piece) :]

    def hexdigest(self) -> str:
        """Return the digest of all that came."""
        return digest_of_parts(
            [*self._parts, self._part.digest()] if self._room < PART_BYTES else self._parts
        )
