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
from prefect_torch_ddp.data.images.packed import INDEX_NAME, PackedObjects, packed_objects
from prefect_torch_ddp.data.images.tar_shards import pack_shards
from prefect_torch_ddp.errors import (
    InvalidParamsError,
    NoImagesError,
    ObjectChangedError,
    ObjectNotFoundError,
    StorageError,
)
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.storage.protocol import Readable
from tests.integration.data.image_files import write_folder
from tests.unit.data.images.test_cache import parts_of

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


def some_files(num=200, seed=0):
    """Make files of different sizes in three classes."""
    rng = random.Random(seed)
    return {
        f"{('cat', 'dog', 'eel')[n % 3]}/{n:04}.jpg": rng.randbytes(rng.randint(0, 3000))
        for n in range(num)
    }


def contents(packed):
    """Read everything; return it by key."""
    parts = parts_of(packed)
    return dict(zip([part.key for part in parts], packed.read_many(parts), strict=True))


def folder_bytes(root):
    """Return all files of a folder."""
    return {path.name: path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_what_was_packed_is_read_back(tmp_path):
    """All images, whatever their names, by their old names and with their bytes; nothing
    else."""
    source = write_folder(tmp_path / "in", ODD_NAMES | NO_SAMPLES)
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
    source = write_folder(tmp_path / "in", files)
    packed = pack_shards(source, tmp_path / "out", shard_bytes=shard_bytes, shuffle_seed=seed)
    assert contents(packed) == files
    labelled = sorted((packed.index.classes.index(key[0]), data) for key, data in files.items())
    assert sorted(stream(tmp_path / "out")) == labelled


def stream(folder):
    """Read shards as WebDataset does, from front to end; yield label and content of each
    sample."""
    for path in sorted(folder.glob("shard-*.tar")):
        with tarfile.open(path, "r|") as tar:
            files = [(member.name, tar.extractfile(member).read()) for member in tar]
        for (name, data), (beside, label) in zip(files[::2], files[1::2], strict=True):
            assert beside == f"{name.partition('.')[0]}.cls", "a sample's files aren't side by side"
            yield int(label), data


def test_equal_sources_give_equal_bytes(tmp_path):
    """Times, owners and how reads are batched leave no trace; a seed decides the order."""
    files = some_files(60)
    pack_shards(write_folder(tmp_path / "in1", files), tmp_path / "out1", shard_bytes=20_000)
    for path in (second := write_folder(tmp_path / "in2", files)).rglob("*"):
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
    """Fewer shards than last time: the others go, and nobody reads old samples from them. Where
    there is nothing to pack, an error names the source before anything is removed."""
    out, many = tmp_path / "out", some_files(100)
    pack_shards(write_folder(tmp_path / "in1", many), out, shard_bytes=10_000)
    (out / "shard-notes.txt").write_text("not ours")
    fresh = some_files(10, seed=1)
    packed = pack_shards(write_folder(tmp_path / "in2", fresh), out)
    assert contents(packed) == fresh
    before = folder_bytes(out)
    assert sorted(before) == ["shard-000000.tar", "shard-notes.txt", INDEX_NAME]
    with pytest.raises(NoImagesError, match="empty"):
        pack_shards(write_folder(tmp_path / "empty", {"notes.txt": b"x"}), out)
    assert folder_bytes(out) == before


def test_the_index_comes_last(tmp_path):
    """A source object that changed after it was listed, or a storage that fails at the last shard,
    is an error, and there is no index: nobody takes the rest for whole."""

    @dataclass(frozen=True)
    class Changing(DirectoryStorage):
        def read_many(self, parts):
            (self.root / "dog/0001.jpg").write_bytes(b"changed")
            return super().read_many(parts)

    @dataclass(frozen=True)
    class Failing(DirectoryStorage):
        def write(self, key, data):
            if key == "shard-000002.tar":
                msg = "the disk is full"
                raise StorageError(msg)
            super().write(key, data)

    source, out = write_folder(tmp_path / "in", some_files(30)), tmp_path / "out"
    for reads, to, error, words in (
        (source, Failing(out), StorageError, "full"),
        (Changing(source), out, ObjectChangedError, r"dog/0001\.jpg"),
    ):
        pack_shards(source, out)
        with pytest.raises(error, match=words):
            pack_shards(reads, to, shard_bytes=20_000)
        assert packed_objects(DirectoryStorage(out)) is None
        with pytest.raises(ObjectNotFoundError):
            _ = PackedObjects(DirectoryStorage(out)).index


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
    parts = [parts_of(packed)[number] for number in chosen]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("prefect_torch_ddp.data.images.packed.LARGEST_GAP_BYTES", gap)
        patched.setattr("prefect_torch_ddp.data.images.packed.LARGEST_SPAN_BYTES", span)
        assert packed.read_many(parts) == [files[part.key] for part in parts]


@pytest.fixture
def forty(tmp_path):
    """Give forty packed samples of different sizes."""
    files = some_files(40)
    return pack_shards(
        write_folder(tmp_path / "in", files), tmp_path / "out", shard_bytes=20_000
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
    pack_shards(write_folder(tmp_path / "in", files), tmp_path / "out")
    packed = PackedObjects(Counted(tmp_path / "out"))
    parts = parts_of(packed)
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
    return pack_shards(write_folder(tmp_path / "in", files), tmp_path / "out", shard_bytes=8000)


def test_a_damaged_shard_is_named_with_the_sample(packed, tmp_path):
    """A flipped bit, a truncated shard, a missing one: each sample that can't be read is an error
    in its place, which may be skipped; its neighbours in the same shard are read."""
    first, second, third = (tmp_path / "out" / name for name in packed.index.shards[:3])
    first.write_bytes(first.read_bytes()[:2000])
    second.unlink()
    flipped = next(sample for sample in packed.index if sample.shard == 2)
    data = bytearray(third.read_bytes())
    data[flipped.start + 17] ^= 4
    third.write_bytes(data)
    kinds = {}
    for key, value in contents(packed).items():
        sample = packed.index.find(key)
        shard = str(tmp_path / "out" / packed.index.shards[sample.shard])
        if sample == flipped:
            assert isinstance(value, ObjectChangedError), "on_error='skip' can't skip it"
            assert f"{key} in {shard}" in str(value)
            assert "damaged" in str(value)
        elif (sample.shard == 0 and sample.stop > 2000) or sample.shard == 1:
            assert isinstance(value, StorageError if sample.shard == 0 else ObjectNotFoundError)
            assert key in str(value)
            assert shard.rpartition("/")[2] in str(value)
        else:
            assert value == bytes([int(key[2:4]) + 1]) * 1000
        kinds.setdefault(sample.shard, set()).add(type(value) is bytes)
    assert [kinds[number] for number in range(3)] == [{True, False}, {False}, {True, False}]


def test_what_is_not_there_and_what_was_packed_again(packed, tmp_path):
    """An unknown name is no object; a sample with another digest than the listed one is a
    changed one."""
    known = parts_of(packed)[0]
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
