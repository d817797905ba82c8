"""Packing an image folder into tar shards: whole, deterministic, readable by others, and never
a wrong sample."""

import gzip
import json
import os
import pickle
import random
import tarfile
from dataclasses import dataclass, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prefect_torch_ddp.data.images.cache import CachedReads
from prefect_torch_ddp.data.images.packed import (
    INDEX_NAME,
    PackedObjects,
    packed_objects,
)
from prefect_torch_ddp.data.images.tar_shards import pack_shards
from prefect_torch_ddp.errors import (
    InvalidParamsError,
    NoImagesError,
    ObjectChangedError,
    ObjectNotFoundError,
    StorageError,
)
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.storage.protocol import ObjectPart, Readable

ODD_NAMES = {
    "cat/2.jpg": b"two",
    "cat/10.JPEG": b"ten",
    "cat/a.b.c.png": b"dots",
    "cat/deep/er/1.jpg": b"",
    "dog/é ü%41&#?.jpg": b"x" * 511,
    "dog/.hidden.jpg": b"y" * 512,
    "dog/z.jpg": b"z" * 513,
    "ä/😀.webp": os.urandom(5000),
    "..x/1.jpg": b"two dots",
}
NO_SAMPLES = {
    "notes.txt": b"n",
    "cat/notes.txt": b"n",
    "dog.jpg": b"no class",
    "dog/z.jpg.txt": b"n",
}


def make_folder(root, files):
    """Write files below a folder."""
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return DirectoryStorage(root)


def some_files(num=200, seed=0):
    """Make files of different sizes in three classes."""
    rng = random.Random(seed)
    return {
        f"{('cat', 'dog', 'eel')[n % 3]}/{n:04}.jpg": rng.randbytes(rng.randint(0, 3000))
        for n in range(num)
    }


def whole(packed):
    """List what is packed, as what reads it whole."""
    return [
        ObjectPart(found.key, found.num_bytes, etag=found.etag) for found in packed.list_objects("")
    ]


def contents(packed):
    """Read everything; return it by key."""
    parts = whole(packed)
    return dict(zip([part.key for part in parts], packed.read_many(parts), strict=True))


def folder_bytes(root):
    """Return all files of a folder."""
    return {path.name: path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_what_was_packed_is_read_back(tmp_path):
    """All images, whatever their names, by their old names and with their bytes; nothing
    else."""
    source = make_folder(tmp_path / "in", ODD_NAMES | NO_SAMPLES)
    packed = pack_shards(source, tmp_path / "out")
    assert isinstance(packed, Readable)
    assert contents(packed) == ODD_NAMES
    found = packed_objects(DirectoryStorage(tmp_path / "out"))
    assert found == packed
    assert contents(found) == ODD_NAMES
    sent = pickle.dumps(found)
    assert len(sent) < 600, "another process reads the index again"
    assert contents(pickle.loads(sent)) == ODD_NAMES
    assert not (tmp_path / "out/.tmp").exists()
    with pytest.raises(InvalidParamsError, match="got CachedReads; a cache goes in front"):
        _ = PackedObjects(CachedReads(found.storage, tmp_path / "cache")).index


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    sizes=st.lists(st.sampled_from([0, 1, 511, 512, 513, 1024, 3000]), min_size=1, max_size=30),
    shard_bytes=st.sampled_from([1, 1000, 5000, 10**9]),
    seed_and_batch=st.tuples(st.sampled_from([None, 0, 7]), st.sampled_from([1, 3, 256])),
)
def test_any_sizes(tmp_path_factory, monkeypatch, sizes, shard_bytes, seed_and_batch):
    """Sizes round a tar's blocks, shards of one sample or all: each byte is where the index
    says, and every tar file is sound."""
    seed, batch = seed_and_batch
    monkeypatch.setattr("prefect_torch_ddp.data.images.tar_shards.NUM_AT_ONCE", batch)
    tmp_path = tmp_path_factory.mktemp("sizes")
    files = {
        f"{'ab'[n % 2]}/{n}.jpg": random.Random(n).randbytes(size) for n, size in enumerate(sizes)
    }
    packed = pack_shards(
        make_folder(tmp_path / "in", files),
        tmp_path / "out",
        shard_bytes=shard_bytes,
        shuffle_seed=seed,
    )
    assert contents(packed) == files
    labels = {name: label for label, name in enumerate(packed.index.classes)}
    assert sorted(stream(tmp_path / "out")) == sorted(
        (labels[key[0]], data) for key, data in files.items()
    )


def stream(folder):
    """Read shards as WebDataset does, from front to end; yield label and content of each
    sample."""
    for path in sorted(folder.glob("shard-*.tar")):
        with tarfile.open(path, "r|") as tar:
            waiting = None
            for member in tar:
                key, _, ending = member.name.partition(".")
                data = tar.extractfile(member).read()
                if ending == "cls":
                    assert waiting is not None
                    assert waiting[0] == key, "a sample's files aren't side by side"
                    yield int(data), waiting[1]
                    waiting = None
                else:
                    assert waiting is None
                    waiting = key, data
            assert waiting is None


