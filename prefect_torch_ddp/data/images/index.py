"""Which listed objects are images of which class: torchvision's rules, and its order."""

from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from prefect_torch_ddp.data.images.columns import ObjectColumns
from prefect_torch_ddp.errors import NoImagesError
from prefect_torch_ddp.storage.protocol import ListedObject

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

    def append(self, item: ListedObject) -> None:
        place = _by_folder(item.key)
        if place < self.last:
            self.is_sorted = False
        self.last = place
        self.objects.append(item)


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
        if not rest or rest[-1] == "/":
            continue
        if item.key.lower().endswith(EXTENSIONS) if is_valid is None else is_valid(item.key):
            folder.append(item)
    if not folders:
        found = f"{num_listed} objects, none of them in a folder" if num_listed else "nothing"
        msg = (
            f"couldn't find any class folder in {where}: there is {found}; "
            "images are named <class>/<name>.jpg"
        )
        raise NoImagesError(msg)
    empty = sorted(name for name, folder in folders.items() if not folder.objects)
    if empty and not allow_empty:
        raise _no_valid_file(empty, where, by_extension=is_valid is None)
    return _joined(folders)


def _no_valid_file(empty: list[str], where: str, *, by_extension: bool) -> NoImagesError:
    msg = (
        f"found no valid file for the classes {', '.join(empty)} in {where}; "
        "remove them, or pass allow_empty=True"
    )
    if by_extension:
        msg += f"; supported extensions are: {', '.join(EXTENSIONS)}"
    return NoImagesError(msg)


def _joined(folders: Mapping[str, _ClassFolder]) -> ImageIndex:
    classes = sorted(folders)
    objects, targets = ObjectColumns(), array("i")
    for target, name in enumerate(classes):
        folder = folders[name]
        objects.extend(folder.objects if folder.is_sorted else folder.objects.sorted(_by_folder))
        targets.extend(array("i", [target]) * len(folder.objects))
    return ImageIndex(classes, objects, targets)


def _by_folder(key: str) -> tuple[str, str]:
    folder, _, name = key.rpartition("/")
    return folder, name
