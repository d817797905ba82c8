"""Prepared datasets in a storage: files first, the manifest last, as the commit."""

import fcntl
import hashlib
import logging
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from prefect_torch_ddp.data.datasets.dataset_manifest import (
    NUM_THREADS,
    DatasetFile,
    DatasetManifest,
    damaged,
    dataset_key,
    dataset_manifest_key,
    in_parallel,
    manifest_of,
    published_manifest,
    read_dataset_manifest,
    scan_folder,
)
from prefect_torch_ddp.data.datasets.published_files import PublishedFiles
from prefect_torch_ddp.errors import ObjectNotFoundError, StorageError
from prefect_torch_ddp.results import DatasetReport
from prefect_torch_ddp.storage.names import RESERVED_FOLDER
from prefect_torch_ddp.storage.protocol import Storage

logger = logging.getLogger(__name__)

IN_MEMORY_BYTES = 256 * 2**20
PREPARED = "files"
"""The folder of files that `prepare` wrote, if it was moved into a directory as a whole."""


def find_dataset(storage: Storage, dataset_id: str) -> DatasetReport | None:
    """Return what the manifest of a published dataset says, None if there is none."""
    manifest = read_dataset_manifest(storage, dataset_id)
    return None if manifest is None else manifest.to_dataset_report(storage)


def publish_dataset(
    storage: Storage, dataset_id: str, write: Callable[[Path], object]
) -> DatasetReport:
    """Have a dataset written to an empty folder, and publish it; return what the storage holds.

    What is published already stays. Several may publish one id at once: what they leave is one
    whole dataset. What killed processes left of the same dataset is removed.

    Args:
        storage: for a directory the folder lies inside of it, so publishing is one rename.
            Elsewhere it lies in the user's cache.
        dataset_id: letters, digits, dots, dashes and underscores.
        write: is given the folder.

    Raises:
        StorageError: no file was written, or something else than files and folders, or the
            storage failed.
    """
    dataset_key(dataset_id)  # refuses an id that is no name
    inside = storage.local_folder
    root = inside / RESERVED_FOLDER / "datasets" if inside else user_cache() / "preparing"
    with staged(root, dataset_id, fcntl.LOCK_SH) as staging:
        # Uploads of several publishers must not mix.
        files = staging / "dataset" / (PREPARED if inside else f"files-{uuid.uuid4().hex}")
        files.mkdir(parents=True)
        write(files)
        published = find_dataset(storage, dataset_id)
        if published is not None:
            return published
        manifest = scan_folder(dataset_id, files)
        try:
            if inside:
                _move_in(inside / dataset_key(dataset_id), manifest, staging)
            else:
                _upload(storage, manifest, files)
        except (OSError, StorageError) as error:
            published = find_dataset(storage, dataset_id)
            if published is not None:  # another publisher was faster, with a whole one
                return published
            if isinstance(error, StorageError):
                raise
            msg = f"can't move dataset {dataset_id} into {storage.uri}: {error.strerror or error}"
            raise StorageError(msg) from error
    return find_dataset(storage, dataset_id) or manifest.to_dataset_report(storage)


def new_files_folder(dataset_id: str) -> tuple[str, str]:
    """Return the name and the key of a folder of a dataset's files that nobody else writes to."""
    folder = f"files-{uuid.uuid4().hex}"
    return folder, f"{dataset_key(dataset_id)}/{folder}"


def publish_written(
    storage: Storage, dataset_id: str, folder: str, files: Iterable[DatasetFile]
) -> DatasetReport:
    """Publish a dataset whose files are in the storage already; return what the storage holds.

    What is published already stays. Files of the dataset that its manifest doesn't name are
    removed: those of killed writers, or these if another publisher was faster. If that fails, a
    warning says so.

    Args:
        storage: has the files.
        dataset_id: letters, digits, dots, dashes and underscores.
        folder: from `new_files_folder`.
        files: in this folder.

    Raises:
        StorageError: there is no file, or the storage failed.
    """
    manifest = manifest_of(dataset_id, folder, files)
    _commit(storage, manifest)
    return find_dataset(storage, dataset_id) or manifest.to_dataset_report(storage)


