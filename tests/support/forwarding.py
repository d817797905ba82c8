"""A real storage behind the protocol's questions alone, for tests that change one of the
answers."""

from collections.abc import Callable, Iterator
from pathlib import Path

from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.storage.protocol import Storage, StoredObject


class ForwardingStorage:
    """A directory, or another storage, that only answers the protocol's questions, as a bucket
    does."""

    def __init__(self, inner: Path | Storage) -> None:
        self.inner: Storage = DirectoryStorage(inner) if isinstance(inner, Path) else inner

    @property
    def uri(self) -> str:
        """See Storage.uri."""
        return self.inner.uri

    def read(self, key: str) -> bytes:
        """See Storage.read."""
        return self.inner.read(key)

    def write(self, key: str, data: bytes | memoryview) -> None:
        """See Storage.write."""
        self.inner.write(key, data)

    def write_if_absent(self, key: str, data: bytes) -> bool:
        """See Storage.write_if_absent."""
        return self.inner.write_if_absent(key, data)

    def list(self, prefix: str = "") -> Iterator[StoredObject]:
        """See Storage.list."""
        return self.inner.list(prefix)

    def delete(self, key: str) -> None:
        """See Storage.delete."""
        self.inner.delete(key)

    def check_writable(self) -> None:
        """See Storage.check_writable."""
        self.inner.check_writable()


class WatchedStorage(ForwardingStorage):
    """The same, which first calls `before` with each request, such as "read runs/run/x"."""

    def __init__(self, inner: Path | Storage, before: Callable[[str], object]) -> None:
        super().__init__(inner)
        self._before = before

    def read(self, key: str) -> bytes:
        """See Storage.read."""
        self._before(f"read {key}")
        return super().read(key)

    def write(self, key: str, data: bytes | memoryview) -> None:
        """See Storage.write."""
        self._before(f"write {key}")
        super().write(key, data)

    def write_if_absent(self, key: str, data: bytes) -> bool:
        """See Storage.write_if_absent."""
        self._before(f"write_if_absent {key}")
        return super().write_if_absent(key, data)

    def list(self, prefix: str = "") -> Iterator[StoredObject]:
        """See Storage.list."""
        self._before(f"list {prefix}")
        return iter(list(super().list(prefix)))

    def delete(self, key: str) -> None:
        """See Storage.delete."""
        self._before(f"delete {key}")
        super().delete(key)
