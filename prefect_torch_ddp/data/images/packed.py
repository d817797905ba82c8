"""Objects packed into tar shards: read one by one under their old names, every byte checked."""

import io
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from itertools import pairwise, starmap
from operator import lt
from typing import Any, NamedTuple

from prefect_torch_ddp.data.images.columns import Columns, encoded, read_rows, write_rows
from prefect_torch_ddp.errors import (
    InvalidParamsError,
    ObjectChangedError,
    ObjectNotFoundError,
    StorageError,
)
from prefect_torch_ddp.storage.names import check_key
from prefect_torch_ddp.storage.protocol import (
    Contents,
    ListedObject,
    ObjectPart,
    Readable,
    Storage,
)

FORMAT = "prefect-torch-ddp/tar-shards/1"
INDEX_NAME = "shards.jsonl.gz"
LARGEST_GAP_BYTES = 8 * 1024
"""Read and thrown away between two samples: a label, headers and filling are 2 kB, and a
request costs as much CPU as 200 kB."""
LARGEST_SPAN_BYTES = 2**20
"""So that a batch is still read over several connections."""


class PackedSample(NamedTuple):
    """One sample, as the index records it."""

    key: str
    """What it was called where it came from: class/name."""
    shard: int
    """Number of its shard, from 0."""
    start: int
    """Of its content within the shard, in bytes."""
    num_bytes: int
    digest: str
    """The first 16 hexadecimal digits of its SHA-256."""

    @property
    def stop(self) -> int:
        """Where its content ends within the shard."""
        return self.start + self.num_bytes


class ShardIndex:
    """All samples, sorted by key. Takes some 60 bytes a sample, and its key.

    Raises:
        ValueError: they aren't sorted by key, in UTF-8, as S3 sorts, or lie in no shard.
    """

    def __init__(
        self, shards: Sequence[str], classes: Sequence[str], samples: Iterable[PackedSample] = ()
    ) -> None:
        self.shards = tuple(shards)
        """Their keys, beside the index."""
        self.classes = tuple(classes)
        """Sorted; a sample's label is the position of its key's first folder in it."""
        kinds = (str, int, int, int, str)
        self._samples = Columns(PackedSample, kinds)
        for sample in samples:
            self._samples.append(sample)
        self._keys, shard_of, *_ = self._samples.columns
        if not all(starmap(lt, pairwise(map(self._keys.encoded, range(len(self)))))):
            msg = "its keys aren't sorted"
            raise ValueError(msg)
        if any(min(numbers, default=0) < 0 for numbers in self._samples.columns[1:4]):
            msg = "it has negative numbers"
            raise ValueError(msg)
        if max(shard_of, default=-1) >= len(self.shards):
            msg = f"a sample lies in shard {max(shard_of)} of {len(self.shards)}"
            raise ValueError(msg)

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, number: int) -> PackedSample:
        """Return the sample of this number in the order of the keys."""
        return self._samples[number]

    def find(self, key: str) -> PackedSample | None:
        """Return the sample of a key, None where there is none."""
        sample = next(self.beginning_with(key), None)
        return sample if sample is not None and sample.key == key else None

    def beginning_with(self, prefix: str) -> Iterator[PackedSample]:
        """Yield the samples whose key begins so, sorted by key."""
        first = bisect_left(range(len(self)), encoded(prefix), key=self._keys.encoded)
        for number in range(first, len(self)):
            sample = self[number]
            if not sample.key.startswith(prefix):
                return
            yield sample

    def dump(self) -> bytes:
        """Return gzipped JSON lines: what is common, then columns, sorted by key."""
        file = io.BytesIO()
        head = {"format": FORMAT, "shards": self.shards, "classes": self.classes}
        write_rows(file, head, PackedSample._fields, self._samples)
        return file.getvalue()

    @classmethod
    def load(cls, data: bytes, where: str) -> "ShardIndex":
        """Read what `dump` returned; errors call it `where`.

        Raises:
            StorageError: it is damaged, or of another version.
        """
        try:
            rows = read_rows(io.BytesIO(data), PackedSample._fields)
            head = next(rows)
            if head["format"] != FORMAT:
                msg = (
                    f"{where} is of the format {head['format']}, and this version reads {FORMAT}; "
                    "pack the shards again"
                )
                raise StorageError(msg)
            shards = [check_key(key) for key in head["shards"]]
            return cls(shards, head["classes"], (PackedSample(*row) for row in rows))
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            msg = f"{where} is damaged ({error}); pack the shards again"
            raise StorageError(msg) from error


def digest_of(data: bytes) -> str:
    """Return the digest by which a sample is recognised."""
    return sha256(data).hexdigest()[:16]


