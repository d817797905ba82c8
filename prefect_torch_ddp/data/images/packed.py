"""Owns how objects that were packed into tar shards are read: one by one, by their old names,
each byte checked.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from prefect_torch_ddp.data.images.cache import content_id
from prefect_torch_ddp.data.images.shard_index import (
    INDEX_NAME,
    PackedSample,
    ShardIndex,
    Span,
    digest_of,
    spans_of,
)
from prefect_torch_ddp.errors import ObjectChangedError, ObjectNotFoundError, StorageError
from prefect_torch_ddp.storage.protocol import (
    Contents,
    ListedObject,
    ObjectPart,
    ReadsMany,
    Storage,
)


class HoldsShards(ReadsMany, Protocol):
    """What shards can be read from: a directory, or S3."""

    @property
    def uri(self) -> str:
        """The root as a person would write it."""
        ...


@dataclass(frozen=True)
class PackedObjects:
    """The objects in a folder of shards, under the names that they had before; `read_many`
    reads a range of a shard for each.

    A dataset over it has the classes, samples and order that it has over the unpacked objects.
    Pickles small: another process reads the index again, and a sample that isn't the one listed
    is an `ObjectChangedError`.
    """

    storage: HoldsShards
    prefix: str = ""
    """The shards' folder in the storage: empty, or ends with a slash."""
    _loaded: list[ShardIndex] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def uri(self) -> str:
        """The shards' folder as a person would write it."""
        return f"{self.storage.uri.rstrip('/')}/{self.prefix}".rstrip("/")

    @property
    def content_id(self) -> str:
        """What a cache tells its entries by."""
        return f"shards in {self.prefix!r} of {content_id(self.storage)}"

    @property
    def index(self) -> ShardIndex:
        """The index, read when it is first needed.

        Raises:
            ObjectNotFoundError: there is none, so no shards were packed here, or not to the
                end.
            StorageError: it is damaged, or can't be read.
        """
        if not self._loaded:
            self._loaded.append(self._load())
        return self._loaded[0]

    def list_objects(self, prefix: str) -> Iterator[ListedObject]:
        """Yield every packed object whose old name begins with `prefix`, sorted by name."""
        for sample in self.index.beginning_with(prefix):
            yield ListedObject(sample.key, sample.num_bytes, sample.digest)

    def read_many(self, parts: Sequence[ObjectPart]) -> Contents:
        """Read all parts; a value that isn't what was packed is an error that names shard and
        sample.
        """
        found = [self._find(part) for part in parts]
        samples = [sample for sample in found if isinstance(sample, PackedSample)]
        contents = iter(self._read(samples))
        return [
            sample
            if isinstance(sample, StorageError)
            else self._checked(part, sample, next(contents))
            for part, sample in zip(parts, found, strict=True)
        ]

    def __getstate__(self) -> dict[str, Any]:
        """Leave the index out: worker processes that are started anew read it themselves."""
        return {"storage": self.storage, "prefix": self.prefix, "_loaded": []}

    def _load(self) -> ShardIndex:
        text = self._index_text()
        if text is None:
            msg = f"there are no shards in {self.uri}: no {INDEX_NAME}, which pack_shards writes at its end"
            raise ObjectNotFoundError(msg)
        return ShardIndex.load(text, f"{self.uri}/{INDEX_NAME}")

    def _index_text(self) -> bytes | None:
        key = self.prefix + INDEX_NAME
        if isinstance(
            self.storage, Storage
        ):  # which takes no right to list, and works where nothing can be listed
            try:
                return self.storage.read(key)
            except ObjectNotFoundError:
                return None
        listed = next((found for found in self.storage.list_objects(key) if found.key == key), None)
        if listed is None:
            return None
        (text,) = self.storage.read_many([ObjectPart(key, listed.num_bytes, etag=listed.etag)])
        if isinstance(text, StorageError):
            raise text
        return text

    def _read(self, samples: Sequence[PackedSample]) -> Contents:
        """Read the samples' ranges, neighbours by one request; where that fails, each by its
        own, to tell which one it is.
        """
        spans = spans_of(samples)
        contents: Contents = [b""] * len(samples)
        single: list[int] = []
        for span, data in zip(
            spans, self.storage.read_many([self._part(span) for span in spans]), strict=True
        ):
            if isinstance(data, StorageError) and len(span.members) > 1:
                single += span.members
                continue
            for place in span.members:
                begin = samples[place].start - span.start
                contents[place] = (
                    data
                    if isinstance(data, StorageError)
                    else data[begin : begin + samples[place].num_bytes]
                )
        if single:
            parts = [
                ObjectPart(self._shard(s.shard), s.num_bytes, s.start)
                for s in (samples[place] for place in single)
            ]
            for place, data in zip(single, self.storage.read_many(parts), strict=True):
                contents[place] = data
        return contents

    def _part(self, span: Span) -> ObjectPart:
        return ObjectPart(self._shard(span.shard), span.num_bytes, span.start)

    def _shard(self, number: int) -> str:
        return self.prefix + self.index.shards[number]

    def _find(self, part: ObjectPart) -> PackedSample | StorageError:
        sample = self.index.find(part.key)
        if sample is None:
            return ObjectNotFoundError(f"there is no {part.key} in the shards of {self.uri}")
        if part.etag is not None and part.etag != sample.digest:
            return ObjectChangedError(
                f"{part.key} in the shards of {self.uri} isn't the one that was listed: they were packed again; start anew"
            )
        return sample

    def _checked(
        self, part: ObjectPart, sample: PackedSample, data: bytes | StorageError
    ) -> bytes | StorageError:
        if isinstance(data, StorageError):
            return type(data)(f"can't read sample {sample.key} from its shard: {data}")
        if digest_of(data) != sample.digest:
            shard = f"{self.storage.uri.rstrip('/')}/{self._shard(sample.shard)}"
            return ObjectChangedError(
                f"sample {sample.key} in {shard} (from byte {sample.start}) is damaged: its SHA-256 isn't the one that the index "
                "records; pack the shards again"
            )
        return data if part.start is None else data[part.start : part.start + part.num_bytes]


def packed_objects(storage: HoldsShards, prefix: str = "") -> PackedObjects | None:
    """Return the objects that were packed into shards in a folder of a storage, None where
    there are no shards.

    Raises:
        StorageError: their index is damaged, or can't be read.
    """
    packed = PackedObjects(storage, prefix)
    try:
        _ = packed.index
    except ObjectNotFoundError:
        return None
    return packed
