"""The listing of a whole dataset, or an index that `prepare` wrote, and the images in it."""

import hashlib
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from prefect_torch_ddp.data.images.compact_rows import Columns, encoded, read_rows, write_rows
from prefect_torch_ddp.errors import InvalidParamsError, NoImagesError
from prefect_torch_ddp.lazy import exported_by
from prefect_torch_ddp.storage.formats import IMAGE_INDEX
from prefect_torch_ddp.storage.names import absolute_folder
from prefect_torch_ddp.storage.protocol import ListedObject, Readable

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""torchvision.datasets.folder.IMG_EXTENSIONS."""
NUM_FOLDERS = 8
"""Listed at the same time."""
NUM_AHEAD = 4000
"""Objects of a folder that wait for their turn: four requests to S3."""
INDEX_NAME = "objects.jsonl.gz"
COLUMNS = ("key", "num_bytes", "etag")


def list_dataset(source: Readable, prefix: str = "") -> Iterator[ListedObject]:
    """Yield what `source.list_objects(prefix)` yields; lists folders at the same time if it can.

    Raises:
        StorageError: it can't be listed.
    """
    return _side_by_side(source, source.list_level(prefix))


def digest_of_listing(source: Readable) -> str:
    """Return a digest of all names, sizes and ETags, which any change changes."""
    digest = hashlib.sha256()
    for item in list_dataset(source):
        digest.update(encoded(repr((item.key, item.num_bytes, item.etag))))
    return digest.hexdigest()


def _side_by_side(source: Readable, level: Iterable[ListedObject | str]) -> Iterator[ListedObject]:
    pool = ThreadPoolExecutor(NUM_FOLDERS, "ptd-list")
    begun: deque[Iterator[ListedObject]] = deque()
    try:
        for entry in level:
            if isinstance(entry, ListedObject):
                begun.append(iter((entry,)))
            else:
                begun.append(_ahead(pool, source.list_objects(entry)))
            if len(begun) == NUM_FOLDERS:
                yield from begun.popleft()
        while begun:
            yield from begun.popleft()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _ahead(pool: ThreadPoolExecutor, objects: Iterator[ListedObject]) -> Iterator[ListedObject]:
    """Yield the objects, with which a thread begins at once."""

    def begin() -> Future[list[ListedObject]]:
        return pool.submit(lambda: list(islice(objects, NUM_AHEAD)))

    def rest(some: Future[list[ListedObject]]) -> Iterator[ListedObject]:
        while listed := some.result():
            some = begin()
            yield from listed

    return rest(begin())


@exported_by("prefect_torch_ddp.data")
def write_index(source: Readable, folder: str | Path) -> int:
    """List a dataset and write its index to a folder, such as `ctx.data` in `prepare`.

    Takes some seconds for 20,000 objects of a bucket, and the same memory for any number.

    Args:
        source: the dataset, such as `ctx.source`.
        folder: an existing folder. The index is the file `objects.jsonl.gz` in it: JSON lines
            of names, sizes and ETags.

    Returns:
        The number of objects.

    Raises:
        StorageError: it can't be listed.

    Example:
        List in `prepare`, so that no training has to:

            from prefect_torch_ddp.data import S3ImageFolder, write_index

            write_index(ctx.source, ctx.data)
            images = S3ImageFolder(ctx.source, index=ctx.data)
    """
    rows = map(_row, list_dataset(source))
    with (absolute_folder(folder) / INDEX_NAME).open("wb") as file:
        return write_rows(file, IMAGE_INDEX.stamp({"uri": source.uri}), COLUMNS, rows)


def read_index(
    path: str | Path, uri: str, *, may_have_moved: bool = False
) -> Iterator[ListedObject]:
    """Yield what an index lists below a URI, of the dataset or a folder in it.

    A dataset that may have moved, as a directory may, can be at another URI than its index says.

    Raises:
        InvalidParamsError: there is no such index, or it is another dataset's; or, at its end:
            it is damaged.
        NewerFormatError: it is of a newer format.
    """
    file = absolute_folder(path)
    file = file / INDEX_NAME if file.is_dir() else file
    if not file.is_file():
        msg = f"there is no index {file}: write it by write_index(ctx.source, ctx.data) in prepare"
        raise InvalidParamsError(msg)
    return _read(file, uri.rstrip("/"), may_have_moved=may_have_moved)


def _read(path: Path, uri: str, *, may_have_moved: bool) -> Iterator[ListedObject]:
    try:
        with path.open("rb") as file:
            rows = read_rows(file, COLUMNS)
            root = IMAGE_INDEX.check(next(rows), str(path))["uri"].rstrip("/")
            has_moved = may_have_moved and not f"{uri}/".startswith(f"{root}/")
            below = "" if has_moved else _below(root, uri, path)
            for key, num_bytes, etag in rows:
                if key.startswith(below):
                    yield ListedObject(key[len(below) :], num_bytes, etag)
    except (ValueError, KeyError) as error:
        if isinstance(error, InvalidParamsError):
            raise
        msg = f"the index {path} is damaged ({error}): run prepare again"
        raise InvalidParamsError(msg) from error


def _below(root: str, uri: str, path: Path) -> str:
    """Return the folder of the indexed dataset that a URI names: empty, or with a slash."""
    if not f"{uri}/".startswith(f"{root}/"):
        msg = f"the index {path} lists {root}, and the dataset is {uri}: give the index of that one"
        raise InvalidParamsError(msg)
    return f"{uri}/".removeprefix(f"{root}/")


@dataclass(frozen=True)
class ImageIndex:
    """The images in torchvision's order, and the class of each."""

    classes: list[str]
    objects: Columns[ListedObject]
    """Keys are relative to the dataset's root: class/.../name."""
    targets: "array[int]"


