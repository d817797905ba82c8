"""The files of a published dataset where they lie, as a storage."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import accumulate, takewhile
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from prefect_torch_ddp.data.datasets.dataset_manifest import (
    DatasetManifest,
    damaged,
    dataset_key,
    published_manifest,
)
from prefect_torch_ddp.errors import StorageError
from prefect_torch_ddp.storage.names import check_key
from prefect_torch_ddp.storage.protocol import (
    Contents,
    ListedObject,
    ObjectPart,
    Storage,
    StoredObject,
)

Entry = TypeVar("Entry")


@dataclass(frozen=True)
class PublishedFiles(Storage):
    """The folder of a dataset's files, where it lies.

    Next to the files of the manifest, others may appear at any time: those of a Dask worker that
    was suspended while it wrote a partition, which was computed again meanwhile. A reader that
    lists the folder would take their rows for further ones. And it would miss those of a file that
    is gone, as by a bucket's rule: a listing without it fails.
    """

    storage: Storage
    """The storage that has the dataset."""
    dataset_id: str
    files: str
    """The name of the folder."""
    subfolder: str = ""
    """The key of the folder in it that this storage is; empty: all of it."""

    @classmethod
    def of(cls, storage: Storage, manifest: DatasetManifest) -> "PublishedFiles":
        """Return the files of a manifest that was just read."""
        return _knowing(cls(storage, manifest.dataset_id, manifest.folder), _names_of(manifest))

    @cached_property
    def _inner(self) -> Storage:
        """The folder with everything that is in it."""
        key = f"{dataset_key(self.dataset_id)}/{self.files}"
        return self.storage.below(f"{key}/{self.subfolder}" if self.subfolder else key)

    @cached_property
    def _names(self) -> frozenset[str]:
        """The names in the manifest, and those of all folders, with a slash."""
        return _names_of(self._manifest())

    @cached_property
    def _files(self) -> tuple[str, ...]:
        """The names of the files, in order."""
        return tuple(sorted(name for name in self._names if name[-1] != "/"))

    def _manifest(self) -> DatasetManifest:
        manifest = published_manifest(self.storage, self.dataset_id)
        if manifest.folder != self.files:
            msg = (
                f"dataset {self.dataset_id} was prepared again, so {self.uri} doesn't have its "
                "files any more: start the run again"
            )
            raise StorageError(msg)
        return manifest

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the names, of which there may be very many: another process reads them."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def _whole(
        self, found: Iterable[Entry], prefix: str, name_of: Callable[[Entry], str]
    ) -> Iterator[Entry]:
        """Yield what the manifest names; at the end, raise StorageError if a file is missing."""
        above, seen = f"{self.subfolder}/" if self.subfolder else "", set[str]()
        for each in found:
            name = above + name_of(each)
            if name in self._names:
                seen.add(name)
                yield each
        for name in self._files_from(above + prefix):
            if seen.isdisjoint((name, *_folders_of(name))):
                self._manifest()  # raises if it is another by now
                what = f"{self.files}/{name}"
                raise damaged(self.storage, self.dataset_id, what, "is missing")

    def _files_from(self, begins: str) -> Iterator[str]:
        """Yield the files whose name begins so, in order; there may be many others."""
        first = bisect_left(self._files, begins)
        names = map(self._files.__getitem__, range(first, len(self._files)))
        return takewhile(lambda name: name.startswith(begins), names)

    @property
    def uri(self) -> str:
        """The folder's."""
        return self._inner.uri

    @property
    def identity(self) -> str:
        """The folder's."""
        return self._inner.identity

    @property
    def local_folder(self) -> Path | None:
        """The folder, if the storage is one."""
        return self._inner.local_folder

    @property
    def storage_options(self) -> dict[str, Any] | None:
        """See `Readable.storage_options`."""
        return self._inner.storage_options

    @property
    def is_shared_by_hosts(self) -> bool:
        """See `Storage.is_shared_by_hosts`."""
        return self._inner.is_shared_by_hosts

    def list(self, prefix: str = "") -> Iterator[StoredObject]:
        """See `Storage.list`."""
        return self._whole(self._inner.list(prefix), prefix, attrgetter("key"))

    def list_objects(self, prefix: str) -> Iterator[ListedObject]:
        """See `Readable.list_objects`."""
        return self._whole(self._inner.list_objects(prefix), prefix, attrgetter("key"))

    def list_level(self, prefix: str) -> Iterator[ListedObject | str]:
        """See `Readable.list_level`."""
        level = self._inner.list_level(prefix)
        return self._whole(level, prefix, lambda each: each if isinstance(each, str) else each.key)

    def below(self, folder: str) -> Storage:
        """See `Storage.below`."""
        key = check_key(folder)
        subfolder = f"{self.subfolder}/{key}" if self.subfolder else key
        found = _knowing(replace(self, subfolder=subfolder), self._names)
        found.__dict__["_files"] = self._files
        return found

    def read(self, key: str) -> bytes:
        """See `Storage.read`."""
        return self._inner.read(key)

    def read_many(self, parts: Sequence[ObjectPart]) -> Contents:
        """See `Readable.read_many`."""
        return self._inner.read_many(parts)

    def open_file(self, key: str) -> BinaryIO | None:
        """See `Storage.open_file`."""
        return self._inner.open_file(key)

    def write(self, key: str, data: bytes | memoryview) -> None:
        """See `Storage.write`."""
        self._inner.write(key, data)

    def write_if_absent(self, key: str, data: bytes) -> bool:
        """See `Storage.write_if_absent`."""
        return self._inner.write_if_absent(key, data)

    def delete(self, key: str) -> None:
        """See `Storage.delete`."""
        self._inner.delete(key)


def _knowing(published: PublishedFiles, names: frozenset[str]) -> PublishedFiles:
    published.__dict__["_names"] = names  # as cached_property keeps it
    return published


def _names_of(manifest: DatasetManifest) -> frozenset[str]:
    names: set[str] = set()
    for file in manifest.files:
        names.add(file.key)
        names.update(_folders_of(file.key))
    return frozenset(names)


def _folders_of(name: str) -> Iterator[str]:
    return accumulate(f"{folder}/" for folder in name.split("/")[:-1])
