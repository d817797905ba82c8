"""The exact order of a training's samples, and datasets in storages. Names are loaded when first used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prefect_torch_ddp.data.any_image_folder import image_folder
    from prefect_torch_ddp.data.cache import CachedReads
    from prefect_torch_ddp.data.lookahead import LookAhead
    from prefect_torch_ddp.data.object_index import write_index
    from prefect_torch_ddp.data.packed import PackedObjects
    from prefect_torch_ddp.data.s3_image_folder import S3ImageFolder
    from prefect_torch_ddp.data.tar_shards import pack_shards

__all__ = ["CachedReads", "LookAhead", "PackedObjects", "S3ImageFolder", "image_folder", "pack_shards", "write_index"]

_HOMES = {
    "CachedReads": "cache",
    "LookAhead": "lookahead",
    "PackedObjects": "packed",
    "S3ImageFolder": "s3_image_folder",
    "image_folder": "any_image_folder",
    "pack_shards": "tar_shards",
    "write_index": "object_index",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
