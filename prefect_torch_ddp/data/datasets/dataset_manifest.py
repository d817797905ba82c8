"""The manifest of a dataset: its files, and a storage and a folder that are to have them."""

import errno
import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

from pydantic import Field, ValidationError, field_validator
from pydantic_core import from_json, to_json

from prefect_torch_ddp.errors import BadKeyError, ObjectNotFoundError, StorageError
from prefect_torch_ddp.results import DatasetReport, Result
from prefect_torch_ddp.storage.formats import DAMAGE, DATASET, build_model, location
from prefect_torch_ddp.storage.names import check_key
from prefect_torch_ddp.storage.protocol import Storage

NUM_THREADS = 16
"""Files read, hashed or written at a time."""

In = TypeVar("In")
Out = TypeVar("Out")


class DatasetFile(Result):
    """One file of a dataset."""

    key: str
    """Relative to the folder of files, with forward slashes."""
    num_bytes: int
    sha256: str
    num_rows: int | None = None
    """Of a table's part that a Dask worker wrote; not known of other files."""

    @field_validator("key")
    @classmethod
    def _stays_inside(cls, key: str) -> str:
        return check_key(key)  # a manifest is read from a storage that others may write to


class Written(NamedTuple):
    """What a Dask worker wrote of a dataset."""

    files: tuple[DatasetFile, ...]
    about: Any = None
    """What else the caller has to know of it."""


class DatasetManifest(Result):
    """Every file of a dataset, sorted by key. Once it is there, the dataset is whole."""

    dataset_id: str
    digest: str
    """sha256 of a line `<sha256>  <key>` for each file, as sha256sum prints them: over names
    and contents."""
    num_bytes: int
    folder: str = Field(pattern=r"^files(-[0-9a-f]+)?$")
    """Beside the manifest, with the files."""
    files: tuple[DatasetFile, ...]

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Self:
        """Read a stored manifest; raises as `Format.from_bytes`."""
        return build_model(cls, DATASET.check(from_json(data), where))[0]

    def to_bytes(self) -> bytes:
        """Return it as it is stored."""
        return to_json(DATASET.stamp(self.model_dump(exclude_none=True)), indent=1)

    @property
    def files_key(self) -> str:
        """The key of the folder of files."""
        return f"{dataset_key(self.dataset_id)}/{self.folder}"

    def to_dataset_report(self, storage: Storage) -> DatasetReport:
        """Return the facts about the dataset that a run reports."""
        return DatasetReport(
            dataset_id=self.dataset_id,
            uri=f"{storage.uri.rstrip('/')}/{self.files_key}",
            num_files=len(self.files),
            num_bytes=self.num_bytes,
            digest=self.digest,
        )

    def first_misfit(self, folder: Path) -> DatasetFile | None:
        """Return the first file that is missing or of another size; contents aren't read."""
        for file in self.files:
            try:
                found = os.stat(f"{folder}/{file.key}")  # noqa: PTH116 - a fifth of a Path's time
            except OSError as error:
                if error.errno in {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}:
                    return file
                raise
            if not stat.S_ISREG(found.st_mode) or found.st_size != file.num_bytes:
                return file
        return None

    def is_whole(self, folder: Path) -> bool:
        """Tell whether a folder has all files, each of its size."""
        return self.first_misfit(folder) is None


def scan_folder(dataset_id: str, folder: Path) -> DatasetManifest:
    """Hash all files of a folder.

    Raises:
        StorageError: the folder holds no file, or something else than files and folders.
        BadKeyError: a file's name can't be stored everywhere.
    """
    paths = [path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()]
    if not paths:
        msg = f"dataset {dataset_id} is empty: prepare wrote no file under ctx.data ({folder})"
        raise StorageError(msg)

    def scan(path: Path) -> DatasetFile:
        key = path.relative_to(folder).as_posix()
        if path.is_symlink() or not path.is_file():
            msg = (
                f"{key} in dataset {dataset_id} is a link or a special file: "
                "prepare has to write plain files"
            )
            raise StorageError(msg)
        check_key(f"{dataset_key(dataset_id)}/{folder.name}/{key}")
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return DatasetFile(key=key, num_bytes=path.stat().st_size, sha256=sha256)

    return manifest_of(dataset_id, folder.name, in_parallel(scan, paths))


def manifest_of(dataset_id: str, folder: str, files: Iterable[DatasetFile]) -> DatasetManifest:
    """Return the manifest of these files.

    Raises:
        StorageError: there is none.
    """
    ordered = tuple(sorted(files, key=lambda file: file.key))
    if not ordered:
        msg = f"dataset {dataset_id} is empty: nothing was written for it"
        raise StorageError(msg)
    return DatasetManifest(
        dataset_id=dataset_id,
        digest=_dataset_digest(ordered),
        num_bytes=sum(file.num_bytes for file in ordered),
        folder=folder,
        files=ordered,
    )


def _dataset_digest(files: Iterable[DatasetFile]) -> str:
    lines = "".join(f"{file.sha256}  {file.key}\n" for file in files)
    return hashlib.sha256(lines.encode()).hexdigest()


def in_parallel(
    function: Callable[[In], Out], items: Iterable[In], num_threads: int = NUM_THREADS
) -> list[Out]:
    """Apply the function to each item in threads; return the results in order."""
    with ThreadPoolExecutor(num_threads) as pool:
        return list(pool.map(function, items))


def read_dataset_manifest(storage: Storage, dataset_id: str) -> DatasetManifest | None:
    """Return a dataset's manifest, None if there is none.

    Raises:
        NewerFormatError: it is of a newer format.
        StorageError: it is damaged.
    """
    key = dataset_manifest_key(dataset_id)
    try:
        data = storage.read(key)
    except ObjectNotFoundError:
        return None
    try:
        manifest = DatasetManifest.from_bytes(data, location(storage, key))
    except DAMAGE as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else repr(error)
        why = f"can't be read: {reason}"
        raise damaged(storage, dataset_id, "manifest.json", why) from error
    if manifest.digest != _dataset_digest(manifest.files):
        why = "is damaged: its digest isn't that of its entries"
        raise damaged(storage, dataset_id, "manifest.json", why)
    return manifest


def published_manifest(storage: Storage, dataset_id: str) -> DatasetManifest:
    """Return a dataset's manifest.

    Raises:
        StorageError: there is none, or it is damaged.
    """
    manifest = read_dataset_manifest(storage, dataset_id)
    if manifest is None:
        msg = f"there is no dataset {dataset_id} in {storage.uri}: prepare has not run to its end"
        raise StorageError(msg)
    return manifest


def damaged(storage: Storage, dataset_id: str, name: str, what: str) -> StorageError:
    """Say what is wrong with a part of a dataset, and what to do."""
    dataset = f"{storage.uri.rstrip('/')}/{dataset_key(dataset_id)}"
    return StorageError(
        f"{dataset}/{name} {what}; delete {dataset}/manifest.json to have the data prepared again"
    )


def dataset_key(dataset_id: str) -> str:
    """Return the key of a dataset's folder.

    Raises:
        BadKeyError: the id can't name a folder.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", dataset_id):
        msg = (
            f"{dataset_id!r} can't be a dataset's id: "
            "it may have letters, digits, dots, dashes and underscores"
        )
        raise BadKeyError(msg)
    return f"datasets/{dataset_id}"


def dataset_manifest_key(dataset_id: str) -> str:
    """Return the key of a dataset's manifest."""
    return f"{dataset_key(dataset_id)}/manifest.json"
