"""The read-through cache on local disk: what it gives is always what the storage has, whatever
happens to its files."""

import errno
import fcntl
import hashlib
import logging
import os
import resource
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from prefect_torch_ddp.data.images import cache
from prefect_torch_ddp.data.images.cache import CachedReads
from prefect_torch_ddp.data.images.listing import list_dataset
from prefect_torch_ddp.errors import InvalidParamsError, ObjectNotFoundError, StorageError
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.storage.protocol import ObjectPart, Readable
from prefect_torch_ddp.storage.s3.storage import S3Storage


@dataclass(frozen=True)
class Counted(DirectoryStorage):
    """A directory that notes in a file how often it was read from, also by other processes."""

    def read_many(self, parts):
        with (self.root.parent / "reads").open("a") as file:
            file.write("".join(f"{part.key}\n" for part in parts))
        return super().read_many(parts)

    @property
    def num_reads(self):
        path = self.root.parent / "reads"
        return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.fixture
def storage(tmp_path):
    """Give a storage with 20 objects of 1,000 bytes."""
    return filled(tmp_path / "objects")


def filled(root, num=20, num_bytes=1000, salt=""):
    """Make a storage with objects of different content."""
    root.mkdir(parents=True)
    for number in range(num):
        (root / f"{number:02}").write_bytes(content(f"{salt}{number}", num_bytes))
    return Counted(root)


