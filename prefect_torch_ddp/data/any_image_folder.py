"""Owns the one call that opens images in folders, wherever they are: torchvision's own dataset for a local path, else ours."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchvision.datasets import ImageFolder

from prefect_torch_ddp.data.place import Place, readable_at
from prefect_torch_ddp.data.s3_image_folder import S3ImageFolder
from prefect_torch_ddp.data.shard_index import INDEX_NAME as SHARD_INDEX_NAME
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.storage.keys import RESERVED_PART
from prefect_torch_ddp.storage.objects import Readable


def image_folder(
    uri: Place,
    transform: Callable[[Any], Any] | None = None,
    target_transform: Callable[[Any], Any] | None = None,
    *,
    storage: Readable | None = None,
    **options: Any,
) -> "ImageFolder | S3ImageFolder":
    """Return the images in folders, wherever they are: torchvision's own `ImageFolder` for a local path, else `S3ImageFolder`.

    Args:
        uri: a path, `s3://bucket/prefix`, or a storage, such as `rank.source`.
        transform: of an image.
        target_transform: of a class number.
        storage: what to read from; then `uri` is a path in it.
        **options: of S3ImageFolder. A local folder needs no `index` and no `cache`; with on_error="skip", or with shards in it,
            S3ImageFolder reads it too.

    Raises:
        InvalidParamsError, NoImagesError, StorageError: see S3ImageFolder; torchvision raises a FileNotFoundError.
    """
    ways = {name: options.get(name) for name in ("anonymous", "endpoint_url", "region")}
    source, prefix = readable_at(uri, storage, **ways)
    skips = options.get("on_error", "raise") != "raise"
    if skips or not isinstance(source, DirectoryStorage) or (source.root / prefix / SHARD_INDEX_NAME).is_file():
        return S3ImageFolder(uri, transform, target_transform, storage=storage, **options)
    kept = {name: options[name] for name in ("loader", "is_valid_file", "allow_empty") if name in options}
    unknown = options.keys() - kept.keys() - ways.keys() - {"cache", "index", "on_error"}
    if unknown:
        msg = f"image_folder has no argument {', '.join(sorted(unknown))}"
        raise TypeError(msg)
    folder = source.root / prefix
    local = _LeftByStorage if (folder / RESERVED_PART).is_dir() else ImageFolder
    return local(str(folder), transform, target_transform, **kept)


class _LeftByStorage(ImageFolder):  # type: ignore[misc]  # torchvision has no types
    """A local folder that a `DirectoryStorage` wrote, where its folder of unfinished files is no class."""

    def find_classes(self, directory: str | Path) -> tuple[list[str], dict[str, int]]:
        classes = [name for name in super().find_classes(directory)[0] if name != RESERVED_PART]
        return classes, {name: target for target, name in enumerate(classes)}
