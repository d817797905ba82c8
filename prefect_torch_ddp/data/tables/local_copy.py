"""A table's local copy: its rows, decoded once a host into files that all processes map.

A copy is a folder named by a digest of everything that its rows follow from. It has one .npy file
for each block of the table's form, and `copy.json`, which describes them. The folder appears by one
rename when all of it is on the disk, so what a killed process leaves is never taken for a copy.
"""

import fcntl
import hashlib
import json
import logging
import mmap
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from prefect_torch_ddp.data.datasets.dataset_manifest import in_parallel
from prefect_torch_ddp.data.datasets.dataset_store import staged
from prefect_torch_ddp.data.images.cache import room_on_disk
from prefect_torch_ddp.data.tables.form import Array, Block, Form
from prefect_torch_ddp.data.tables.parquet_files import Found
from prefect_torch_ddp.data.tables.pieces import TablePieces
from prefect_torch_ddp.errors import InvalidParamsError, StorageError

logger = logging.getLogger(__name__)

VERSION = 3
"""Part of a copy's name: a version that writes other files makes other copies."""
NUM_THREADS = 4
"""Number of pieces that are decoded at a time."""
ABOUT = "copy.json"
"""Its time is the copy's last use, and whoever uses the copy holds a shared lock on it."""


@dataclass(frozen=True)
class LocalCopy:
    """A copy that is open: nobody removes it to make room while this object is alive."""

    folder: Path
    form: Form
    num_rows: int
    categories: Mapping[str, tuple[str, ...]]
    blocks: tuple[Array, ...]
    """The rows of each block of the form: arrays [rows, columns] that are mapped, read-only."""
    layout: str
    """Of the table's files: `TablePieces.layout`."""
    in_use: mmap.mmap
    """Of `copy.json`, on which it holds the lock."""

    @classmethod
    def at(cls, folder: Path) -> Self | None:
        """Open the copy in a folder; None if it isn't there, or is damaged.

        Raises:
            InvalidParamsError: another user made it.
        """
        try:
            with (folder / ABOUT).open("rb") as file:
                owner = os.fstat(file.fileno()).st_uid
                with suppress(OSError):  # a file system without locks, whose copies nobody removes
                    fcntl.flock(file, fcntl.LOCK_SH)
                about = json.load(file)
                # It has the same open file, and with it the lock.
                in_use = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            form = Form(
                tuple(about["names"]),
                tuple(Block(dtype, tuple(names)) for dtype, names in about["blocks"]),
                about["has_features"],
            )
            maps = [np.load(_path(folder, i), "r") for i in range(len(form.blocks))]
        except (FileNotFoundError, ValueError, KeyError):
            return None  # or it was removed just now, or somebody changed its files
        expected = [(about["num_rows"], np.dtype(block.dtype)) for block in form.blocks]
        if [(len(each), each.dtype) for each in maps] != expected:
            return None
        if owner != os.geteuid():
            msg = (
                f"{folder} belongs to another user, who could put anything there: give another "
                "folder as local_copy"
            )
            raise InvalidParamsError(msg)
        with suppress(OSError):  # on a disk that can only be read
            os.utime(folder / ABOUT)
        categories = {name: tuple(values) for name, values in about["categories"].items()}
        # A plain array of the same memory is indexed in half the time.
        blocks = tuple(map(np.asarray, maps))
        return cls(folder, form, about["num_rows"], categories, blocks, about["layout"], in_use)


def open_copy(
    root: Path, files: Sequence[Found], asked: Mapping[str, Any], read: Callable[[], TablePieces]
) -> LocalCopy:
    """Return the copy of a table, which the first process of a host makes and the others await.

    Args:
        root: the folder for all copies, on a local disk.
        files: the table's files.
        asked: what else the rows depend on: the arguments of `table`.
        read: opens the table; only called if there is no copy yet.

    Raises:
        InvalidParamsError: the copy doesn't fit the disk, or the table can't be read.
        StorageError: a file can't be read, or the copy can't be written.
    """
    folder = root / _name(files, asked)
    try:
        copy = LocalCopy.at(folder)
        if copy is None:
            # Where locks don't work each process decodes for itself: slower, as safe.
            with staged(root / ".staging", folder.name, fcntl.LOCK_EX) as staging:
                copy = LocalCopy.at(folder) or _make(read, staging, folder)
    except OSError as error:
        msg = (
            f"can't keep a copy of the table in {root}: {error.strerror or error}; free space "
            "there, give another folder as local_copy, or leave local_copy out"
        )
        raise StorageError(msg) from error
    return copy


