"""Prepared datasets in a storage: files first, the manifest last, as the commit."""

import fcntl
import hashlib
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from prefect_torch_ddp.data.dataset_manifest import (
    NUM_THREADS,
    DatasetFile,
    DatasetManifest,
    damaged,
    dataset_key,
    files_key,
    first_misfit,
    in_parallel,
    manifest_key,
    published_manifest,
    read_manifest,
    scan_folder,
)
from prefect_torch_ddp.errors import ObjectNotFoundError, StorageError
from prefect_torch_ddp.results import DatasetReport
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.storage.keys import RESERVED_PART
from prefect_torch_ddp.storage.locate import storage_below
from prefect_torch_ddp.storage.protocol import Storage

IN_MEMORY_BYTES = 256 * 2**20


def find_dataset(storage: Storage, dataset_id: str) -> DatasetReport | None:
    """Return what the manifest of a published dataset says, None where there is none."""
    manifest = read_manifest(storage, dataset_id)
    return None if manifest is None else _report(storage, manifest)


@contextmanager
def prepare_folder(storage: Storage, dataset_id: str) -> Iterator[Path]:
    """Give an empty local folder for a dataset; what wasn't published is removed at the end.

    For a directory it lies inside the storage, so publishing is one rename. Elsewhere it is a
    temporary folder.
    """
    if isinstance(storage, DirectoryStorage):
        with _staging(_staging_root(storage), dataset_id) as staged:
            (staged / "files").mkdir()
            yield staged / "files"
    else:
        dataset_key(dataset_id)  # refuses an id that is no name
        with TemporaryDirectory(prefix=f"prefect-torch-ddp-{dataset_id}-") as folder:
            yield Path(folder)


def publish_dataset(storage: Storage, dataset_id: str, folder: Path) -> DatasetReport:
    """Publish the files of a folder under a dataset id; return what the storage then holds.

    What is published already stays. Several may publish one id at once: what they leave is one
    whole dataset. A folder from `prepare_folder` may be moved away; any other one stays.

    Raises:
        StorageError: the folder holds no file, or something else than files and folders, or the
            storage failed.
    """
    published = find_dataset(storage, dataset_id)
    if published is not None:
        return published
    manifest = scan_folder(dataset_id, folder)
    if isinstance(storage, DirectoryStorage):
        _move_in(storage, manifest, folder)
    else:
        _upload(storage, manifest, folder)
    return find_dataset(storage, dataset_id) or _report(storage, manifest)


def local_dataset(storage: Storage, dataset_id: str, cache_root: Path | None = None) -> Path:
    """Return a local folder that holds a published dataset, a verified copy if need be.

    Safe among processes: of several on a host one downloads, the others wait for it, and the
    folder appears whole.

    Args:
        storage: where the dataset was published.
        dataset_id: its id.
        cache_root: the folder of all copies; left out, one in the user's cache
            (`XDG_CACHE_HOME`, else `~/.cache`).

    Raises:
        StorageError: the dataset, or one of its files, is missing or damaged; names the file.
    """
    manifest = published_manifest(storage, dataset_id)
    if not isinstance(storage, DirectoryStorage):
        return _copied(storage, manifest, cache_root or _default_cache())
    folder = storage.root / files_key(dataset_id)
    misfit = first_misfit(folder, manifest)
    if misfit is not None:
        why = "is missing or has another size than its manifest records"
        raise damaged(storage, dataset_id, f"files/{misfit.key}", why)
    return folder


def dataset_in_place(storage: Storage, dataset_id: str) -> Storage:
    """Return a published dataset as a storage of its own, where it lies: nothing is copied.

    Raises:
        StorageError: there is no such dataset.
    """
    published_manifest(storage, dataset_id)
    return storage_below(storage, files_key(dataset_id))


def _move_in(storage: DirectoryStorage, manifest: DatasetManifest, folder: Path) -> None:
    """Make the whole dataset, manifest included, appear by one rename."""
    root = _staging_root(storage)
    target = storage.root / dataset_key(manifest.dataset_id)
    with _staging(root, manifest.dataset_id) as own:
        staged = folder.parent if folder.parent.parent == root else own
        try:
            if staged == own:
                shutil.copytree(folder, own / "files")
            (staged / "manifest.json").write_text(manifest.model_dump_json(indent=1))
            target.parent.mkdir(exist_ok=True)
            # Without a manifest it is no dataset: someone deleted the manifest to have it
            # prepared again.
            if target.exists() and not (target / "manifest.json").exists():
                target.rename(own / "replaced")
            staged.rename(target)
        except OSError as error:
            if find_dataset(storage, manifest.dataset_id) is not None:
                return  # another publisher was faster, with a whole one
            reason = error.strerror or error
            msg = f"can't move dataset {manifest.dataset_id} to {target}: {reason}"
            raise StorageError(msg) from error


