"""Owns the index of tar shards: where each sample lies, and how it is recognised; compact in
memory, plain text in a storage.

Owns which samples of a shard are read by one request: neighbours, when a batch asks for them,
as an evaluation does. Pure.
"""

import gzip
import io
import json
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import islice, pairwise, starmap
from operator import lt
from typing import NamedTuple

from prefect_torch_ddp.errors import BadKeyError, StorageError
from prefect_torch_ddp.storage.keys import check_key

FORMAT = "prefect-torch-ddp/tar-shards/1"
INDEX_NAME = "shards.jsonl.gz"
CHUNK = 4096


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


class ShardIndex:
    """All samples, sorted by key. Takes some 40 bytes a sample, and its key."""

    def __init__(
        self, shards: Sequence[str], classes: Sequence[str], samples: Iterable[PackedSample] = ()
    ) -> None:
        """Take the samples in.

        Raises:
            ValueError: they aren't sorted by key, in UTF-8, as S3 sorts, or lie in no shard.
        """
        self.shards = tuple(shards)
        """Their keys, beside the index."""
        self.classes = tuple(classes)
        """Sorted; a sample's label is the place of its key's first folder in it."""
        self._keys = bytearray()
        self._ends = array("Q", [0])
        self._shards, self._starts, self._sizes, self._digests = (
            array("L"),
            array("Q"),
            array("Q"),
            array("Q"),
        )
        rest = iter(samples)
        while chunk := list(islice(rest, CHUNK)):
            self._take(*zip(*chunk, strict=True))

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._shards)

    def __getitem__(self, number: int) -> PackedSample:
        """Return the sample of this number in the order of the keys."""
        key = self._key(number).decode("utf-8", "surrogateescape")
        digest = f"{self._digests[number]:016x}"
        return PackedSample(
            key, self._shards[number], self._starts[number], self._sizes[number], digest
        )

    def find(self, key: str) -> PackedSample | None:
        """Return the sample of a key, None where there is none."""
        wanted = encoded(key)
        number = bisect_left(range(len(self)), wanted, key=self._key)
        return self[number] if number < len(self) and self._key(number) == wanted else None

    def beginning_with(self, prefix: str) -> Iterator[PackedSample]:
        """Yield the samples whose key begins so, sorted by key."""
        wanted = encoded(prefix)
        for number in range(bisect_left(range(len(self)), wanted, key=self._key), len(self)):
            if not self._key(number).startswith(wanted):
                return
            yield self[number]

    def dump(self) -> bytes:
        """Return gzipped JSON lines: what is common, then columns of some thousand samples
        each, sorted by key.
        """
        text = io.BytesIO()
        head = {
            "format": FORMAT,
            "num_samples": len(self),
            "shards": self.shards,
            "classes": self.classes,
        }
        with gzip.GzipFile(
            fileobj=text, mode="wb", mtime=0, compresslevel=6
        ) as file:  # no time: equal content, equal bytes
            file.write(json.dumps(head).encode() + b"\n")
            for first in range(0, len(self), CHUNK):
                samples = [self[number] for number in range(first, min(first + CHUNK, len(self)))]
                columns = dict(zip(PackedSample._fields, zip(*samples, strict=True), strict=True))
                file.write(json.dumps(columns, separators=(",", ":")).encode() + b"\n")
        return text.getvalue()

    @classmethod
    def load(cls, text: bytes, where: str) -> "ShardIndex":
        """Read what `dump` wrote.

        Args:
            text: the whole object.
            where: what to call it in an error.

        Raises:
            StorageError: it is damaged, or of another version.
        """
        try:
            with gzip.GzipFile(fileobj=io.BytesIO(text)) as file:
                head = json.loads(file.readline())
                if head["format"] != FORMAT:
                    msg = f"{where} is of the format {head['format']}, and this version reads {FORMAT}; pack the shards again"
                    raise StorageError(msg)
                index = cls([check_key(key) for key in head["shards"]], head["classes"])
                for line in file:
                    index._take(**json.loads(line))
            index._check(head["num_samples"])
        except (
            OSError,
            EOFError,
            ValueError,
            KeyError,
            TypeError,
            OverflowError,
            BadKeyError,
        ) as error:
            msg = f"{where} is damaged ({error}); pack the shards again"
            raise StorageError(msg) from error
        return index

    def _check(self, num_samples: int) -> None:
        if len(self) != num_samples:
            msg = f"it lists {len(self)} samples and announces {num_samples}"
            raise ValueError(msg)

    def _take(
        self,
        key: Sequence[str],
        shard: Sequence[int],
        start: Sequence[int],
        num_bytes: Sequence[int],
        digest: Sequence[str],
    ) -> None:
        """Take columns of samples in."""
        keys = [encoded(one) for one in key]
        last = [self._key(len(self) - 1)] if len(self) else []
        if not all(starmap(lt, pairwise([*last, *keys]))):
            msg = "its keys aren't sorted"
            raise ValueError(msg)
        if not len(keys) == len(shard) == len(start) == len(num_bytes) == len(digest) or max(
            shard
        ) >= len(self.shards):
            msg = "its columns don't fit each other, or the shards"
            raise ValueError(msg)
        self._keys += b"".join(keys)
        end = self._ends[-1]
        self._ends.extend([end := end + len(one) for one in keys])
        self._shards.extend(shard)
        self._starts.extend(start)
        self._sizes.extend(num_bytes)
        self._digests.extend([int(one, 16) for one in digest])

    def _key(self, number: int) -> bytes:
        return bytes(self._keys[self._ends[number] : self._ends[number + 1]])


def digest_of(data: bytes) -> str:
    """Return the digest by which a sample is recognised."""
    return sha256(data).hexdigest()[:16]


def encoded(key: str) -> bytes:
    """Return a key in the form that sorts as S3 does; also one from a file name that is no
    text.
    """
    return key.encode("utf-8", "surrogateescape")


LARGEST_GAP_BYTES = 8 * 1024
"""Read and thrown away between two samples: a label, headers and filling are 2 kB, and a
request costs as much CPU as 200 kB."""
LARGEST_SPAN_BYTES = 2**20
"""So that a batch is still read over several connections."""


@dataclass
class Span:
    """A range of a shard that holds some of the samples."""

    shard: int
    start: int
    end: int
    members: list[int] = field(default_factory=list)
    """Their places in what was asked for."""

    @property
    def num_bytes(self) -> int:
        """Its length."""
        return self.end - self.start

    def reaches(self, sample: PackedSample) -> bool:
        """Tell whether a sample behind it is near enough to be read along."""
        is_near = sample.shard == self.shard and sample.start - self.end <= LARGEST_GAP_BYTES
        return is_near and sample.start + sample.num_bytes - self.start <= LARGEST_SPAN_BYTES


def spans_of(samples: Sequence[PackedSample]) -> list[Span]:
    """Return ranges that hold all samples, each sample in one, neighbours together."""
    spans: list[Span] = []
    for place in sorted(
        range(len(samples)), key=lambda place: (samples[place].shard, samples[place].start)
    ):
        sample = samples[place]
        end = sample.start + sample.num_bytes
        if not spans or not spans[-1].reaches(sample):
            spans.append(Span(sample.shard, sample.start, end))
        span = spans[-1]
        span.end = max(span.end, end)  # the same sample may be asked for twice
        span.members.append(place)
    return spans