@dataclass(frozen=True)
class PackedObjects(Readable):
    """The objects in a folder of shards, under the names that they had before packing.

    `read_many` reads a range of a shard for each. A dataset over it has the classes, samples
    and order that it has over the unpacked objects. Pickles small: another process reads the
    index again, and a sample that isn't the one listed is an `ObjectChangedError`.
    """

    storage: Readable
    prefix: str = ""
    """The shards' folder in the storage: empty, or ends with a slash."""

    @property
    def uri(self) -> str:
        """The shards' folder as a person would write it."""
        return f"{self.storage.uri.rstrip('/')}/{self.prefix}".rstrip("/")

    @property
    def identity(self) -> str:
        """The folder's, with the storage's endpoint."""
        return f"{self.uri} of {self.storage.identity}"

    @cached_property
    def index(self) -> ShardIndex:
        """The index, read when it is first needed.

        Raises:
            ObjectNotFoundError: there is none, so no shards were packed here, or not to the
                end.
            StorageError: it is damaged, or can't be read.
            InvalidParamsError: the storage isn't one that holds shards.
        """
        if not isinstance(self.storage, Storage):
            kind = type(self.storage).__name__
            msg = f"shards are read from a directory or S3, and got {kind}; a cache goes in front"
            raise InvalidParamsError(msg)
        try:
            data = self.storage.read(self.prefix + INDEX_NAME)
        except ObjectNotFoundError as error:
            msg = (
                f"there are no shards in {self.uri}: no {INDEX_NAME}, which pack_shards writes last"
            )
            raise ObjectNotFoundError(msg) from error
        return ShardIndex.load(data, f"{self.uri}/{INDEX_NAME}")

    def list_objects(self, prefix: str) -> Iterator[ListedObject]:
        """Yield every packed object whose old name begins with `prefix`, sorted by name."""
        for sample in self.index.beginning_with(prefix):
            yield ListedObject(sample.key, sample.num_bytes, sample.digest)

    def read_many(self, parts: Sequence[ObjectPart]) -> Contents:
        """Read all parts; what isn't the sample that was packed is an error that names it."""
        found = [self._find(part) for part in parts]
        samples = [sample for sample in found if isinstance(sample, PackedSample)]
        read = iter(self._read(samples))
        return [
            self._checked(part, sample, next(read)) if isinstance(sample, PackedSample) else sample
            for part, sample in zip(parts, found, strict=True)
        ]

    def __getstate__(self) -> dict[str, Any]:
        """Leave the index out: worker processes that are started anew read it themselves."""
        return {"storage": self.storage, "prefix": self.prefix}

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
        contents: Contents = [b""] * len(samples)
        spans, parts = spans_of(samples), []
        for span in spans:
            first, stop = samples[span[0]], max(samples[number].stop for number in span)
            key = self.prefix + self.index.shards[first.shard]
            parts.append(ObjectPart(key, stop - first.start, first.start))
        alone: dict[int, ObjectPart] = {}
        for span, part, data in zip(spans, parts, self.storage.read_many(parts), strict=True):
            for number in span:
                sample = samples[number]
                if isinstance(data, bytes):
                    begin = sample.start - (part.start or 0)
                    contents[number] = data[begin : begin + sample.num_bytes]
                elif len(span) > 1:  # each by its own, to name the one that can't be read
                    alone[number] = ObjectPart(part.key, sample.num_bytes, sample.start)
                else:
                    contents[number] = data
        if alone:  # side by side: each has its own tries
            again = self.storage.read_many(list(alone.values()))
            for number, data in zip(alone, again, strict=True):
                contents[number] = data
        return contents

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
    if not isinstance(storage, Storage):
        return None
    packed = PackedObjects(storage, prefix)
    try:
        _ = packed.index
    except ObjectNotFoundError:
        return None
    return packed


def spans_of(samples: Sequence[PackedSample]) -> list[list[int]]:
    """Return which samples are read by one request each: neighbours, by their positions."""
    spans: list[list[int]] = []
    begin = end = 0
    for number in sorted(range(len(samples)), key=lambda i: (samples[i].shard, samples[i].start)):
        sample = samples[number]
        if (
            spans
            and samples[spans[-1][0]].shard == sample.shard
            and sample.start - end <= LARGEST_GAP_BYTES
            and sample.stop - begin <= LARGEST_SPAN_BYTES
        ):
            spans[-1].append(number)
            end = max(end, sample.stop)  # the same sample may be asked for twice
        else:
            spans.append([number])
            begin, end = sample.start, sample.stop
    return spans
