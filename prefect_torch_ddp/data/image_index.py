"""Owns which listed objects are images of which class: torchvision's rules for a folder of folders, and its order. Pure."""

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prefect_torch_ddp.data.columns import ObjectColumns
from prefect_torch_ddp.errors import NoImagesError
from prefect_torch_ddp.storage.objects import ListedObject

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
    listed: Iterable[ListedObject], where: str, is_valid: Callable[[str], bool] | None = None, *, allow_empty: bool = False
) -> ImageIndex:
    """Sort out what was listed.

    Classes are the folders of the first level, sorted; a folder is there when anything is in it, or its marker (`cats/`). Images
    are files at any depth, of one class sorted by folder and name. Files beside the class folders don't count.

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
        if rest and rest[-1] != "/" and (item.key.lower().endswith(EXTENSIONS) if is_valid is None else is_valid(item.key)):
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


def _refuse_empty(folders: Mapping[str, _ClassFolder], where: str, *, by_extension: bool, allow_empty: bool) -> None:
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