def drop_files(storage: Storage, dataset_id: str, folder: str) -> None:
    """Remove a folder of files that is never to be published."""
    found = [item.key for item in storage.list(f"{dataset_key(dataset_id)}/{folder}/")]
    in_parallel(storage.delete, found)


def local_dataset(storage: Storage, dataset_id: str) -> Path:
    """Return a local folder that holds a published dataset, a verified copy if need be.

    The copy lies in the user's cache (`XDG_CACHE_HOME`, else `~/.cache`). Safe among processes:
    of several on a host one downloads, the others wait for it, and the folder appears whole.

    Raises:
        StorageError: the dataset, or one of its files, is missing or damaged; names the file.
    """
    manifest = published_manifest(storage, dataset_id)
    if storage.local_folder is None:
        return _copied(storage, manifest, user_cache() / "datasets")
    folder = storage.local_folder / manifest.files_key
    misfit = manifest.first_misfit(folder)
    if misfit is not None:
        why = "is missing or has another size than its manifest records"
        raise damaged(storage, dataset_id, f"{manifest.folder}/{misfit.key}", why)
    _drop_late_files(storage, manifest, folder)
    return folder


def _drop_late_files(storage: Storage, manifest: DatasetManifest, folder: Path) -> None:
    """Remove partitions that a suspended Dask worker wrote after the dataset was published.

    Who reads the folder by its path would take them for further rows.
    """
    if manifest.folder == PREPARED:  # no Dask worker writes there, and the names are the user's
        return
    named = {file.key for file in manifest.files}
    for path in folder.glob("part-*"):
        if path.name not in named and path.is_file():
            why = "isn't in the manifest of its dataset, and would be read as further rows"
            logger.warning("%s %s: it is removed", path, why)
            try:
                storage.delete(f"{manifest.files_key}/{path.name}")
            except StorageError as error:
                msg = f"{path} {why}, but can't be removed: {error}"
                raise StorageError(msg) from error


def published_dataset(storage: Storage, dataset_id: str) -> Storage:
    """Return a published dataset as its own storage, where it lies: nothing is copied.

    It lists only the files of the manifest.

    Raises:
        StorageError: there is no such dataset.
    """
    return PublishedFiles.of(storage, published_manifest(storage, dataset_id))


def _move_in(target: Path, manifest: DatasetManifest, staged: Path) -> None:
    """Make the whole dataset, manifest included, appear by one rename."""
    (staged / "dataset/manifest.json").write_bytes(manifest.to_bytes())
    target.parent.mkdir(exist_ok=True)
    # Without a manifest it is no dataset: someone deleted that to have it prepared again.
    if target.exists() and not (target / "manifest.json").exists():
        target.rename(staged / "replaced")
    (staged / "dataset").rename(target)


def _upload(storage: Storage, manifest: DatasetManifest, folder: Path) -> None:
    own = f"{manifest.files_key}/"

    def upload(file: DatasetFile) -> None:
        storage.write(own + file.key, (folder / file.key).read_bytes())

    in_parallel(upload, manifest.files, _threads_for(manifest))
    _commit(storage, manifest)


def _commit(storage: Storage, manifest: DatasetManifest) -> None:
    is_first = storage.write_if_absent(
        dataset_manifest_key(manifest.dataset_id), manifest.to_bytes()
    )
    try:
        _drop_leftovers(storage, manifest, is_first=is_first)
    except StorageError as error:
        # The dataset is published by now, and it may take rights that nothing else does.
        logger.warning(
            "dataset %s is published, but files or uploads of other writers are left next to it; "
            "they can be deleted: %s",
            manifest.dataset_id,
            error,
        )


def _drop_leftovers(storage: Storage, manifest: DatasetManifest, *, is_first: bool) -> None:
    # The manifest names one publisher's files; nobody can use what any other has written, was
    # killed while it wrote, or still writes.
    own = f"{manifest.files_key}/"
    named = {own + file.key for file in manifest.files} if is_first else set()
    every = f"{dataset_key(manifest.dataset_id)}/files-"
    found = [item.key for item in storage.list(every if is_first else own)]
    in_parallel(storage.delete, [key for key in found if key not in named])
    # Last, since it takes rights that nothing else does.
    if is_first:
        storage.drop_unfinished(every, lambda key: not key.startswith(own))