def test_equal_sources_give_equal_bytes(tmp_path):
    """Times, owners and how reads are batched leave no trace; a seed decides the order."""
    files = some_files(60)
    pack_shards(make_folder(tmp_path / "in1", files), tmp_path / "out1", shard_bytes=20_000)
    for path in (second := make_folder(tmp_path / "in2", files)).root.rglob("*"):
        os.utime(path, (5, 5))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("prefect_torch_ddp.data.images.tar_shards.NUM_AT_ONCE", 7)
        pack_shards(second, tmp_path / "out2", shard_bytes=20_000)
    assert folder_bytes(tmp_path / "out1") == folder_bytes(tmp_path / "out2")
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        pack_shards(second, tmp_path / name, shuffle_seed=seed)
    assert folder_bytes(tmp_path / "a") == folder_bytes(tmp_path / "b")
    assert list(stream(tmp_path / "a")) != list(stream(tmp_path / "c"))


def test_packing_again_leaves_nothing_of_before(tmp_path):
    """Fewer shards than last time: the others go, and nobody reads old samples from them."""
    pack_shards(
        make_folder(tmp_path / "in1", some_files(100)), tmp_path / "out", shard_bytes=10_000
    )
    (tmp_path / "out/shard-notes.txt").write_text("not ours")
    fresh = some_files(10, seed=1)
    packed = pack_shards(make_folder(tmp_path / "in2", fresh), tmp_path / "out")
    assert contents(packed) == fresh
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "shard-000000.tar",
        "shard-notes.txt",
        INDEX_NAME,
    ]


def test_nothing_to_pack_is_refused_before_anything_is_removed(tmp_path):
    """An empty source is an error that names it, and the shards of before stay."""
    pack_shards(make_folder(tmp_path / "in", some_files(5)), tmp_path / "out")
    before = folder_bytes(tmp_path / "out")
    with pytest.raises(NoImagesError, match="empty"):
        pack_shards(make_folder(tmp_path / "empty", {"notes.txt": b"x"}), tmp_path / "out")
    assert folder_bytes(tmp_path / "out") == before


def test_a_source_object_that_changed_stops_the_packing(tmp_path):
    """A file that changed after it was listed: an error that names it, and no index: nobody
    takes the rest for whole."""

    @dataclass(frozen=True)
    class Changing(DirectoryStorage):
        def read_many(self, parts):
            path = self.root / "dog/0001.jpg"
            path.write_bytes(b"changed")
            return super().read_many(parts)

    pack_shards(make_folder(tmp_path / "in", some_files(9)), tmp_path / "out")
    with pytest.raises(ObjectChangedError, match=r"dog/0001\.jpg"):
        pack_shards(Changing(tmp_path / "in"), tmp_path / "out")
    assert packed_objects(DirectoryStorage(tmp_path / "out")) is None
    with pytest.raises(ObjectNotFoundError):
        _ = PackedObjects(DirectoryStorage(tmp_path / "out")).index


def test_the_index_comes_last(tmp_path):
    """A storage that fails at the last shard leaves no index."""

    @dataclass(frozen=True)
    class Failing(DirectoryStorage):
        def write(self, key, data):
            if key == "shard-000002.tar":
                msg = "the disk is full"
                raise StorageError(msg)
            super().write(key, data)

    source = make_folder(tmp_path / "in", some_files(30))
    with pytest.raises(StorageError, match="full"):
        pack_shards(source, Failing(tmp_path / "out"), shard_bytes=20_000)
    assert packed_objects(DirectoryStorage(tmp_path / "out")) is None


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    chosen=st.lists(st.integers(0, 39), max_size=60),
    gap=st.sampled_from([0, 2000, 10**6]),
    span=st.sampled_from([1, 5000, 10**6]),
)
def test_any_choice_in_any_order(forty, chosen, gap, span):
    """Neighbours, strangers, the same sample twice, however they are read together: each value
    is that of its part."""
    packed, files = forty
    parts = [whole(packed)[number] for number in chosen]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("prefect_torch_ddp.data.images.packed.LARGEST_GAP_BYTES", gap)
        patched.setattr("prefect_torch_ddp.data.images.packed.LARGEST_SPAN_BYTES", span)
        assert packed.read_many(parts) == [files[part.key] for part in parts]


@pytest.fixture
def forty(tmp_path):
    """Give forty packed samples of different sizes."""
    files = some_files(40)
    return pack_shards(
        make_folder(tmp_path / "in", files), tmp_path / "out", shard_bytes=20_000
    ), files


