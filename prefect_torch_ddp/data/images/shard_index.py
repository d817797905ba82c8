"""The index of tar shards: where each sample lies, and how it is recognised."""

import io
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from typing import NamedTuple

from prefect_torch_ddp.data.images.columns import TextColumn, encoded, read_rows, write_rows
from prefect_torch_ddp.errors import StorageError
from prefect_torch_ddp.storage.keys import check_key

FORMAT = "prefect-torch-ddp/tar-shards/1"
INDEX_NAME = "shards.jsonl.gz"


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
        """Sorted; a sample's label is the position of its key's first folder in it."""
        self._keys, self._shards = TextColumn(), array("L")
        self._starts, self._sizes, self._digests = array("Q"), array("Q"), array("Q")
        for sample in samples:
            self._append(sample)

    def _append(self, sample: PackedSample) -> None:
        if len(self) and self._keys.encoded(len(self) - 1) >= encoded(sample.key):
            msg = "its keys aren't sorted"
            raise ValueError(msg)
        if sample.shard >= len(self.shards):
            msg = f"sample {sample.key} lies in shard {sample.shard} of {len(self.shards)}"
            raise ValueError(msg)
        self._keys.append(sample.key)
        self._shards.append(sample.shard)
        self._starts.append(sample.start)
        self._sizes.append(sample.num_bytes)
        self._digests.append(int(sample.digest, 16))

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, number: int) -> PackedSample:
        """Return the sample of this number in the order of the keys."""
        return PackedSample(
            self._keys[number],
            self._shards[number],
            self._starts[number],
            self._sizes[number],
            f"{self._digests[number]:016x}",
        )

    def find(self, key: str) -> PackedSample | None:
        """Return the sample of a key, None where there is none."""
        number = self._first_from(key)
        sample = self[number] if number < len(self) else None
        return sample if sample is not None and sample.key == key else None

    def beginning_with(self, prefix: str) -> Iterator[PackedSample]:
        """Yield the samples whose key begins so, sorted by key."""
        for number in range(self._first_from(prefix), len(self)):
            sample = self[number]
            if not sample.key.startswith(prefix):
                return
            yield sample

    def _first_from(self, key: str) -> int:
        return bisect_left(range(len(self)), encoded(key), key=self._keys.encoded)

    def dump(self) -> bytes:
        """Return gzipped JSON lines: what is common, then columns, sorted by key."""
        file = io.BytesIO()
        head = {"format": FORMAT, "shards": self.shards, "classes": self.classes}
        write_rows(file, head, PackedSample._fields, map(self.__getitem__, range(len(self))))
        return file.getvalue()

    @classmethod
    def load(cls, data: bytes, where: str) -> "ShardIndex":
        """Read what `dump` returned.

        Args:
            data: the whole object.
            where: what to call it in an error.

        Raises:
            StorageError: it is damaged, or of another version.
        """
        try:
            head, rows = read_rows(io.BytesIO(data), PackedSample._fields)
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
