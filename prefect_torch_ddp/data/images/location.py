"""The location of a dataset: the storage that it is read from, and the folder in it."""

from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import unquote

from prefect_torch_ddp.data.images.cache import CachedReads
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.storage.locate import as_readable, storage_from_uri
from prefect_torch_ddp.storage.protocol import Readable

Location: TypeAlias = str | Path | Readable
"""A path, an s3:// URI, or what reads: a storage, or a cache."""


def readable_at(
    location: Location, storage: Readable | None = None, **ways: Any
) -> tuple[Readable, str]:
    """Return what the dataset is read from, and the prefix of its names: empty, or with a slash.

    With a storage the location is its URI below the storage's, or its path in the storage. The
    ways to get to an s3:// URI are anonymous, endpoint_url and region.

    Raises:
        InvalidParamsError: the arguments don't fit together, or name nothing that can be read.
    """
    given = {name: value for name, value in ways.items() if value}
    if storage is not None and not given and isinstance(location, str | Path):
        return as_readable(storage), _prefix_in(storage, str(location))
    if not isinstance(location, str | Path):
        if storage is None and not given:
            return as_readable(location), ""
        msg = f"{location.uri} is a storage by itself; leave out {', '.join(given) or 'storage'}"
    elif storage is None:
        return storage_from_uri(str(location), **given), ""
    else:
        msg = f"{', '.join(given)} can't be given along with a storage, which has its own"
    raise InvalidParamsError(msg)


def local_path(given: str) -> str:
    """Return the path of a file:// URI, as tables of Iceberg name their files; else what was given.

    Some programs write %20 for a space. Iceberg writes no such signs, and its files have names with
    %: if a file is there as it is written, it is meant.

    Raises:
        InvalidParamsError: it is on another host.
    """
    scheme, _, rest = given.partition(":")
    if scheme.lower() != "file" or not rest.startswith("/"):
        return given
    host, _, path = rest[2:].partition("/") if rest.startswith("//") else ("", "", rest[1:])
    if host.lower() not in {"", "localhost"}:
        msg = (
            f"this is a file:// URI of another host, with the path /{path}: copy the file to a "
            "bucket, or to a folder of this host, and write file:///folder/name"
        )
        raise InvalidParamsError(msg)
    return f"/{path}" if Path(f"/{path}").exists() else unquote(f"/{path}")


def through_cache(source: Readable, cache: str | Path | None) -> Readable:
    """Return what reads a dataset's images: through a cache, or directly.

    Raises:
        InvalidParamsError: there are two caches.
    """
    if cache is None:
        return source
    if isinstance(source, CachedReads):
        msg = (
            f"{source.uri} is read through the cache {source.folder} already; "
            f"leave out cache={str(cache)!r}"
        )
        raise InvalidParamsError(msg)
    return CachedReads(source, Path(cache))


def _prefix_in(storage: Readable, path: str) -> str:
    root = storage.uri.rstrip("/")
    below = path.removeprefix(root) if path == root or path.startswith(f"{root}/") else path
    if "://" in below or (below == path and below.startswith("/")) or ".." in below.split("/"):
        msg = (
            f"{path} isn't in the storage {root}; "
            "give a path in it, such as train, or leave the storage out"
        )
        raise InvalidParamsError(msg)
    below = below.strip("/")
    return "" if below in {"", "."} else f"{below}/"
