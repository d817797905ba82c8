"""Owns which listed objects are images of which class: torchvision's rules for a folder of
folders, and its order. Pure.

Owns compact columns of listed objects: a few arrays, so a million of them are 100 MB, and forks
share the memory.
"""

import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from prefect_torch_ddp.errors import NoImagesError
from prefect_torch_ddp.storage.protocol import ListedObject


class TextColumn:
    """Texts one behind the other in one block of memory."""

    def __init__(self) -> None:
        """Begin with none."""
        self._block = bytearray()
        self._ends = array("Q", [0])

    def __len__(self) -> int:
        """Return the number of texts."""
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> str:
        """Return a text; the index counts from 0."""
        return self._block[self._ends[index] : self._ends[index + 1]].decode(
            "utf-8", "surrogateescape"
        )

    def append(self, text: str) -> None:
        """Add a text."""
        self._block += text.encode("utf-8", "surrogateescape")
        self._ends.append(len(self._block))

    def extend(self, other: "TextColumn") -> None:
        """Add all of another column's."""
        block, ends = other._block, other._ends
        shift = len(self._block)
        self._block += block
        self._ends.extend([end + shift for end in ends[1:]])

    def __getstate__(self) -> tuple[bytes, bytes]:
        """Pickle small."""
        lengths = array("I", (self._ends[i + 1] - self._ends[i] for i in range(len(self))))
        return zlib.compress(self._block, 1), zlib.compress(lengths, 1)

    def __setstate__(self, state: tuple[bytes, bytes]) -> None:
        """Unpickle."""
        block, lengths = state
        self._block = bytearray(zlib.decompress(block))
        self._ends = array("Q", [0])
        end = 0
        self._ends.extend([end := end + length for length in array("I", zlib.decompress(lengths))])


class ObjectColumns:
    """Listed objects, in the order in which they were added."""

    def __init__(self, objects: Iterable[ListedObject] = ()) -> None:
        """Take them."""
        self._keys, self._sizes, self._etags = TextColumn(), array("Q"), TextColumn()
        for item in objects:
            self.append(item)

    def __getstate__(self) -> tuple[TextColumn, bytes, TextColumn]:
        """Pickle small."""
        return self._keys, zlib.compress(self._sizes.tobytes(), 1), self._etags

    def __setstate__(self, state: tuple[TextColumn, bytes, TextColumn]) -> None:
        """Unpickle."""
        self._keys, sizes, self._etags = state
        self._sizes = array("Q", zlib.decompress(sizes))

    def __len__(self) -> int:
        """Return their number."""
        return len(self._sizes)

    def __getitem__(self, index: int) -> ListedObject:
        """Return one; the index counts from 0."""
        return ListedObject(self._keys[index], self._sizes[index], self._etags[index])

    def __iter__(self) -> Iterator[ListedObject]:
        """Yield all."""
        return map(self.__getitem__, range(len(self)))

    def append(self, item: ListedObject) -> None:
        """Add one."""
        self._keys.append(item.key)
        self._sizes.append(item.num_bytes)
        self._etags.append(item.etag)

    def key(self, index: int) -> str:
        """Return the key alone."""
        return self._keys[index]

    def extend(self, other: "ObjectColumns") -> None:
        """Add all of another's."""
        keys, sizes, etags = other._keys, other._sizes, other._etags
        self._keys.extend(keys)
        self._sizes.extend(sizes)
        self._etags.extend(etags)

    def sorted(self, by: Callable[[str], Any]) -> "ObjectColumns":
        """Return the same objects in the order of a function of their keys."""
        order = sorted(range(len(self)), key=lambda index: by(self._keys[index]))
        return ObjectColumns(map(self.__getitem__, order))


EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""torchvision.datasets.folder.IMG_EXTENSIONS."""


@dataclass(frozen=True)
class ImageIndex:
    """The images in torchvision's order, and the class of each."""

    classes: list[str]
    objects: ObjectColumns
    """Keys are relative to the dataset's root: class/.../name."""
    targets: "array[int]"


@dataclass
class _ClassFolder:
    objects: ObjectColumns = field(default_factory=ObjectColumns)
    last: tuple[str, str] = ("", "")
    is_sorted: bool = True


def index_images(
    listed: Iterable[ListedObject],
    where: str,
    is_valid: Callable[[str], bool] | None = None,
    *,
    allow_empty: bool = False,
) -> ImageIndex:
    """Sort out what was listed.

    Classes are the folders of the first level, sorted; a folder is there when anything is in
    it, or its marker (`cats/`). Images are files at any depth, of one class sorted by folder
    and name. Files beside the class folders don't count.

    Args:
        listed: in any order; keys are relative to the dataset's root.
        where: what to call the dataset in an error.
        is_valid: tells from a key whether it is an image; None: by its extension.
        allow_empty: whether a class may have no image.

    Raises:
        NoImagesError: there is no class, or one without images.
    """
    folders: dict[str, _ClassFolder] = {}
    num_listed = 0
    for item in listed:
        num_listed += 1
        name, slash, rest = item.key.partition("/")
        if not slash or not name:
            continue
        folder = folders.get(name)
        if folder is None:
            folder = folders[name] = _ClassFolder()
        if (
            rest
            and rest[-1] != "/"
            and (item.key.lower().endswith(EXTENSIONS) if is_valid is None else is_valid(item.key))
        ):
            place = rest.rpartition("/")
            if (place[0], place[2]) < folder.last:
                folder.is_sorted = False
            folder.last = place[0], place[2]
            folder.objects.append(item)
    if not folders:
        found = f"{num_listed} objects, none of them in a folder" if num_listed else "nothing"
        msg = f"couldn't find any class folder in {where}: there is {found}; images are named <class>/<name>.jpg"
        raise NoImagesError(msg)
    _refuse_empty(folders, where, by_extension=is_valid is None, allow_empty=allow_empty)
    return _joined(folders)


def _refuse_empty(
    folders: Mapping[str, _ClassFolder], where: str, *, by_extension: bool, allow_empty: bool
) -> None:
    empty = sorted(name for name, folder in folders.items() if not folder.objects)
    if empty and not allow_empty:
        msg = f"found no valid file for the classes {', '.join(empty)} in {where}; remove them, or pass allow_empty=True"
        if by_extension:
            msg += f"; supported extensions are: {', '.join(EXTENSIONS)}"
        raise NoImagesError(msg)


def _joined(folders: Mapping[str, _ClassFolder]) -> ImageIndex:
    classes = sorted(folders)
    objects, targets = ObjectColumns(), array("i")
    for target, name in enumerate(classes):
        folder = folders[name]
        objects.extend(folder.objects if folder.is_sorted else folder.objects.sorted(_by_folder))
        targets.extend(_repeated(target, len(folder.objects)))
    return ImageIndex(classes, objects, targets)


def _by_folder(key: str) -> tuple[str, str]:
    folder, _, name = key.rpartition("/")
    return folder, name


def _repeated(target: int, times: int) -> Iterator[int]:
    return (target for _ in range(times))
