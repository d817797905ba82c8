"""A storage as zarr reads it: its objects as they were listed, by `Readable.read_many`."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any

from zarr.abc.store import (
    ByteRequest,
    OffsetByteRequest,
    RangeByteRequest,
    Store,
    SuffixByteRequest,
)
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.core.buffer.core import default_buffer_prototype

from prefect_torch_ddp.data.arrays.opening.ranges import read_range
from prefect_torch_ddp.storage.protocol import ListedObject, Readable


class ListedStore(Store):
    """Objects of a storage, of which none is written.

    So any storage and cache serves chunks, with its credentials. An object that was replaced or
    deleted since it was listed is an error, and no missing chunk.

    Args:
        source: what reads them.
        objects: by their key in the Zarr hierarchy.
    """

    supports_writes = False
    supports_deletes = False
    supports_listing = True

    def __init__(self, source: Readable, objects: Mapping[str, ListedObject]) -> None:
        super().__init__(read_only=True)
        self.source = source
        self.objects = objects

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ListedStore):
            return False
        return self.source == other.source and self.objects == other.objects

    __hash__ = None  # type: ignore[assignment]

    def read_object(self, key: str) -> bytes | None:
        """Return an object that isn't Zarr's; None if it wasn't listed.

        Raises:
            StorageError: it can't be read.
        """
        listed = self.objects.get(key)
        return None if listed is None else read_range(self.source, listed, 0, listed.num_bytes)

    async def get(
        self,
        key: str,
        prototype: BufferPrototype | None = None,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        """Return an object or a range of it; None if it wasn't listed."""
        listed = self.objects.get(key)
        if listed is None:
            return None
        start, end = _range(listed.num_bytes, byte_range)
        content = await asyncio.to_thread(read_range, self.source, listed, start, end)
        return (prototype or default_buffer_prototype()).buffer.from_bytes(content)

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        """Return several ranges."""
        asked = (self.get(key, prototype, byte_range) for key, byte_range in key_ranges)
        return list(await asyncio.gather(*asked))

    async def exists(self, key: str) -> bool:
        """Tell whether an object was listed."""
        return key in self.objects

    async def set(self, key: str, value: Buffer) -> None:
        """Refuse to write."""
        del value
        msg = f"{self.source.uri}/{key} is only read"
        raise NotImplementedError(msg)

    async def delete(self, key: str) -> None:
        """Refuse to delete."""
        msg = f"{self.source.uri}/{key} is only read"
        raise NotImplementedError(msg)

    async def list(self) -> AsyncIterator[str]:
        """Yield all keys."""
        for key in self.objects:
            yield key

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """Yield the keys that begin so."""
        for key in self.objects:
            if key.startswith(prefix):
                yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """Yield the names of objects and folders in a folder."""
        above = f"{prefix.rstrip('/')}/" if prefix.rstrip("/") else ""
        below = (key.removeprefix(above) for key in self.objects if key.startswith(above))
        for name in dict.fromkeys(key.partition("/")[0] for key in below):
            yield name


def _range(num_bytes: int, asked: Any) -> tuple[int, int]:
    match asked:
        case RangeByteRequest(start, end):
            return start, min(end, num_bytes)
        case OffsetByteRequest(offset):
            return offset, num_bytes
        case SuffixByteRequest(suffix):
            return max(0, num_bytes - suffix), num_bytes
    return 0, num_bytes