def content(seed, num_bytes=1000):
    """Return bytes that no two seeds share."""
    return (hashlib.sha256(str(seed).encode()).digest() * (num_bytes // 32 + 1))[:num_bytes]


def parts_of(storage):
    """List a storage's objects as what reads them whole."""
    return [
        ObjectPart(found.key, found.num_bytes, etag=found.etag)
        for found in storage.list_objects("")
    ]


def entries(folder):
    """Find the files that hold objects."""
    return sorted(path for path in Path(folder).glob("v1/*/??/*") if not path.suffix)


def unfinished_in(folder):
    """Find the files that are being written."""
    return list(Path(folder).glob("v1/*/??/*.*"))


def size_of(folder):
    """Add up all files, half-written ones too."""
    total = 0
    for path in Path(folder).glob("v1/*/??/*"):
        with suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


WHOLE = [content(number) for number in range(20)]


@pytest.fixture(autouse=True)
def _new_process():
    """Let each test say its warnings, as a new process would."""
    cache.folder_of.cache_clear()
    cache._warn_once.cache_clear()


@pytest.fixture
def cached(storage, tmp_path):
    """Read the storage through a folder."""
    return CachedReads(storage, tmp_path / "cache")


def test_the_second_time_nothing_is_fetched(storage, cached):
    """Same bytes in the same order, from the folder; a new description of the same folder finds
    them too."""
    parts = parts_of(storage)
    assert isinstance(cached, Readable)
    assert cached.read_many(parts) == WHOLE
    assert storage.num_reads == 20
    assert cached.read_many(parts[::-1]) == WHOLE[::-1]
    again = CachedReads(Counted(storage.root), str(cached.folder))
    assert again.read_many(parts[3:5]) == WHOLE[3:5]
    assert storage.num_reads == 20
    assert list(cached.list_objects("1")) == list(storage.list_objects("1"))
    for _ in range(2):  # a failure isn't kept
        found, failed = cached.read_many([parts[0], ObjectPart("gone", 1000, etag="x")])
        assert found == content(0)
        assert isinstance(failed, ObjectNotFoundError)


def test_the_cache_answers_for_its_storage(tmp_path):
    """Where it is, with the endpoint; how others open it; and which folders it has, so that these
    are listed at the same time."""
    (tmp_path / "raw" / "a").mkdir(parents=True)
    (tmp_path / "raw" / "a" / "1").write_bytes(b"1")
    here = DirectoryStorage(tmp_path / "raw")
    there = S3Storage("bucket", endpoint_url="http://10.0.0.5:9000", anonymous=True)
    for storage in (here, there):
        cached = CachedReads(storage, tmp_path / "cache")
        asked = (storage.uri, storage.identity, storage.storage_options)
        assert (cached.uri, cached.identity, cached.storage_options) == asked
    levels = [Folders(tmp_path / "raw"), CachedReads(Folders(tmp_path / "raw"), tmp_path / "cache")]
    assert [list(each.list_level("")) for each in levels] == [["a/"], ["a/"]]
    assert [found.key for found in list_dataset(levels[1])] == ["a/1"]


class Folders(DirectoryStorage):
    """A directory that lists single folders, as a bucket can."""

    def list_level(self, prefix):
        yield from sorted({f"{found.key.split('/')[0]}/" for found in self.list_objects(prefix)})


def test_two_sources_never_mix(tmp_path, monkeypatch):
    """Equal keys, sizes and ETags of two folders, buckets or endpoints are different entries of
    one cache; credentials don't tell them apart."""
    for salt in ("one", "two", "one", "two"):
        root = tmp_path / salt / "x"
        storage = Counted(root) if root.exists() else filled(root, num=1, salt=salt)
        os.utime(root / "00", ns=(5, 5))
        cached = CachedReads(storage, tmp_path / "cache")
        assert cached.read_many(parts_of(storage)) == [content(f"{salt}0")]
    places = [S3Storage(*place) for place in (["bucket"], ["bucket2"], ["bucket", "a"])]
    places += [S3Storage("bucket", endpoint_url="http://a:9000")]
    names = {place.identity for place in places}
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://b:9000")
    plain = S3Storage("bucket").identity
    assert len(names | {plain}) == 5
    keys = S3Storage("bucket", access_key_id="key", secret_access_key="secret")
    assert keys.identity == plain


def test_a_read_of_nothing_is_the_storages(tmp_path):
    """It loads what the storage needs, and makes no folder for a cache that nobody reads yet."""

    class Refusing(DirectoryStorage):
        def read_many(self, parts):
            msg = "no such profile"
            raise StorageError(msg)

    with pytest.raises(StorageError, match="no such profile"):
        CachedReads(Refusing(tmp_path), tmp_path / "cache").read_many([])
    assert not (tmp_path / "cache").exists()


def test_what_has_no_etag_is_not_kept(storage, cached):
    """Nobody could tell whether it changed."""
    parts = [replace(part, etag=None) for part in parts_of(storage)]
    for _ in range(2):
        assert cached.read_many(parts) == WHOLE
    assert storage.num_reads == 40
    assert not entries(cached.folder)


DAMAGES = {
    "a flipped bit": lambda data, _: bytes([data[0] ^ 1]) + data[1:],
    "cut": lambda data, _: data[:700],
    "longer": lambda data, _: data + b"x",
    "another's": lambda _, other: other,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_fetched_again_with_a_warning(storage, cached, caplog, damage):
    """The bytes are right whatever happened to the file, and the warning names file and object."""
    parts = parts_of(storage)[:2]
    cached.read_many(parts[:1])
    (path,) = entries(cached.folder)
    cached.read_many(parts)
    (other,) = set(entries(cached.folder)) - {path}
    path.write_bytes(DAMAGES[damage](path.read_bytes(), other.read_bytes()))
    with caplog.at_level(logging.WARNING):
        assert cached.read_many(parts) == WHOLE[:2]
    (record,) = caplog.records
    assert str(path) in record.getMessage()
    assert "damaged: 00 is fetched again" in record.getMessage()
    assert cached.read_many(parts) == WHOLE[:2]
    assert storage.num_reads == 3


@pytest.mark.parametrize(
    "key", ["../../outside", "/etc/passwd", "a/../../../b", "a\0b", "\udc80", "x" * 5000]
)
def test_nothing_leaves_the_folder(tmp_path, key):
    """A file's name is a digest, whatever an object is called."""
    folder = cache.CacheFolder(str(tmp_path / "cache/v1"), "a storage", 10**6)
    part = ObjectPart(key, 3, etag=key)
    folder.put([(part, b"abc")])
    assert folder.get(part) == b"abc"
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]
    (path,) = entries(tmp_path / "cache")
    assert path.name.isalnum()
    assert path.stat().st_mode & 0o077 == 0, "others may read it"


def test_links_in_the_folder_are_not_followed(storage, cached, tmp_path):
    """A link at an entry's place leads nowhere, and what it points to stays."""
    parts = parts_of(storage)[:1]
    cached.read_many(parts)
    (path,) = entries(cached.folder)
    outside = tmp_path / "outside"
    outside.write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to(outside)
    assert cached.read_many(parts) == WHOLE[:1]
    assert storage.num_reads == 2
    assert outside.read_bytes()[:1000] == WHOLE[0]


def test_the_limit_holds_and_what_is_in_use_stays(storage, tmp_path, caplog):
    """A dataset larger than the cache: its first part stays and serves each epoch; one warning
    says that it is full."""
    limit = 10 * 1032 + 500
    cached, parts = CachedReads(storage, tmp_path / "cache", limit), parts_of(storage)
    for epoch in range(1, 5):
        assert [data for part in parts for data in cached.read_many([part])] == WHOLE
        assert size_of(tmp_path / "cache") <= limit
        assert storage.num_reads == 20 + (epoch - 1) * 10
    assert len(entries(tmp_path / "cache")) == 10
    assert ["is full" in record.getMessage() for record in caplog.records] == [True]


def test_what_was_not_used_for_a_day_makes_room(storage, tmp_path):
    """Entries of a source in use go too when nobody reads them any more, such as those of
    objects that changed."""
    limit = 21 * 1032
    cached = CachedReads(storage, tmp_path / "cache", limit)
    cached.read_many(parts_of(storage))
    for path in entries(tmp_path / "cache"):
        os.utime(path, (time.time() - 30 * 3600,) * 2)
    cached.read_many(parts_of(storage)[:5])  # these are used: their time is renewed
    for number in range(20):
        (storage.root / f"{number:02}").write_bytes(content(f"new{number}"))
    cached.read_many(parts_of(storage)[:10])
    kept = [path.read_bytes()[:1000] for path in entries(tmp_path / "cache")]
    assert all(content(number) in kept for number in range(5))
    assert sum(content(f"new{number}") in kept for number in range(10)) == 10
    assert size_of(tmp_path / "cache") <= limit


def read_on(cached, storage, caplog, *words):
    """Read three times: everything is right, and one warning says why the cache can't help."""
    for _ in range(3):
        assert cached.read_many(parts_of(storage)) == WHOLE
    (record,) = caplog.records
    assert all(word in record.getMessage() for word in words)


def test_a_full_disk_costs_the_cache_and_not_the_reading(storage, cached, caplog):
    """Reads continue, one warning says why, and no half-written file stays."""
    cached.read_many(parts_of(storage)[:1])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, before[1]))
    try:
        read_on(cached, storage, caplog, os.strerror(errno.EFBIG), "reading continues without it")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert len(entries(cached.folder)) == 1
    assert not unfinished_in(cached.folder)