def test_neighbours_are_read_by_one_request(tmp_path):
    """Reading in order takes a request for up to a megabyte of neighbours, as many samples as
    that holds."""

    @dataclass(frozen=True)
    class Counted(DirectoryStorage):
        def read_many(self, parts):
            asked.append([part.num_bytes for part in parts])
            return super().read_many(parts)

    asked = []
    files = {f"a/{n:03}.jpg": bytes([n]) * 30_000 for n in range(64)}
    pack_shards(make_folder(tmp_path / "in", files), tmp_path / "out")
    packed = PackedObjects(Counted(tmp_path / "out"))
    parts = whole(packed)
    asked.clear()
    assert packed.read_many(parts) == [files[part.key] for part in parts]
    ((*ranges,),) = asked
    assert len(ranges) == 2
    assert max(ranges) <= 2**20
    asked.clear()
    packed.read_many(parts[::9])
    assert asked == [[30_000] * 8]
    asked.clear()
    (tmp_path / "out" / packed.index.shards[0]).unlink()
    errors = packed.read_many(parts)
    assert all(part.key in str(error) for part, error in zip(parts, errors, strict=True))
    assert [len(sizes) for sizes in asked] == [2, 64], "each is read again, all side by side"


@pytest.fixture
def packed(tmp_path):
    """Give twelve packed samples of 1,000 bytes in several shards."""
    files = {f"{'ab'[n % 2]}/{n:02}.jpg": bytes([n + 1]) * 1000 for n in range(12)}
    return pack_shards(make_folder(tmp_path / "in", files), tmp_path / "out", shard_bytes=8000)


def test_a_flipped_bit_names_shard_and_sample(packed, tmp_path):
    """The damaged sample is an error in its place; its neighbours in the same shard are
    read."""
    target = packed.index.find("b/03.jpg")
    path = tmp_path / "out" / packed.index.shards[target.shard]
    data = bytearray(path.read_bytes())
    data[target.start + 17] ^= 4
    path.write_bytes(data)
    got = contents(packed)
    error = got.pop("b/03.jpg")
    assert isinstance(error, ObjectChangedError), "on_error='skip' can't skip it"
    assert "b/03.jpg" in str(error)
    assert str(path) in str(error)
    assert "damaged" in str(error)
    assert got == {f"{'ab'[n % 2]}/{n:02}.jpg": bytes([n + 1]) * 1000 for n in range(12) if n != 3}


def test_a_truncated_or_missing_shard_is_named(packed, tmp_path):
    """With the sample that was wanted from it."""
    path = tmp_path / "out" / packed.index.shards[0]
    path.write_bytes(path.read_bytes()[:2000])
    (tmp_path / "out" / packed.index.shards[1]).unlink()
    got = contents(packed)
    for key, value in got.items():
        sample = packed.index.find(key)
        if sample.shard == 0 and sample.start + 1000 > 2000:
            assert isinstance(value, StorageError)
            assert "shard-000000.tar" in str(value)
            assert key in str(value)
        elif sample.shard == 1:
            assert isinstance(value, ObjectNotFoundError)
            assert "shard-000001.tar" in str(value)
            assert key in str(value)
        else:
            assert value == bytes([int(key[2:4]) + 1]) * 1000


def test_what_is_not_there_and_what_was_packed_again(packed, tmp_path):
    """An unknown name is no object; a sample with another digest than the listed one is a
    changed one."""
    known = whole(packed)[0]
    gone, changed, part = packed.read_many(
        [
            replace(known, key="a/no.jpg"),
            replace(known, etag="0" * 16),
            replace(known, start=10, num_bytes=5),
        ]
    )
    assert isinstance(gone, ObjectNotFoundError)
    assert isinstance(changed, ObjectChangedError)
    assert known.key in str(changed)
    assert part == b"\1" * 5


def _edit(head=None, column=None, end=None):
    """Return what changes an index's text."""

    def edit(data):
        lines = [json.loads(line) for line in gzip.decompress(data).splitlines()]
        lines[0] |= head or {}
        lines[1] |= column or {}
        lines[2] |= end or {}
        return gzip.compress(b"\n".join(json.dumps(line).encode() for line in lines))

    return edit


INDEX_DAMAGES = {
    "cut": (lambda data: data[:-20], "damaged"),
    "a flipped bit": (lambda data: data[:-6] + bytes([data[-6] ^ 1]) + data[-5:], "damaged"),
    "another number": (_edit(end={"num_rows": 13}), "lists 12 rows and announces 13"),
    "another format": (_edit(head={"format": "tar-shards/9"}), "format tar-shards/9"),
    "a shard outside": (_edit(head={"shards": ["../x.tar", "b", "c", "d"]}), "damaged"),
    "too few shards": (_edit(head={"shards": ["shard-000000.tar"]}), "damaged"),
    "unsorted": (_edit(column={"key": [f"{n}" for n in range(20, 8, -1)]}), "sorted"),
    "columns of other lengths": (_edit(column={"start": [1]}), "damaged"),
    "a negative number": (_edit(column={"start": [-1] * 12}), "damaged"),
}


@pytest.mark.parametrize("damage", INDEX_DAMAGES)
def test_a_damaged_index_is_an_error_that_names_it(packed, tmp_path, damage):
    """Never fewer samples, and never others."""
    path = tmp_path / "out" / INDEX_NAME
    change, text = INDEX_DAMAGES[damage]
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(StorageError, match=text) as raised:
        packed_objects(DirectoryStorage(tmp_path / "out"))
    assert str(path) in str(raised.value)