def _name(files: Sequence[Found], asked: Mapping[str, Any]) -> str:
    """Return the copy's name: a digest of the listing and of the arguments.

    Raises:
        InvalidParamsError: a file has no ETag, so nobody could tell whether it changed.
    """
    digest = hashlib.sha256(f"{VERSION} {_words(asked)}".encode())
    for source, item in files:
        if not item.etag:
            msg = (
                f"{source.uri.rstrip('/')}/{item.key} has no ETag, so nobody could tell whether a "
                "copy of it is outdated: leave local_copy out"
            )
            raise InvalidParamsError(msg)
        listed = (source.identity, item.key, item.num_bytes, item.etag)
        digest.update(repr(listed).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()[:40]


def _words(value: Any) -> str:
    """Return a value as a text that is equal in all processes, and differs for other values."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_words(key)}: {_words(each)}' for key, each in value.items())}}}"
    if isinstance(value, set | frozenset):  # its order isn't the same in another process
        return f"set {sorted(map(_words, value))}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_words, value))}]"
    if hasattr(value, "tolist"):  # of NumPy, pandas or pyarrow, whose text would be cut
        return f"{value.dtype if hasattr(value, 'dtype') else ''} {_words(value.tolist())}"
    return f"{type(value).__name__} {value!r}"


def _make(read: Callable[[], TablePieces], staging: Path, folder: Path) -> LocalCopy:
    """Decode all rows, let the copy appear in its folder, and return it.

    The watch for hangs knows a rank that is at work here by this function's name, in its stack.
    """
    rows = read()
    num_bytes = len(rows) * rows.form.row_bytes
    _make_room(folder.parent, num_bytes, staging)
    began_s = time.monotonic()
    logger.info("decoding %d rows into %s, %.1f GB", len(rows), folder, num_bytes / 1e9)
    made = staging / "copy"
    made.mkdir(mode=0o700)
    _write_blocks(rows, made)
    about = {
        "files": [rows.files[0].uri, len(rows.files)],
        "layout": rows.layout,
        "num_rows": len(rows),
        "names": rows.form.names,
        "blocks": [(block.dtype, block.columns) for block in rows.form.blocks],
        "has_features": rows.form.has_features,
        "categories": {name: each.values for name, each in rows.columns.items() if each.values},
    }
    (made / ABOUT).write_text(json.dumps(about, indent=1), encoding="utf-8")
    for path in made.iterdir():
        # Or a machine that loses its power might keep the rename, and not what was written.
        with path.open("rb") as file:
            os.fsync(file.fileno())
    # Opened before others see it: nobody has removed it in between.
    copy = LocalCopy.at(made)
    assert copy is not None
    with suppress(FileNotFoundError):
        folder.rename(staging / "damaged")
    try:
        made.rename(folder)
    except OSError:  # without locks, another process may have been faster
        if not (folder / ABOUT).exists():
            raise
    logger.info("decoded %d rows in %.0f s", len(rows), time.monotonic() - began_s)
    return replace(copy, folder=folder)


def _write_blocks(rows: TablePieces, folder: Path) -> None:
    """Write all rows of each block to its .npy file."""
    files, starts = [], []
    try:
        for i, block in enumerate(rows.form.blocks):
            files.append(_path(folder, i).open("xb", buffering=0))
            shape, descr = (len(rows), len(block.columns)), np.dtype(block.dtype).str
            header = {"descr": descr, "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_2_0(files[-1], header)
            starts.append(files[-1].tell())

        def write(number: int) -> None:
            for row, arrays in rows.decode_chunks(number):
                for file, start, array in zip(files, starts, arrays, strict=True):
                    at = start + row * array.strides[0]
                    _write_at(file.fileno(), array.data.cast("B"), at)

        in_parallel(write, range(len(rows.pieces)), NUM_THREADS)
    finally:
        for file in files:
            file.close()


def _write_at(file: int, data: memoryview, at: int) -> None:
    # Not to a mapped file: on a disk that is full, that would kill the process.
    while data:
        written = os.pwrite(file, data, at)
        data, at = data[written:], at + written


def _make_room(root: Path, num_bytes: int, staging: Path) -> None:
    """Remove copies that nobody uses until there is room, the longest unused first.

    Raises:
        InvalidParamsError: there is too little room even so.
    """
    named = re.compile("[0-9a-f]{40}")  # what another program put there isn't ours to remove
    found = [path for path in root.glob(f"*/{ABOUT}") if named.fullmatch(path.parent.name)]
    abouts = {path: path.stat().st_mtime for path in found}
    for path in sorted(abouts, key=abouts.__getitem__):
        if room_on_disk(str(root)) >= num_bytes:
            break
        with suppress(OSError), path.open("r+b") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            removed = path.parent.rename(staging / path.parent.name)
            shutil.rmtree(removed, ignore_errors=True)
            logger.info(
                "%s, a table's copy that nobody uses, was removed to make room", path.parent
            )
    free = room_on_disk(str(root))
    if free < num_bytes:
        msg = (
            f"the table's copy takes {num_bytes} bytes, and in {root} {free} bytes are free (a "
            "twentieth of the disk, at most 4 GiB, is left for other files): free space there, "
            "give a folder on another disk as local_copy, or leave local_copy out, which shuffles "
            "rows in windows and needs no disk"
        )
        raise InvalidParamsError(msg)


def _path(folder: Path, block: int) -> Path:
    return folder / f"{block}.npy"
