"""Shards and the cache under a dataset in a real S3: the samples, labels and global batches of
a local folder, for any ranks."""

import pickle

import pytest
import torch
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms.functional import pil_to_tensor

from prefect_torch_ddp.data.images.cache import CachedReads
from prefect_torch_ddp.data.images.folder import S3ImageFolder, image_folder
from prefect_torch_ddp.data.images.packed import PackedObjects, packed_objects
from prefect_torch_ddp.data.images.tar_shards import pack_shards
from prefect_torch_ddp.errors import ObjectChangedError, StorageError
from prefect_torch_ddp.storage.directory import DirectoryStorage
from tests.integration.data.image_files import (
    global_batches,
    image_files,
    write_folder,
    write_objects,
)
from tests.support.s3_server import Wire

NUM_IMAGES = 60
FILES = image_files(NUM_IMAGES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Give a local folder of images."""
    return write_folder(tmp_path_factory.mktemp("local"), FILES)


@pytest.fixture(scope="module")
def raw(s3_server):
    """Give the same images in a bucket."""
    storage = s3_server.storage("raw")
    write_objects(storage, FILES)
    return storage


@pytest.fixture(scope="module")
def shards(raw, s3_server):
    """Give them packed into several shards in the bucket."""
    storage = s3_server.storage("shards")
    pack_shards(raw, storage, shard_bytes=30_000, shuffle_seed=1)
    assert sum(found.key.endswith(".tar") for found in storage.list()) > 2
    return storage


@pytest.fixture(params=["shards", "cache", "cached shards", "shards in a directory"])
def dataset(request, raw, shards, folder, tmp_path):
    """Give each way to read them."""
    if request.param == "shards in a directory":
        pack_shards(DirectoryStorage(folder), tmp_path / "shards", shard_bytes=30_000)
        return S3ImageFolder(packed_objects(DirectoryStorage(tmp_path / "shards")), pil_to_tensor)
    source = {
        "shards": PackedObjects(shards),
        "cache": raw,
        "cached shards": PackedObjects(shards),
    }[request.param]
    return S3ImageFolder(
        CachedReads(source, tmp_path / "cache") if "cache" in request.param else source,
        pil_to_tensor,
    )


def test_it_is_the_folder(dataset, folder):
    """Classes, their numbers, targets, names and pixels are torchvision's, also when pickled
    and read again."""
    local = ImageFolder(folder, pil_to_tensor)
    for one in (dataset, pickle.loads(pickle.dumps(dataset))):
        assert (one.classes, one.class_to_idx, one.targets) == (
            local.classes,
            local.class_to_idx,
            local.targets,
        )
        names, local_names = (
            [path.removeprefix(str(d.root)) for path, _ in d.samples] for d in (one, local)
        )
        assert names == local_names
        for _ in range(2):
            for (image, target), (same_image, same_target) in zip(
                one.__getitems__(range(NUM_IMAGES)), local, strict=True
            ):
                assert target == same_target
                assert torch.equal(image, same_image)
        assert torch.equal(one[7][0], local[7][0])


def test_every_rank_gets_the_folders_global_batches(dataset, folder):
    """On 3 ranks, with 2 forked loader processes each: every sample once, in the
    global batches of the local folder."""
    expected = global_batches(ImageFolder(folder, pil_to_tensor), 1)
    got = global_batches(dataset, 3, num_workers=2, multiprocessing_context="fork")
    assert got == expected
    assert sorted(index for batch in got.values() for index, _, _ in batch) == list(
        range(NUM_IMAGES)
    )


def test_the_second_epoch_asks_the_server_for_nothing(open_s3_server, tmp_path):
    """With a cache, one GET for each object in the first epoch, none in the second, from forked
    loader processes too."""
    with Wire(open_s3_server.endpoint_url) as wire:
        storage = open_s3_server.storage(endpoint_url=wire.endpoint_url)
        write_objects(storage, FILES)
        dataset = S3ImageFolder(CachedReads(storage, tmp_path / "cache"), pil_to_tensor)
        before = wire.count("GET")
        first = global_batches(dataset, 2, num_workers=1)
        assert wire.count("GET") - before == NUM_IMAGES
        assert global_batches(dataset, 2, num_workers=1) == first
        assert wire.count("GET") - before == NUM_IMAGES


def check_changes(storage, tmp_path):
    """Overwrite objects: the old dataset says so, or gives what it listed, from the cache; a new
    one reads the new content."""
    one, other = FILES[min(FILES)], FILES[max(FILES)]
    write_objects(storage, {"a/1.png": one, "a/2.png": other})
    cached = CachedReads(storage, tmp_path / "cache")
    old = S3ImageFolder(cached, pil_to_tensor)
    first = old[0][0]
    write_objects(storage, {"a/1.png": other, "a/2.png": one})
    assert torch.equal(old[0][0], first)
    with pytest.raises(ObjectChangedError, match=r"a/2\.png"):
        _ = old[1]
    new = S3ImageFolder(cached, pil_to_tensor)
    assert torch.equal(new[1][0], first)
    assert not torch.equal(new[0][0], first)


def test_a_changed_object_is_not_read_from_the_cache(s3_server, tmp_path):
    """By its ETag."""
    check_changes(s3_server.storage(), tmp_path)


def test_on_ceph(ceph_server, folder, tmp_path):
    """Each sample once, in the global batches of the local folder, from shards and a cache; who
    opened shards that were packed anew gets an error, never another image."""
    check_changes(ceph_server.storage(), tmp_path)
    raw, shards = ceph_server.storage(), ceph_server.storage()
    write_objects(raw, FILES)
    pack_shards(raw, shards, shard_bytes=30_000, shuffle_seed=1)
    expected = global_batches(ImageFolder(folder, pil_to_tensor), 1)
    for options in ({}, {"cache": tmp_path / "cache"}):
        dataset = image_folder(shards, pil_to_tensor, **options)
        got = global_batches(dataset, 2, num_workers=2, multiprocessing_context="fork")
        assert got == expected
    old = S3ImageFolder(PackedObjects(shards), pil_to_tensor)
    before = [image for image, _ in old.__getitems__(range(NUM_IMAGES))]
    pack_shards(raw, shards, shard_bytes=30_000, shuffle_seed=2)
    with pytest.raises(ObjectChangedError, match=r"shard-00000\d\.tar"):
        old.__getitems__(range(NUM_IMAGES))
    new = S3ImageFolder(PackedObjects(shards), pil_to_tensor)
    after = [image for image, _ in new.__getitems__(range(NUM_IMAGES))]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def drain(loader):
    """Go through all batches; an error leaves no loader process behind, though it holds the
    frames."""
    batches = iter(loader)
    try:
        for _ in batches:
            pass
    finally:
        batches._shutdown_workers()


@pytest.fixture
def damaged(s3_server, raw):
    """Give shards in which a sample has a flipped bit, and its name."""
    storage = s3_server.storage()
    packed = pack_shards(raw, storage)
    name = sorted(FILES)[7]
    data = bytearray(storage.read("shard-000000.tar"))
    data[packed.index.find(name).start + 5] ^= 1
    storage.write("shard-000000.tar", data)
    return storage, name


def test_a_damaged_shard_stops_the_training_and_names_shard_and_sample(damaged):
    """Out of a forked loader process as well; it is never another image, and never a wrong
    label."""
    storage, name = damaged
    dataset = S3ImageFolder(PackedObjects(storage), pil_to_tensor)
    with pytest.raises(StorageError, match=rf"{name} in s3://.*shard-000000\.tar"):
        drain(DataLoader(dataset, batch_size=4, num_workers=1))


def test_a_damaged_sample_may_be_skipped(damaged, raw):
    """With on_error="skip" it is left out and counted; every other image keeps its own
    label."""
    storage, name = damaged
    dataset = S3ImageFolder(storage, pil_to_tensor, on_error="skip")
    whole = S3ImageFolder(raw, pil_to_tensor).__getitems__(range(NUM_IMAGES))
    del whole[sorted(FILES).index(name)]
    got = dataset.__getitems__(range(NUM_IMAGES))
    assert dataset.num_skipped == 1
    assert all(a[1] == b[1] and torch.equal(a[0], b[0]) for a, b in zip(got, whole, strict=True))


def test_image_folder_finds_shards_by_itself(shards, folder, tmp_path):
    """The same line reads a folder, a bucket and shards in either."""
    local = ImageFolder(folder)
    pack_shards(DirectoryStorage(folder), tmp_path / "shards")
    for place in (shards, tmp_path / "shards", str(tmp_path / "shards")):
        found = image_folder(place, pil_to_tensor)
        assert isinstance(found, S3ImageFolder)
        assert (found.classes, found.targets) == (local.classes, local.targets)
        assert len(found.__getitems__([0, 5])) == 2
    assert type(image_folder(folder)) is ImageFolder
