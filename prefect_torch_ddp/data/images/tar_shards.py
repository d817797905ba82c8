"""Packing small objects into tar shards: equal sources give equal bytes, in bounded memory."""

import re
import tarfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
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
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.storage.keys import RESERVED_PART
from prefect_torch_ddp.storage.locate import storage_from_uri
from prefect_torch_ddp.storage.protocol import (
    ListedObject,
    ObjectPart,
    Readable,
    ReadsMany,
    Storage,
)

SHARD_BYTES = 64 * 2**20
BATCH_BYTES, BATCH_OBJECTS = 16 * 2**20, 256


@dataclass(frozen=True, slots=True)
class _Planned:
    """Where an object goes: known before anything is read, since a listing tells the sizes."""

    found: ListedObject
    name: str
    """Within the tar, without its ending."""
    label: int
    shard: int
    start: int


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
    written last: without it there are no shards for a reader. Memory: three shards, and some
    300 bytes an object.

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
    shards = _filled(_plan(images, shard_bytes, shuffle_seed), reads, source_prefix, samples)
    names = _written(shards, storage, prefix)
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
    if isinstance(storage, DirectoryStorage):
        with suppress(OSError):  # it may be a folder that is published as it is
            (storage.root / RESERVED_PART).rmdir()


def _with_slash(folder: str) -> str:
    return f"{folder.strip('/')}/" if folder.strip("/") else ""


def _plan(images: ImageIndex, shard_bytes: int, shuffle_seed: int | None) -> Iterator[_Planned]:
    shard, offset = 0, 0
    for nth, number in enumerate(_order(images, shuffle_seed)):
        found, label = images.objects[number], images.targets[number]
        num_bytes = 2 * tarfile.BLOCKSIZE + _padded(found.num_bytes) + _padded(len(str(label)))
        if offset and offset + num_bytes > shard_bytes:
            shard, offset = shard + 1, 0
        yield _Planned(found, f"{nth:09d}", label, shard, offset + tarfile.BLOCKSIZE)
        offset += num_bytes


def _order(images: ImageIndex, shuffle_seed: int | None) -> Sequence[int]:
    numbers = range(len(images.objects))
    if shuffle_seed is None:
        return numbers

    def digest(number: int) -> str:  # the same on every machine, with every version of a library
        return digest_of(encoded(f"{shuffle_seed}/{images.objects.keys[number]}"))

    return sorted(numbers, key=digest)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE


def _filled(
    planned: Iterator[_Planned],
    source: ReadsMany,
    source_prefix: str,
    samples: list[PackedSample],
) -> Iterator[bytearray]:
    """Yield each shard when it is full; add what the index needs to `samples`."""
    number, shard = 0, bytearray()
    for batch in _batches(planned):
        found = [item.found for item in batch]
        parts = [ObjectPart(source_prefix + f.key, f.num_bytes, etag=f.etag) for f in found]
        for item, data in zip(batch, source.read_many(parts), strict=True):
            if isinstance(data, StorageError):
                raise data
            if item.shard != number:
                yield _closed(shard)
                number, shard = item.shard, bytearray()
            shard += _member(item.name + _ending(item.found.key), data)
            assert len(shard) - _padded(len(data)) == item.start, "the plan and the tar differ"
            shard += _member(f"{item.name}.cls", str(item.label).encode())
            samples.append(
                PackedSample(item.found.key, item.shard, item.start, len(data), digest_of(data))
            )
    yield _closed(shard)


def _written(shards: Iterator[bytearray], storage: Storage, prefix: str) -> list[str]:
    """Write each shard while the next is read; return their names."""
    names: list[str] = []
    writing: Future[None] | None = None
    with ThreadPoolExecutor(1, "pack-shards") as pool:
        for shard in shards:
            if writing is not None:
                writing.result()
            names.append(f"shard-{len(names):06d}.tar")
            writing = pool.submit(storage.write, prefix + names[-1], memoryview(shard))
        if writing is not None:
            writing.result()
    return names


def _ending(key: str) -> str:
    """Return what readers choose a decoder by; a label has one that no sample may have."""
    ending = PurePosixPath(key).suffix.lower()
    return ending if re.fullmatch(r"\.[a-z0-9]{1,16}", ending) and ending != ".cls" else ".bin"


def _batches(planned: Iterator[_Planned]) -> Iterator[list[_Planned]]:
    batch: list[_Planned] = []
    num_bytes = 0
    for item in planned:
        if batch and (
            len(batch) == BATCH_OBJECTS or num_bytes + item.found.num_bytes > BATCH_BYTES
        ):
            yield batch
            batch, num_bytes = [], 0
        batch.append(item)
        num_bytes += item.found.num_bytes
    if batch:
        yield batch


def _member(name: str, data: bytes) -> bytes:
    """Return a file as it stands in a tar: without a time or owner, which would differ."""
    head = tarfile.TarInfo(name)
    head.size = len(data)
    return head.tobuf(tarfile.GNU_FORMAT) + data + bytes(_padded(len(data)) - len(data))


def _closed(shard: bytearray) -> bytearray:
    """Add the end of a tar, filled up to a whole record, as tar does."""
    shard += bytes(2 * tarfile.BLOCKSIZE)
    shard += bytes(-len(shard) % tarfile.RECORDSIZE)
    return shard
