"""A real storage seen only through the protocol, for tests that change one of the answers."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from prefect_torch_ddp.errors import StorageError
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.storage.protocol import Storage, StoredObject
from tests.support.waiting import HANG_S


class ForwardingStorage(Storage):
    """A directory, or another storage, that only answers the protocol's questions, as a bucket
    does."""

    def __init__(self, inner: Path | Storage) -> None:
        self.inner: Storage = DirectoryStorage(inner) if isinstance(inner, Path) else inner

    @property
    def uri(self) -> str:
        return self.inner.uri

    def read(self, key: str) -> bytes:
        return self.inner.read(key)

    def write(self, key: str, data: bytes | memoryview) -> None:
        self.inner.write(key, data)

    def write_if_absent(self, key: str, data: bytes) -> bool:
        return self.inner.write_if_absent(key, data)

    def list(self, prefix: str = "") -> Iterator[StoredObject]:
        return self.inner.list(prefix)

    def delete(self, key: str) -> None:
        self.inner.delete(key)

    def check_writable(self) -> None:
        self.inner.check_writable()


class WatchedStorage(ForwardingStorage):
    """The same, which first calls `before` with each request, such as "read runs/run/x"."""

    def __init__(self, inner: Path | Storage, before: Callable[[str], object]) -> None:
        super().__init__(inner)
        self._before = before

    def read(self, key: str) -> bytes:
        self._before(f"read {key}")
        return super().read(key)

    def write(self, key: str, data: bytes | memoryview) -> None:
        self._before(f"write {key}")
        super().write(key, data)

    def write_if_absent(self, key: str, data: bytes) -> bool:
        self._before(f"write_if_absent {key}")
        return super().write_if_absent(key, data)

    def list(self, prefix: str = "") -> Iterator[StoredObject]:
        self._before(f"list {prefix}")
        return iter(list(super().list(prefix)))

    def delete(self, key: str) -> None:
        self._before(f"delete {key}")
        super().delete(key)


class MoodyStorage(ForwardingStorage):
    """The same, but a conditional write waits until it is released, and then fails as its
    mood says."""

    def __init__(self, inner: Path, mood: Literal["well", "refuses", "loses answers"]) -> None:
        super().__init__(inner)
        self.mood = mood
        self.goes_on = threading.Event()

    def write_if_absent(self, key: str, data: bytes) -> bool:
        assert self.goes_on.wait(HANG_S)
        if self.mood == "refuses":
            msg = "503 slow down"
            raise StorageError(msg)
        is_written = super().write_if_absent(key, data)
        if self.mood == "loses answers":
            msg = "the answer got lost"
            raise StorageError(msg)
        return is_written
