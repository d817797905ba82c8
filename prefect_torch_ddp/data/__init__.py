"""The exact order of a training's samples, and datasets in storages.

Names are loaded when first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prefect_torch_ddp.data.images.cache import CachedReads
    from prefect_torch_ddp.data.images.folder import S3ImageFolder, image_folder
    from prefect_torch_ddp.data.images.listing import write_index
    from prefect_torch_ddp.data.images.packed import PackedObjects
    from prefect_torch_ddp.data.images.tar_shards import pack_shards
    from prefect_torch_ddp.data.lookahead import LookAhead

__all__ = [
    "CachedReads",
    "LookAhead",
    "PackedObjects",
    "S3ImageFolder",
    "image_folder",
    "pack_shards",
    "write_index",
]

_HOMES = {
    "CachedReads": "images.cache",
    "LookAhead": "lookahead",
    "PackedObjects": "images.packed",
    "S3ImageFolder": "images.folder",
    "image_folder": "images.folder",
    "pack_shards": "images.tar_shards",
    "write_index": "images.listing",
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
