"""The objects of a checkpoint: read several at once, verified while they arrive, then decoded.

An object's digest is BLAKE3 (https://github.com/BLAKE3-team/BLAKE3), which takes a third of the
time of sha256, over that of its 8 MiB parts, so that several cores may verify one object.
"""

import os
import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, BinaryIO

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

PART_BYTES = 2**23
NUM_THREADS = 4
"""Hashing, copying and waiting for a storage leave Python's lock to others."""
NUM_AHEAD = 32
"""Objects requested at a time: each may be an open file, and a gang of a thousand
ranks has a thousand objects."""
PIECE_BYTES = 2**18
"""Few enough to stay in a core's cache between reading and hashing."""
_SHORTAGE = re.compile(r"allocate memory|Too many open files")
"""What this machine is short of, in torch's words: a RuntimeError."""


@dataclass(frozen=True)
class ReadState:
    """A state that was read and verified, its tensors on the CPU."""

    state: Any
    """Where it is mapped its tensors are the object's file: to be copied, not to be kept."""
    is_mapped: bool

    def to_keep(self) -> Any:
        """Return a state whose tensors may be kept.

        A mapped one that is kept holds a deleted checkpoint's room on the disk.
        """
        return map_tensors(self.state, torch.clone) if self.is_mapped else self.state


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

    Those named in `kept`, whose tensors will be kept, are copied here, while others are still
    being verified.
    """
    states = {}
    with ExitStack() as files, _threads() as pool:
        # The largest first: what remains at the end is short.
        to_come = iter(sorted(items, key=lambda item: -item.num_bytes))
        waits = deque(
            (item, _ask_for(pool, files, storage, manifest, item))
            for item in islice(to_come, NUM_AHEAD)
        )
        while waits:
            item, wait = waits.popleft()
            state = wait()
            if item.name in kept:
                state = ReadState(state.to_keep(), is_mapped=False)
            states[item.name] = state
            if (following := next(to_come, None)) is not None:
                waits.append((following, _ask_for(pool, files, storage, manifest, following)))
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
    """Have the pool read and hash an object; return what waits for that and decodes it."""
    if isinstance(storage, HasFiles):
        with _explained_absence(manifest, item):
            file = storage.open_file(item.key)
        if file is not None:
            return _ask_for_parts(pool, files.enter_context(file), storage, manifest, item)
    whole = pool.submit(read_object, storage, manifest, item)

    def wait() -> ReadState:
        data = whole.result()
        with _explained_decoding(manifest, item):
            return ReadState(from_bytes(data), is_mapped=False)

    return wait


def _ask_for_parts(
    pool: Executor, file: BinaryIO, storage: Storage, manifest: Manifest, item: ManifestObject
) -> Callable[[], ReadState]:
    descriptor = file.fileno()
    num_bytes = os.fstat(descriptor).st_size
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
    starts = range(0, max(num_bytes, item.num_bytes), PART_BYTES)
    parts = [pool.submit(_hash_part, descriptor, start) for start in starts]

    def wait() -> ReadState:
        try:
            digest = digest_of_parts([part.result() for part in parts])
        except OSError as error:
            msg = f"can't read {item.key} in {storage.uri}: {error.strerror}; check the disk"
            raise StorageError(msg) from error
        _check_digest(manifest, item, num_bytes, digest)
        with file, _explained_decoding(manifest, item):
            return ReadState(from_file(file), is_mapped=True)

    return wait


def _hash_part(descriptor: int, start: int) -> bytes:
    # By reading, not by the mapping: a disk's error is then an error and no signal.
    piece, digest, at, end = memoryview(bytearray(PIECE_BYTES)), blake3(), start, start + PART_BYTES
    while num_read := os.preadv(descriptor, [piece[: end - at]], at):
        digest.update(piece[:num_read])
        at += num_read
    return digest.digest()


def _check_digest(manifest: Manifest, item: ManifestObject, num_bytes: int, digest: str) -> None:
    if digest != item.digest:
        reason = f"is damaged ({num_bytes} bytes of {item.num_bytes}; the digest differs)"
        raise _unreadable(manifest, item, reason)


def _unreadable(manifest: Manifest, item: ManifestObject, reason: str) -> CheckpointError:
    checkpoint = f"checkpoint of step {manifest.step} of run {manifest.run_id}"
    return CheckpointError(f"{checkpoint}: its object {item.key} {reason}")


@contextmanager
def _explained_absence(manifest: Manifest, item: ManifestObject) -> Iterator[None]:
    try:
        yield
    except ObjectNotFoundError as error:
        raise _unreadable(manifest, item, "is missing") from error
    except DamagedObjectError as error:
        raise _unreadable(manifest, item, f"is damaged: {error}") from error


@contextmanager
def _explained_decoding(manifest: Manifest, item: ManifestObject) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # torch refuses in every way
        if isinstance(error, MemoryError | OSError) or _SHORTAGE.search(str(error)):
            raise  # the object is whole: an older checkpoint must not be taken for that
        reason = f"is what was written, and this version of torch can't read it: {error}"
        raise _unreadable(manifest, item, reason) from error


def digest_of(data: bytes | memoryview) -> str:
    """Return the BLAKE3 over the BLAKE3 of each 8 MiB (each 32 bytes, in order), in hex."""
    digest = Digest()
    digest.update(memoryview(data))
    return digest.hexdigest()


def digest_of_parts(digests: Iterable[bytes]) -> str:
    """Return the same of parts whose digests are known."""
    return blake3(b"".join(digests)).hexdigest()


class Digest:
    """The digest of content that arrives piece by piece."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._part = blake3()
        self._room = PART_BYTES

    def update(self, data: memoryview) -> None:
        """Take the next piece."""
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
        rest = [self._part.digest()] if self._room < PART_BYTES else []
        return digest_of_parts([*self._parts, *rest])