def index_images(
    listed: Iterable[ListedObject],
    where: str,
    is_valid: Callable[[str], bool] | None = None,
    *,
    allow_empty: bool = False,
) -> ImageIndex:
    """Find the images of each class in what was listed, by torchvision's rules, in its order.

    Classes are the folders of the first level, sorted; a folder is there when anything is in
    it, or its marker (`cats/`). Images are files at any depth, of one class sorted by folder
    and name. Files next to the class folders don't count. Keys are relative to the dataset's
    root, which errors call `where`.

    Raises:
        NoImagesError: there is no class, or one without images.
    """
    is_image = is_valid or (lambda key: key.lower().endswith(EXTENSIONS))
    folders: defaultdict[str, Columns[ListedObject]] = defaultdict(_columns)
    num_listed = 0
    for num_listed, item in enumerate(listed, start=1):  # noqa: B007 - read after the loop
        name, slash, rest = item.key.partition("/")
        if name and slash:
            images = folders[name]
            if rest and not rest.endswith("/") and is_image(item.key):
                images.append(_row(item))
    classes = sorted(folders)
    if not classes:
        found = f"{num_listed} objects, none of them in a folder" if num_listed else "nothing"
        msg = (
            f"couldn't find any class folder in {where}: there is {found}; "
            "images are named <class>/<name>.jpg"
        )
        raise NoImagesError(msg)
    empty = [name for name in classes if not folders[name]]
    if empty and not allow_empty:
        known = f"; supported extensions are: {', '.join(EXTENSIONS)}" if is_valid is None else ""
        msg = (
            f"found no valid file for the classes {', '.join(empty)} in {where}; "
            f"remove them, or pass allow_empty=True{known}"
        )
        raise NoImagesError(msg)
    objects, targets = _columns(), array("i")
    for target, name in enumerate(classes):
        images = folders.pop(name)
        targets.extend(array("i", [target]) * len(images))
        # By folder and then by name.
        for item in sorted(images, key=lambda item: item.key.rpartition("/")[::2]):
            objects.append(_row(item))
    return ImageIndex(classes, objects, targets)


def _columns() -> Columns[ListedObject]:
    return Columns(ListedObject, (str, int, str))


def _row(item: ListedObject) -> tuple[str, int, str]:
    return item.key, item.num_bytes, item.etag