def _threads_for(manifest: DatasetManifest) -> int:
    # Each file is whole in memory while it is copied: few large ones at a time, as of shards.
    largest = max(file.num_bytes for file in manifest.files)
    return max(1, min(NUM_THREADS, IN_MEMORY_BYTES // max(largest, 1)))


def _copied(storage: Storage, manifest: DatasetManifest, cache_root: Path) -> Path:
    folder, is_own = cache_root / manifest.digest, False
    try:
        if not manifest.is_whole(folder):
            # Where locks don't work each process downloads for itself: slower, as safe.
            with staged(cache_root / ".staging", manifest.digest, fcntl.LOCK_EX) as staging:
                if not manifest.is_whole(folder):
                    _download(storage, manifest, staging, folder)
                    is_own = True  # also where a file server gives files another owner
        is_own = is_own or folder.stat().st_uid in (0, os.geteuid())
    except OSError as error:
        msg = (
            f"can't keep dataset {manifest.dataset_id} in {cache_root}: "
            f"{error.strerror or error}; free space there or set XDG_CACHE_HOME"
        )
        raise StorageError(msg) from error
    if not is_own:  # only the sizes of its files were compared
        msg = (
            f"{folder} belongs to another user, who could put anything there: set XDG_CACHE_HOME "
            "to another folder"
        )
        raise StorageError(msg)
    return folder


def _download(storage: Storage, manifest: DatasetManifest, staged: Path, folder: Path) -> None:
    def download(file: DatasetFile) -> None:
        name = f"{manifest.folder}/{file.key}"
        try:
            data = storage.read(f"{manifest.files_key}/{file.key}")
        except ObjectNotFoundError as error:
            raise damaged(storage, manifest.dataset_id, name, "is gone") from error
        if hashlib.sha256(data).hexdigest() != file.sha256:
            why = "is damaged: its sha256 isn't the one its manifest records"
            raise damaged(storage, manifest.dataset_id, name, why)
        path = staged / "files" / file.key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    in_parallel(download, manifest.files, _threads_for(manifest))
    if folder.exists() and not manifest.is_whole(folder):
        folder.rename(staged / "replaced")
    try:
        (staged / "files").rename(folder)
    except OSError:  # another process may have been faster
        if not manifest.is_whole(folder):
            raise


def user_cache() -> Path:
    """Return the folder on this machine for what can be made again: `XDG_CACHE_HOME`'s."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return caches / "prefect-torch-ddp"


@contextmanager
def staged(root: Path, name: str, kind: int) -> Iterator[Path]:
    """Give a new folder, removed at the end, as is what killed processes left of this name.

    While anybody has the name's lock, nobody else removes anything of it. The system frees it
    when the process ends, however it ends.
    """
    # Not tempfile.mkdtemp: its folders can't be read by other users, and these are renamed to
    # where all read.
    folder = root / f"{name}-{uuid.uuid4().hex}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = (root / f"{name}.lock").open("wb")
    except OSError as error:
        reason = error.strerror or error
        other = ", or set XDG_CACHE_HOME" if root.is_relative_to(user_cache()) else ""
        msg = f"can't make a folder in {root}: {reason}; make it writable for this user{other}"
        raise StorageError(msg) from error
    with lock:
        _remove_left(lock, root, name)
        wait_for_turn(lock, kind)
        if kind == fcntl.LOCK_EX:  # who had it until now may have been killed
            _remove_left(lock, root, name)
        try:
            folder.mkdir()
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            _remove_left(lock, root, name)


def wait_for_turn(lock: IO[bytes], kind: int) -> None:
    """Wait for a lock that another process of this host may hold for hours.

    The watch for hangs knows a rank that waits here by this function's name, in its stack.
    """
    with suppress(OSError):
        fcntl.flock(lock, kind)


def _remove_left(lock: IO[bytes], root: Path, name: str) -> None:
    # Others at work hold the lock; a file system without locks can't tell whether there are any.
    with suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for left in root.glob(f"{name}-{'[0-9a-f]' * 32}"):  # not those of `<name>-more`
            shutil.rmtree(left, ignore_errors=True)
