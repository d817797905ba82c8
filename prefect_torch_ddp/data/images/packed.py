"""Objects packed into tar shards: read one by one under their old names, every byte checked."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from prefect_torch_ddp.data.images.cache import content_id
from prefect_torch_ddp.data.images.shard_index import (
    INDEX_NAME,
    PackedSample,
    ShardIndex,
    digest_of,
)
from prefect_torch_ddp.errors import ObjectChangedError, ObjectNotFoundError, StorageError
from prefect_torch_ddp.storage.protocol import (
    Contents,
    ListedObject,
    ObjectPart,
    Readable,
    Storage,
)

LARGEST_GAP_BYTES = 8 * 1024
"""Read and thrown away between two samples: a label, headers and filling are 2 kB, and a
request costs as much CPU as 200 kB."""
LARGEST_SPAN_BYTES = 2**20
"""So that a batch is still read over several connections."""


@dataclass(frozen=True)
class PackedObjects:
    """The objects in a folder of shards, under the names that they had before packing.

    `read_many` reads a range of a shard for each. A dataset over it has the classes, samples
    and order that it has over the unpacked objects. Pickles small: another process reads the
    index again, and a sample that isn't the one listed is an `ObjectChangedError`.
    """

    storage: Readable
    prefix: str = ""
    """The shards' folder in the storage: empty, or ends with a slash."""
    _loaded: list[ShardIndex] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def uri(self) -> str:
        """The shards' folder as a person would write it."""
        return f"{self.storage.uri.rstrip('/')}/{self.prefix}".rstrip("/")

    @property
    def content_id(self) -> str:
        """What distinguishes this storage's entries in a cache."""
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
            self._loaded.append(ShardIndex.load(self._index_data(), f"{self.uri}/{INDEX_NAME}"))
        return self._loaded[0]

    def list_objects(self, prefix: str) -> Iterator[ListedObject]:
        """Yield every packed object whose old name begins with `prefix`, sorted by name."""
        for sample in self.index.beginning_with(prefix):
            yield ListedObject(sample.key, sample.num_bytes, sample.digest)

    def read_many(self, parts: Sequence[ObjectPart]) -> Contents:
        """Read all parts; what isn't the sample that was packed is an error that names it."""
        found = [self._find(part) for part in parts]
        contents = iter(self._read([one for one in found if isinstance(one, PackedSample)]))
        return [
            self._checked(part, one, next(contents)) if isinstance(one, PackedSample) else one
            for part, one in zip(parts, found, strict=True)
        ]

    def __getstate__(self) -> dict[str, Any]:
        """Leave the index out: worker processes that are started anew read it themselves."""
        return {"storage": self.storage, "prefix": self.prefix, "_loaded": []}

    def _index_data(self) -> bytes:
        key = self.prefix + INDEX_NAME
        none = ObjectNotFoundError(
            f"there are no shards in {self.uri}: no {INDEX_NAME}, which pack_shards writes last"
        )
        if isinstance(self.storage, Storage):  # takes no right to list
            try:
                return self.storage.read(key)
            except ObjectNotFoundError as error:
                raise none from error
        listed = next((found for found in self.storage.list_objects(key) if found.key == key), None)
        if listed is None:
            raise none
        (data,) = self.storage.read_many([ObjectPart(key, listed.num_bytes, etag=listed.etag)])
        if isinstance(data, StorageError):
            raise data
        return data

    def _find(self, part: ObjectPart) -> PackedSample | StorageError:
        sample = self.index.find(part.key)
        if sample is None:
            return ObjectNotFoundError(f"there is no {part.key} in the shards of {self.uri}")
        if part.etag is not None and part.etag != sample.digest:
            return ObjectChangedError(
                f"{part.key} in the shards of {self.uri} isn't the one that was listed: "
                "they were packed again; start anew"
            )
        return sample

    def _read(self, samples: Sequence[PackedSample]) -> Contents:
        """Read neighbours by one request; where that fails, each by its own, to name it."""
        contents: Contents = [b""] * len(samples)
        alone: list[int] = []
        spans = spans_of(samples)
        read = self.storage.read_many([self._part(span.shard, span.range) for span in spans])
        for span, data in zip(spans, read, strict=True):
            if isinstance(data, StorageError):
                contents[span.members[0]] = data
                alone += span.members if len(span.members) > 1 else []
                continue
            for number in span.members:
                begin = samples[number].start - span.range.start
                contents[number] = data[begin : begin + samples[number].num_bytes]
        if alone:
            parts = [
                self._part(samples[number].shard, _range_of(samples[number])) for number in alone
            ]
            for number, content in zip(alone, self.storage.read_many(parts), strict=True):
                contents[number] = content
        return contents

    def _part(self, shard: int, wanted: range) -> ObjectPart:
        return ObjectPart(self.prefix + self.index.shards[shard], len(wanted), wanted.start)

    def _checked(
        self, part: ObjectPart, sample: PackedSample, data: bytes | StorageError
    ) -> bytes | StorageError:
        if isinstance(data, StorageError):
            return type(data)(f"can't read sample {sample.key} from its shard: {data}")
        if digest_of(data) != sample.digest:
            return ObjectChangedError(
                f"sample {sample.key} in {self.uri}/{self.index.shards[sample.shard]} (from byte "
                f"{sample.start}) is damaged: its SHA-256 isn't the one that the index records; "
                "pack the shards again"
            )
        return data if part.start is None else data[part.start : part.start + part.num_bytes]


def packed_objects(storage: Readable, prefix: str = "") -> PackedObjects | None:
    """Return the objects packed in a folder of a storage, None where there are no shards.

    Raises:
        StorageError: their index is damaged, or can't be read.
    """
    packed = PackedObjects(storage, prefix)
    try:
        _ = packed.index
    except ObjectNotFoundError:
        return None
    return packed


@dataclass
class Span:
    """A range of a shard that holds some of the samples."""

    shard: int
    range: range
    members: list[int]
    """Their positions in the request."""


def spans_of(samples: Sequence[PackedSample]) -> list[Span]:
    """Return ranges that hold all samples, each sample in one, neighbours together."""
    spans: list[Span] = []
    for number in sorted(range(len(samples)), key=lambda i: (samples[i].shard, samples[i].start)):
        shard, own = samples[number].shard, _range_of(samples[number])
        last = spans[-1] if spans else None
        if (
            last is None
            or last.shard != shard
            or own.start - last.range.stop > LARGEST_GAP_BYTES
            or own.stop - last.range.start > LARGEST_SPAN_BYTES
        ):
            spans.append(Span(shard, own, [number]))
        else:  # the same sample may be asked for twice
            last.range = range(last.range.start, max(last.range.stop, own.stop))
            last.members.append(number)
    return spans


def _range_of(sample: PackedSample) -> range:
    return range(sample.start, sample.start + sample.num_bytes)
