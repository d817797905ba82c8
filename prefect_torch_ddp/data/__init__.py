"""The data a training reads: exact sample order, prepared datasets, and image folders anywhere.

Modules here know neither Dask nor Prefect, and learn a rank's number and the world size as
plain integers. `images/` holds datasets that know nothing of ranks. Names load on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prefect_torch_ddp.data.images.cache import CachedReads as CachedReads
    from prefect_torch_ddp.data.images.folder import S3ImageFolder as S3ImageFolder
    from prefect_torch_ddp.data.images.folder import image_folder as image_folder
    from prefect_torch_ddp.data.images.listing import write_index as write_index
    from prefect_torch_ddp.data.images.packed import PackedObjects as PackedObjects
    from prefect_torch_ddp.data.images.tar_shards import pack_shards as pack_shards
    from prefect_torch_ddp.data.lookahead import LookAhead as LookAhead
    from prefect_torch_ddp.data.preparing import read_files as read_files
    from prefect_torch_ddp.data.preparing import seeded_split as seeded_split
    from prefect_torch_ddp.data.shards import Sharded as Sharded

_HOMES = {
    "CachedReads": "images.cache",
    "LookAhead": "lookahead",
    "PackedObjects": "images.packed",
    "S3ImageFolder": "images.folder",
    "Sharded": "shards",
    "image_folder": "images.folder",
    "pack_shards": "images.tar_shards",
    "read_files": "preparing",
    "seeded_split": "preparing",
    "write_index": "images.listing",
}

__all__ = [*_HOMES]  # noqa: PLE0604 - the table's keys are names


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
