"""Packing small objects into tar shards: equal sources give equal bytes, in bounded memory."""

import re
import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import cast

from prefect_torch_ddp.data.images.columns import encoded
from prefect_torch_ddp.data.images.listing import ImageIndex, index_images, list_dataset
from prefect_torch_ddp.data.images.location import Location, readable_at
from prefect_torch_ddp.data.images.packed import (
    INDEX_NAME,
    PackedObjects,
    PackedSample,
    ShardIndex,
    digest_of,
)
from prefect_torch_ddp.errors import StorageError
from prefect_torch_ddp.storage.locate import storage_from_uri
from prefect_torch_ddp.storage.names import RESERVED_PART
from prefect_torch_ddp.storage.protocol import (
    ObjectPart,
    Readable,
    Storage,
)

SHARD_BYTES = 64 * 2**20
NUM_AT_ONCE = 64
"""Objects read side by side, and held in memory."""


def pack_shards(  # noqa: PLR0913 - where from, where to, and the choices by name
    source: Location,
    to: Storage | str | Path,
    *,
    source_prefix: str = "",
    prefix: str = "",
    shard_bytes: int = SHARD_BYTES,
    shuffle_seed: int | None = None,
    is_valid: Callable[[str], bool] | None = None,
) -> PackedObjects:
    """Pack an image folder, objects called class/name, into tar shards with an index.

    In a shard a sample is two files, as WebDataset wants them: `000000042.jpg` and
    `000000042.cls`, its label as text. The index, `shards.jsonl.gz`, is removed first and
    written last: without it there are no shards for a reader. Memory: a shard, 64 objects, and
    some 300 bytes for each.

    Args:
        source: where the images are: a folder, an `s3://` URI or a storage, such as
            `ctx.source`.
        to: a folder, for instance `ctx.data` in `prepare`, an `s3://` URI or a storage.
        source_prefix: the folder in `source` whose sub-folders are the classes, such as
            `train`.
        prefix: the folder in `to` for shards and index.
        shard_bytes: about how large a shard becomes.
        shuffle_seed: pack in an order of this seed, for readers that take shards as streams;
            None: sorted, so that reading in order, as an evaluation does, reads neighbours. Our
            own readers take any order from both.
        is_valid: tells from a key whether it is packed; None: by torchvision's endings of
            images.

    Returns:
        What reads the packed objects by their names.

    Raises:
        NoImagesError: there is nothing to pack, or a class without images.
        InvalidParamsError: an argument can't work.
        StorageError: an object is gone, was changed meanwhile or can't be read, or a shard
            can't be written; names it.
    """
    reads, _ = readable_at(source)
    storage = storage_from_uri(str(to)) if isinstance(to, str | Path) else to
    source_prefix, prefix = _with_slash(source_prefix), _with_slash(prefix)
    listed = (
        replace(found, key=found.key.removeprefix(source_prefix))
        for found in list_dataset(reads, source_prefix)
    )
    images = index_images(listed, f"{reads.uri}/{source_prefix}", is_valid)
    storage.delete(prefix + INDEX_NAME)
    samples: list[PackedSample] = []
    names: list[str] = []
    for shard in _filled(images, shuffle_seed, reads, source_prefix, shard_bytes, samples):
        names.append(f"shard-{len(names):06d}.tar")
        storage.write(prefix + names[-1], memoryview(shard))
    samples.sort(key=lambda sample: encoded(sample.key))
    storage.write(prefix + INDEX_NAME, ShardIndex(names, images.classes, samples).dump())
    _clean_up(storage, prefix, names)
    return PackedObjects(cast("Readable", storage), prefix)


def _clean_up(storage: Storage, prefix: str, names: Sequence[str]) -> None:
    """Remove an earlier packing's shards: a reader of all tar files would take them too."""
    own = {prefix + name for name in names}
    for other in list(storage.list(f"{prefix}shard-")):
        if other.key.endswith(".tar") and other.key not in own:
            storage.delete(other.key)
    if storage.local_folder is not None:
        with suppress(OSError):  # it may be a folder that is published as it is
            (storage.local_folder / RESERVED_PART).rmdir()


def _with_slash(folder: str) -> str:
    return f"{folder.strip('/')}/" if folder.strip("/") else ""


def _order(images: ImageIndex, shuffle_seed: int | None) -> Sequence[int]:
    numbers = range(len(images.objects))
    if shuffle_seed is None:
        return numbers

    def digest(number: int) -> str:  # the same on every machine, with every version of a library
        return digest_of(encoded(f"{shuffle_seed}/{images.objects[number].key}"))

    return sorted(numbers, key=digest)


def _filled(  # noqa: PLR0913, PLR0917 - of one caller
    images: ImageIndex,
    shuffle_seed: int | None,
    source: Readable,
    source_prefix: str,
    shard_bytes: int,
    samples: list[PackedSample],
) -> Iterator[bytearray]:
    """Yield each shard when it is full; add what the index needs to `samples`."""
    number, shard = 0, bytearray()
    order = iter(_order(images, shuffle_seed))
    while batch := list(islice(order, NUM_AT_ONCE)):
        found = [images.objects[i] for i in batch]
        parts = [ObjectPart(source_prefix + f.key, f.num_bytes, etag=f.etag) for f in found]
        for i, one, data in zip(batch, found, source.read_many(parts), strict=True):
            if isinstance(data, StorageError):
                raise data
            name, label = f"{len(samples):09d}", str(images.targets[i]).encode()
            files = _member(name + _ending(one.key), data) + _member(f"{name}.cls", label)
            if shard and len(shard) + len(files) > shard_bytes:
                yield _closed(shard)
                number, shard = number + 1, bytearray()
            start = len(shard) + tarfile.BLOCKSIZE
            samples.append(PackedSample(one.key, number, start, len(data), digest_of(data)))
            shard += files
    yield _closed(shard)


def _ending(key: str) -> str:
    """Return what readers choose a decoder by; a label has one that no sample may have."""
    ending = PurePosixPath(key).suffix.lower()
    return ending if re.fullmatch(r"\.[a-z0-9]{1,16}", ending) and ending != ".cls" else ".bin"


def _member(name: str, data: bytes) -> bytes:
    """Return a file as it stands in a tar: without a time or owner, which would differ."""
    head = tarfile.TarInfo(name)
    head.size = len(data)
    return head.tobuf(tarfile.GNU_FORMAT) + data + bytes(-len(data) % tarfile.BLOCKSIZE)


def _closed(shard: bytearray) -> bytearray:
    """Add the end of a tar, filled up to a whole record, as tar does."""
    shard += bytes(2 * tarfile.BLOCKSIZE)
    shard += bytes(-len(shard) % tarfile.RECORDSIZE)
    return shard