def test_a_disk_that_is_nearly_full_is_left_alone(storage, cached, caplog, monkeypatch):
    """The cache leaves room for others: checkpoints may lie on the same disk."""
    monkeypatch.setattr(cache, "KEPT_FREE_PART", 1)
    monkeypatch.setattr(cache, "KEPT_FREE_BYTES", 2**62)
    read_on(cached, storage, caplog, "nearly full")
    assert not entries(cached.folder)


def test_a_folder_that_can_not_be_used_costs_one_warning(storage, cached, caplog):
    """Reads continue if a file has the folder's path."""
    cached.folder.write_text("a file")
    read_on(cached, storage, caplog, str(cached.folder))


class Lookalike:
    """Has a method of storages by chance."""

    def read_many(self, parts: object) -> object:
        return parts


BAD = [
    ({"max_bytes": 0}, "is 0"),
    ({"max_bytes": -1}, "is -1"),
    ({"storage": object()}, "object"),
    ({"storage": Lookalike()}, "from a Lookalike; give a storage"),
    ({"storage": "s3://bucket/raw"}, "from a str; give a storage, such as"),
    ({"folder": "~nobody_here/x"}, "home"),
]


@pytest.mark.parametrize(("bad", "named"), BAD)
def test_what_can_not_work_is_refused(tmp_path, bad, named):
    """Before anything is read, by an error that names the value."""
    with pytest.raises(InvalidParamsError, match=named):
        CachedReads(**{"storage": DirectoryStorage(tmp_path), "folder": tmp_path / "cache", **bad})


def test_a_stopped_process_blocks_nobody(storage, cached):
    """A process is stopped while it holds the cache's count: others read on, and nothing is
    kept meanwhile."""
    parts = parts_of(storage)
    cached.read_many(parts[:1])
    with (cached.folder / "v1/count").open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert cached.read_many(parts) == WHOLE
        assert len(entries(cached.folder)) == 1
    cached.read_many(parts)
    assert len(entries(cached.folder)) == 20
