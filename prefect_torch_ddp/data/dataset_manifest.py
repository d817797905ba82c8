"""Owns the manifest of a dataset: what is recorded of its files, where it lies, and how a
folder is held against it.
"""

import hashlib
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError, field_validator

from prefect_torch_ddp.errors import BadKeyError, ObjectNotFoundError, StorageError
from prefect_torch_ddp.results import Result
from prefect_torch_ddp.storage.keys import check_key
from prefect_torch_ddp.storage.protocol import Storage

NUM_THREADS = 16
"""Files read, hashed or written at a time."""

In = TypeVar("In")
Out = TypeVar("Out")


class DatasetFile(Result):
    """One file of a dataset as its manifest records it."""

    key: str
    """Relative to the dataset's `files/`, with forward slashes."""
    num_bytes: int
    sha256: str

    @field_validator("key")
    @classmethod
    def _stays_inside(cls, key: str) -> str:
        return check_key(key)  # a manifest is read from a storage that others may write to


class DatasetManifest(Result):
    """Every file of a dataset, sorted by key. Once it is there, the dataset is whole."""

    dataset_id: str
    digest: str
    """sha256 of a line `<sha256>  <key>` for each file, as sha256sum prints them: over names
    and contents."""
    num_bytes: int
    files: tuple[DatasetFile, ...]


def scan_folder(dataset_id: str, folder: Path) -> DatasetManifest:
    """Hash all files of a folder.

    Raises:
        StorageError: the folder holds no file, or something else than files and folders.
        BadKeyError: a file's name can't be stored everywhere.
    """
    paths = sorted(path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    if not paths:
        msg = f"dataset {dataset_id} is empty: prepare wrote no file under ctx.data ({folder})"
        raise StorageError(msg)
    for path in paths:
        if path.is_symlink() or not path.is_file():
            name = path.relative_to(folder)
            msg = f"{name} in dataset {dataset_id} is a link or a special file: prepare has to write plain files"
            raise StorageError(msg)

    def scan(path: Path) -> DatasetFile:
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return DatasetFile(
            key=path.relative_to(folder).as_posix(), num_bytes=path.stat().st_size, sha256=sha256
        )

    for path in paths:
        check_key(f"datasets/{dataset_id}/files/{path.relative_to(folder).as_posix()}")
    files = tuple(sorted(in_parallel(scan, paths), key=lambda file: file.key))
    num_bytes = sum(file.num_bytes for file in files)
    return DatasetManifest(
        dataset_id=dataset_id, digest=digest_of(files), num_bytes=num_bytes, files=files
    )


def digest_of(files: Iterable[DatasetFile]) -> str:
    """Return the digest over names and contents."""
    return hashlib.sha256(
        "".join(f"{file.sha256}  {file.key}\n" for file in files).encode()
    ).hexdigest()


def first_misfit(folder: Path, manifest: DatasetManifest) -> DatasetFile | None:
    """Return the first file that is missing or of another size; contents were checked when they
    were written.
    """
    for file in manifest.files:
        path = folder / file.key
        if not path.is_file() or path.stat().st_size != file.num_bytes:
            return file
    return None


def in_parallel(
    function: Callable[[In], Out], items: Iterable[In], num_threads: int = NUM_THREADS
) -> list[Out]:
    """Apply the function to each item in threads; results in the order of the items, or the
    first error.
    """
    with ThreadPoolExecutor(num_threads) as pool:
        return list(pool.map(function, items))


def read_manifest(storage: Storage, dataset_id: str) -> DatasetManifest | None:
    """Return a dataset's manifest, None where there is none.

    Raises:
        StorageError: it is damaged.
    """
    key = manifest_key(dataset_id)
    try:
        manifest = DatasetManifest.model_validate_json(storage.read(key))
    except ObjectNotFoundError:
        return None
    except ValidationError as error:
        raise damaged(
            storage, dataset_id, "manifest.json", f"can't be read: {error.errors()[0]['msg']}"
        ) from error
    if manifest.digest != digest_of(manifest.files):
        raise damaged(
            storage, dataset_id, "manifest.json", "is damaged: its digest isn't that of its entries"
        )
    return manifest


def not_there(storage: Storage, dataset_id: str) -> StorageError:
    """Say that a dataset wasn't published."""
    return StorageError(
        f"there is no dataset {dataset_id} in {storage.uri}: prepare has not run, or not to its end"
    )


def damaged(storage: Storage, dataset_id: str, name: str, what: str) -> StorageError:
    """Say what is wrong with a part of a dataset, and what to do."""
    dataset = f"{storage.uri.rstrip('/')}/{dataset_key(dataset_id)}"
    return StorageError(
        f"{dataset}/{name} {what}; delete {dataset}/manifest.json to have the data prepared again"
    )


def checked_id(dataset_id: str) -> str:
    """Return the id as it is, or raise `BadKeyError`."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", dataset_id):
        msg = f"{dataset_id!r} can't be a dataset's id: it may have letters, digits, dots, dashes and underscores"
        raise BadKeyError(msg)
    return dataset_id


def dataset_key(dataset_id: str) -> str:
    """Name a dataset's folder."""
    return f"datasets/{checked_id(dataset_id)}"


def files_key(dataset_id: str) -> str:
    """Name the folder of a dataset's files."""
    return f"{dataset_key(dataset_id)}/files"


def manifest_key(dataset_id: str) -> str:
    """Name a dataset's manifest."""
    return f"{dataset_key(dataset_id)}/manifest.json"
