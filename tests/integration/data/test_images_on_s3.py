"""A dataset in a real S3 gives a local folder's samples, labels and global batches."""

import pickle
import re
from pathlib import Path

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler
from torchvision.datasets import ImageFolder
from torchvision.transforms.functional import pil_to_tensor

from prefect_torch_ddp.data import (
    CachedReads,
    LookAhead,
    S3ImageFolder,
    image_folder,
)
from prefect_torch_ddp.errors import ObjectChangedError
from tests.integration.data.image_files import (
    global_batches,
    image_files,
    write_folder,
    write_objects,
)
from tests.support.s3_server import Wire
from tests.unit.data.images.test_folder import colour_of
from tests.unit.data.test_loader import loader_of

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


@pytest.mark.parametrize("kind", ["bucket", "cache"])
def test_it_is_torchvisions_image_folder(raw, folder, tmp_path, kind):
    """Classes, targets, names and pixels are torchvision's, and 3 ranks share each sample once."""
    local = ImageFolder(folder, pil_to_tensor)
    cache = tmp_path / "cache" if kind == "cache" else None
    dataset = image_folder(raw, pil_to_tensor, cache=cache)
    assert type(dataset) is S3ImageFolder
    assert raw.uri in repr(dataset)
    for one in (dataset, pickle.loads(pickle.dumps(dataset))):
        known = one.classes, one.class_to_idx, one.targets
        assert known == (local.classes, local.class_to_idx, local.targets)
        assert one.samples == [(p.replace(str(folder), one.root), t) for p, t in local.samples]
        for _ in range(2):
            for (image, target), (same_image, same_target) in zip(
                one.__getitems__(range(NUM_IMAGES)), local, strict=True
            ):
                assert target == same_target
                assert torch.equal(image, same_image)
        assert torch.equal(one[-1][0], local[NUM_IMAGES - 1][0])
        with pytest.raises(IndexError):
            one[NUM_IMAGES]
    expected = global_batches(local, 1)
    got = global_batches(dataset, 3, num_workers=2, multiprocessing_context="fork")
    assert got == expected
    ids = sorted(index for batch in got.values() for index, _, _ in batch)
    assert ids == list(range(NUM_IMAGES))


@pytest.mark.parametrize(
    ("num_workers", "context"),
    [(0, None), (2, "fork"), pytest.param(2, "spawn", marks=pytest.mark.long)],
)
def test_a_dataloader_gives_each_sample_once_with_its_own_label(raw, num_workers, context):
    """The stock DataLoader and the rank's read ahead in any kind of process."""
    dataset = S3ImageFolder(raw, colour_of)
    expected = sorted(dataset[i] for i in range(NUM_IMAGES))
    options = {"num_workers": num_workers, "multiprocessing_context": context}
    ahead = LookAhead(BatchSampler(RandomSampler(dataset), 5, drop_last=False), num_workers)
    stock = DataLoader(dataset, batch_sampler=ahead, **options)
    for loader in (loader_of(dataset, 5, **options), stock):
        columns = ([column.tolist() for column in one] for one in loader)
        assert sorted(pair for one in columns for pair in zip(*one, strict=True)) == expected


def test_each_sample_is_one_request_and_none_with_a_cache(open_s3_server, tmp_path):
    """Nothing is requested twice, and with a cache the second epoch requests nothing."""
    with Wire(open_s3_server.endpoint_url) as wire:
        storage = open_s3_server.storage(endpoint_url=wire.endpoint_url)
        write_objects(storage, FILES)
        loader = loader_of(S3ImageFolder(storage, colour_of), 14, seed=3)
        before = wire.count("GET")
        whole = [colours.tolist() for (colours, _), _ in loader.lockstep(0)]
        assert wire.count("GET") - before == NUM_IMAGES
        resumed = [colours.tolist() for (colours, _), _ in loader.lockstep(0, 3)]
        assert resumed == whole[3:]
        begun = loader.lockstep(1)
        next(begun)
        del begun
        assert [colours.tolist() for (colours, _), _ in loader.lockstep(0)] == whole
        dataset = S3ImageFolder(CachedReads(storage, tmp_path / "cache"), pil_to_tensor)
        before = wire.count("GET")
        first = global_batches(dataset, 2, num_workers=1)
        assert wire.count("GET") - before == NUM_IMAGES - 1  # the new dataset has read one
        assert global_batches(dataset, 2, num_workers=1) == first
        assert wire.count("GET") - before == NUM_IMAGES - 1


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
    """The cache recognises a changed object by its ETag."""
    check_changes(s3_server.storage(), tmp_path)


def test_on_ceph(ceph_server, folder, tmp_path):
    """Ceph gives each sample once, in the local folder's global batches, with a cache too."""
    check_changes(ceph_server.storage(), tmp_path)
    raw = ceph_server.storage()
    write_objects(raw, FILES)
    expected = global_batches(ImageFolder(folder, pil_to_tensor), 1)
    for options in ({}, {"cache": tmp_path / "cache"}):
        dataset = image_folder(raw, pil_to_tensor, **options)
        got = global_batches(dataset, 2, num_workers=2, multiprocessing_context="fork")
        assert got == expected


PAGE = (Path(__file__).parents[3] / "docs/images.md").read_text(encoding="utf-8")
(CACHE,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_the_cache_of_the_docs(chain_s3_server, tmp_path):
    """One line reads a bucket by its URI through a folder on local disk."""
    write_objects(chain_s3_server.storage("images"), image_files(10))
    found = {"image_folder": image_folder, "transform": None}
    exec(CACHE.replace("/local/disk", str(tmp_path)), found)
    assert len(found["dataset"].__getitems__(range(10))) == 10
    assert len(list(tmp_path.glob("cache/v1/*/??/*"))) == 10
    assert chain_s3_server.keys["owner"][1].encode() not in pickle.dumps(found["dataset"])
