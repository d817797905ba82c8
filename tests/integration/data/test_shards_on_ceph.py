"""Shards and the cache on a real Ceph RADOS Gateway: packed there, read by chance in ranges;
what changed there is noticed."""

import pytest
import torch
from torchvision.datasets import ImageFolder
from torchvision.transforms.functional import pil_to_tensor

from prefect_torch_ddp.data.images.cache import CachedReads
from prefect_torch_ddp.data.images.folder import S3ImageFolder, image_folder
from prefect_torch_ddp.data.images.packed import PackedObjects
from prefect_torch_ddp.data.images.tar_shards import pack_shards
from prefect_torch_ddp.errors import ObjectChangedError
from prefect_torch_ddp.storage.directory import DirectoryStorage
from tests.integration.data.image_files import (
    global_batches,
    image_files,
    write_folder,
    write_objects,
)

FILES = image_files(60)


@pytest.fixture
def raw(ceph_server):
    """Give images in a bucket."""
    storage = ceph_server.storage()
    write_objects(storage, FILES)
    return storage


@pytest.fixture
def shards(raw, ceph_server):
    """Give them packed into several shards in the bucket."""
    storage = ceph_server.storage()
    pack_shards(raw, storage, shard_bytes=30_000, shuffle_seed=1)
    return storage


def test_it_packs_what_a_directory_packs(shards, tmp_path):
    """Byte by byte: each shard is the one that the same files on a local disk become."""
    pack_shards(
        write_folder(tmp_path / "files", FILES),
        tmp_path / "shards",
        shard_bytes=30_000,
        shuffle_seed=1,
    )
    local = DirectoryStorage(tmp_path / "shards")
    names = sorted(found.key for found in local.list() if found.key.endswith(".tar"))
    assert len(names) > 2
    assert names == sorted(found.key for found in shards.list() if found.key.endswith(".tar"))
    assert all(bytes(shards.read(name)) == bytes(local.read(name)) for name in names)


@pytest.mark.parametrize("is_cached", [False, True])
def test_ranks_get_the_folders_batches_in_random_order(shards, tmp_path, is_cached):
    """On 2 ranks, with forked loader processes: every sample once, each in the global batch
    that a local folder has it in."""
    local = ImageFolder(write_folder(tmp_path / "files", FILES), pil_to_tensor)
    dataset = image_folder(
        shards, pil_to_tensor, **({"cache": tmp_path / "cache"} if is_cached else {})
    )
    got = global_batches(dataset, 2, num_workers=2, multiprocessing_context="fork")
    order = [index for batch in got.values() for index, _, _ in batch]
    assert sorted(order) == list(range(len(FILES)))
    assert order != sorted(order)
    assert got == global_batches(local, 1)
    assert global_batches(dataset, 2, num_workers=1) == got


def test_an_object_that_changed_is_noticed(raw, tmp_path):
    """The gateway refuses it by its ETag; what is in the cache stays what was listed, and a new
    listing reads the new one."""
    first, second = sorted(FILES)[:2]
    cached = CachedReads(raw, tmp_path / "cache")
    old = S3ImageFolder(cached, pil_to_tensor)
    seen = old[0][0]
    raw.write(first, FILES[second])
    raw.write(second, FILES[first])
    assert torch.equal(old[0][0], seen)
    with pytest.raises(ObjectChangedError, match=second):
        _ = old[1]
    new = S3ImageFolder(cached, pil_to_tensor)
    assert torch.equal(new[1][0], seen)
    assert not torch.equal(new[0][0], seen)


def test_shards_that_were_packed_anew_are_noticed(raw, shards):
    """Who opened the old ones gets an error that names a shard, never another image; who opens
    them now gets the new ones."""
    old = S3ImageFolder(PackedObjects(shards), pil_to_tensor)
    before = [image for image, _ in old.__getitems__(range(len(FILES)))]
    pack_shards(raw, shards, shard_bytes=30_000, shuffle_seed=2)
    with pytest.raises(ObjectChangedError, match=r"shard-00000\d\.tar"):
        old.__getitems__(range(len(FILES)))
    new = S3ImageFolder(PackedObjects(shards), pil_to_tensor)
    after = [image for image, _ in new.__getitems__(range(len(FILES)))]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
