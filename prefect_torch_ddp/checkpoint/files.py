"""Folders as checkpoints: files that user code wrote, on their way to the storage and back.

They are copied as they are. Nothing in them is read by this package, so nothing is unpickled.
"""

import os
import shutil
import stat
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from pathlib import Path, PurePosixPath

from prefect_torch_ddp.checkpoint.manifest import Manifest, ManifestObject
from prefect_torch_ddp.checkpoint.state.objects import NUM_THREADS, read_object
from prefect_torch_ddp.errors import CheckpointError, InvalidParamsError
from prefect_torch_ddp.storage.names import check_key
from prefect_torch_ddp.storage.protocol import Storage


@dataclass(frozen=True)
class OpenFile:
    """A file as it was when its folder was committed; it may be deleted, but not changed."""

    path: str
    """Where it is restored, as a key below `ctx.checkpoint_folder`."""
    file: FileIO
    num_bytes: int
    changed_ns: int

    def read(self) -> bytes:
        """Return its content; InvalidParamsError if it changed since it was opened."""
        data = self.file.readall()
        now = os.fstat(self.file.fileno())
        if (now.st_size, now.st_mtime_ns, len(data)) != (
            self.num_bytes,
            self.changed_ns,
            self.num_bytes,
        ):
            msg = (
                f"{self.path} was changed after ctx.commit, while it was being written to the "
                "storage: give each commit a new folder, or write a new file and rename it; a "
                "committed file may be deleted at once"
            )
            raise InvalidParamsError(msg)
        return data

    def close(self) -> None:
        """Close it."""
        self.file.close()


def open_files(folder: Path, name: str, only: Iterable[str | Path] | None) -> list[OpenFile]:
    """Open what a rank commits of a folder, sorted by path.

    Args:
        folder: the folder.
        name: its name below `ctx.checkpoint_folder`; "": it is that.
        only: paths of this rank's files in the folder; None: all of it, at any depth.

    Raises:
        InvalidParamsError: there is no such folder or file, or one isn't a plain file in the
            folder; names it.
        BadKeyError: a name can't be that of an object in a storage.
    """
    if not folder.is_dir():
        msg = f"ctx.commit was given {folder}, which is no folder"
        raise InvalidParamsError(msg)
    if isinstance(only, str | Path):  # whose letters would be paths
        msg = (
            f"ctx.commit was given files={str(only)!r}; give a list of paths: files=[{str(only)!r}]"
        )
        raise InvalidParamsError(msg)
    chosen = _all_files(folder) if only is None else [folder / path for path in only]
    opened: list[OpenFile] = []
    try:
        for path in sorted(set(chosen)):
            key = check_key(str(PurePosixPath(name, path.relative_to(folder).as_posix())))
            opened.append(_open(path, folder, key))
    except BaseException as error:
        for each in opened:
            each.close()
        if isinstance(error, OSError | ValueError):
            msg = f"ctx.commit can't take {path}: {error}"
            raise InvalidParamsError(msg) from error
        raise
    return opened


def _all_files(folder: Path) -> list[Path]:
    found = []
    for root, folders, files in os.walk(folder):
        found += [Path(root, name) for name in files]
        # A walk passes them over, and their files would be missing.
        found += [path for path in (Path(root, name) for name in folders) if path.is_symlink()]
    return found


def _open(path: Path, folder: Path, key: str) -> OpenFile:
    if not path.resolve().is_relative_to(folder.resolve()):
        msg = f"{path} leads out of the folder that ctx.commit was given, {folder}"
        raise InvalidParamsError(msg)
    if not path.is_file():  # before it is opened: a pipe would wait for its writer
        what = "is a link to a folder" if path.is_dir() else "is no plain file"
        msg = f"ctx.commit takes plain files, and {path} {what if path.exists() else 'is missing'}"
        raise InvalidParamsError(msg)
    file = FileIO(path)
    status = os.fstat(file.fileno())
    assert stat.S_ISREG(status.st_mode)
    return OpenFile(key, file, status.st_size, status.st_mtime_ns)