def _upload(storage: Storage, manifest: DatasetManifest, folder: Path) -> None:
    files = files_key(manifest.dataset_id)

    def upload(file: DatasetFile) -> None:
        storage.write(f"{files}/{file.key}", (folder / file.key).read_bytes())

    key, text = manifest_key(manifest.dataset_id), manifest.model_dump_json(indent=1).encode()
    in_parallel(upload, manifest.files, _threads_for(manifest))
    if storage.write_if_absent(key, text):
        return
    other = read_manifest(storage, manifest.dataset_id)
    if other is None or other.digest != manifest.digest:
        # Our files may lie over those of a publisher that was faster and whose prepare wrote
        # others: make them all ours.
        in_parallel(upload, manifest.files, _threads_for(manifest))
        storage.write(key, text)


def _threads_for(manifest: DatasetManifest) -> int:
    # Each file is whole in memory while it is copied: few large ones at a time, as of shards.
    largest = max(file.num_bytes for file in manifest.files)
    return max(1, min(NUM_THREADS, IN_MEMORY_BYTES // max(largest, 1)))


def _copied(storage: Storage, manifest: DatasetManifest, cache_root: Path) -> Path:
    folder = cache_root / manifest.digest
    try:
        cache_root.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(cache_root / f"{manifest.digest}.lock"):
            if not _is_whole(folder, manifest):
                _download_all(storage, manifest, folder)
    except OSError as error:
        msg = (
            f"can't keep dataset {manifest.dataset_id} in {cache_root}: "
            f"{error.strerror or error}; free space there or set XDG_CACHE_HOME"
        )
        raise StorageError(msg) from error
    return folder


def _is_whole(folder: Path, manifest: DatasetManifest) -> bool:
    return folder.exists() and first_misfit(folder, manifest) is None


def _download_all(storage: Storage, manifest: DatasetManifest, folder: Path) -> None:
    def download(file: DatasetFile) -> None:
        path = staged / "files" / file.key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_read_verified(storage, manifest.dataset_id, file))

    with _staging(folder.parent / ".staging", manifest.dataset_id) as staged:
        in_parallel(download, manifest.files, _threads_for(manifest))
        if folder.exists() and not _is_whole(folder, manifest):
            folder.rename(staged / "replaced")
        try:
            (staged / "files").rename(folder)
        except OSError:  # where locks don't work, another process may have been faster
            if not _is_whole(folder, manifest):
                raise


def _read_verified(storage: Storage, dataset_id: str, file: DatasetFile) -> bytes:
    try:
        data = storage.read(f"{files_key(dataset_id)}/{file.key}")
    except ObjectNotFoundError as error:
        raise damaged(storage, dataset_id, f"files/{file.key}", "is gone") from error
    if hashlib.sha256(data).hexdigest() != file.sha256:
        why = "is damaged: its sha256 isn't the one its manifest records"
        raise damaged(storage, dataset_id, f"files/{file.key}", why)
    return data


def _report(storage: Storage, manifest: DatasetManifest) -> DatasetReport:
    return DatasetReport(
        dataset_id=manifest.dataset_id,
        uri=f"{storage.uri.rstrip('/')}/{files_key(manifest.dataset_id)}",
        num_files=len(manifest.files),
        num_bytes=manifest.num_bytes,
        digest=manifest.digest,
    )


def _staging_root(storage: DirectoryStorage) -> Path:
    return storage.root / RESERVED_PART  # which its listings leave out


def _default_cache() -> Path:
    caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return caches / "prefect-torch-ddp" / "datasets"


@contextmanager
def _staging(root: Path, dataset_id: str) -> Iterator[Path]:
    dataset_key(dataset_id)  # refuses an id that is no name
    # Not tempfile.mkdtemp: its folders can't be read by other users, and these are renamed to
    # where all read.
    folder = root / f"{dataset_id}-{uuid.uuid4().hex}"
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        reason = error.strerror or error
        msg = f"can't make a folder in {root}: {reason}; it has to be writable for this user"
        raise StorageError(msg) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        # On a file system without locks each process downloads for itself: slower, as safe.
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