def without_doubles(
    items: Iterable[ManifestObject], folder: str | None
) -> tuple[tuple[ManifestObject, ...], list[ManifestObject]]:
    """Return a checkpoint's objects, and those files that another rank has committed too.

    Args:
        items: of all ranks.
        folder: the name of the folder that rank 0 commits; None: it is none.

    Raises:
        InvalidParamsError: there are no files, or ranks have different ones under a name.
    """
    first: dict[str, ManifestObject] = {}
    doubles = []
    for item in items:
        before = first.setdefault(item.name, item)
        if before is item:
            continue
        doubles.append(item)
        if before.digest != item.digest:
            msg = (
                f"ranks {before.rank} and {item.rank} committed different files as {item.path}: "
                "give them different names, or name each rank's own by ctx.commit(files=...)"
            )
            raise InvalidParamsError(msg)
    if folder is not None:
        _check_folder(first, folder)
    return tuple(first.values()), doubles


def _check_folder(paths: Iterable[str], folder: str) -> None:
    paths = set(paths)
    if not paths:
        msg = f"ctx.commit was given a folder without files, {folder or 'ctx.checkpoint_folder'}"
        raise InvalidParamsError(msg)
    for path in paths:
        parents = {str(parent) for parent in PurePosixPath(path).parents}
        if folder and folder not in parents:
            msg = f"the ranks commit different folders: {folder} on rank 0, and {path} elsewhere"
            raise InvalidParamsError(msg)
        if both := parents & paths:
            msg = f"{both.pop()} is a file on one rank and a folder on another"
            raise InvalidParamsError(msg)


def refuse_folder(manifest: Manifest) -> None:
    """Raise InvalidParamsError if objects are to be restored from what is a folder."""
    if manifest.folder is not None:
        msg = (
            f"the checkpoint of step {manifest.step} of run {manifest.run_id} is a folder, which "
            "ctx.commit made: read it from ctx.committed, or start a new run to use ctx.track"
        )
        raise InvalidParamsError(msg)


def fetch_files(storage: Storage, manifest: Manifest, root: Path) -> None:
    """Put a checkpoint's files into a folder, in place of what is in there.

    Raises:
        InvalidParamsError: the checkpoint is no folder.
        CheckpointError: a file is missing, or isn't what was written.
        BadKeyError: the manifest names a path that would leave the folder.
        StorageError: the storage failed.
    """
    if manifest.folder is None:
        msg = (
            f"the checkpoint of step {manifest.step} of run {manifest.run_id} has objects of "
            "ctx.track, and no folder of ctx.commit: a run has one kind of checkpoint"
        )
        raise InvalidParamsError(msg)
    paths = [_path_of(item, manifest) for item in manifest.objects]  # before anything is written
    for left in root.iterdir():
        shutil.rmtree(left) if left.is_dir() else left.unlink()

    def fetch(item: ManifestObject, path: str) -> None:
        data = read_object(storage, manifest, item)
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)

    pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="prefect-torch-ddp-restore")
    try:
        for _ in pool.map(fetch, manifest.objects, paths):
            pass
    finally:
        pool.shutdown(cancel_futures=True)


def _path_of(item: ManifestObject, manifest: Manifest) -> str:
    if item.path is None:
        msg = f"the checkpoint of step {manifest.step} has a file without a path, {item.key}"
        raise CheckpointError(msg)
    return check_key(item.path)


def name_below(folder: Path, root: Path) -> str:
    """Return a folder's name below the root: its path if it lies there, "" for it, else its own."""
    here, above = folder.resolve(), root.resolve()
    if here == above:
        return ""
    return here.relative_to(above).as_posix() if here.is_relative_to(above) else here.name


def close_all(files: Sequence[OpenFile]) -> None:
    """Close what was opened."""
    for file in files:
        file.close()
