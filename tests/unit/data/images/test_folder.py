"""Image folders are read in place; unreadable images are named or skipped, and the others
keep label and weight."""

import logging
from pathlib import Path

import pytest
import torch
from torchvision.datasets import ImageFolder
from torchvision.transforms.functional import pil_to_tensor

from prefect_torch_ddp.data import S3ImageFolder, image_folder, write_index
from prefect_torch_ddp.data.images.location import readable_at
from prefect_torch_ddp.data.loader import RankLoader
from prefect_torch_ddp.errors import (
    CorruptImageError,
    InvalidParamsError,
    NoImagesError,
    ObjectChangedError,
    ObjectNotFoundError,
    StorageError,
)
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.storage.s3.storage import S3Storage
from tests.integration.data.image_files import image_files, write_folder, write_images
from tests.unit.data.test_loader import drawn_of, loader_of

OPTIONS = {"global_batch_size": 3, "seed": 1, "keep_ids": True}
BUCKET = S3Storage("bucket", "images")


def colour_of(image):
    """Return the colour that no other image has."""
    return image.getpixel((0, 0))[0]


@pytest.mark.parametrize(
    ("uri", "options", "words"),
    [
        ("s3://other/place", {"storage": BUCKET}, "isn't in the storage"),
        ("/else", {"storage": BUCKET}, "isn't in the storage"),
        ("../up", {"storage": BUCKET}, "isn't in the storage"),
        (BUCKET, {"storage": BUCKET}, "leave out storage"),
        ("/tmp", {"region": "here"}, "is a folder; region"),
        ("train", {"storage": BUCKET, "anonymous": True}, "along with a storage"),
        (BUCKET, {"on_error": "ignore"}, "choose raise or skip"),
        (object(), {}, "can't be read from a object"),
    ],
)
def test_places_that_cannot_be_are_refused(uri, options, words):
    """Each says what to give instead."""
    with pytest.raises(InvalidParamsError, match=words):
        S3ImageFolder(uri, **options)


def test_the_ways_to_a_bucket_are_those_of_its_storage():
    """A URI by itself leaves all to AWS's own chain."""
    ways = {"endpoint_url": "http://here", "region": "r", "anonymous": True}
    for given in ({}, ways):
        assert readable_at("s3://b/p/", **given) == (S3Storage("b", "p", **given), "")


def test_an_index_takes_the_place_of_the_listing(tmp_path):
    """An index gives the same dataset without a listing, also for a folder within it."""

    class Unlisted(DirectoryStorage):
        def list_objects(self, prefix):
            yield pytest.fail("it is listed")

        def read(self, key):
            pytest.fail("it is looked into")

    write_folder(tmp_path / "images/dog", image_files(9))
    source, unlisted = (kind(tmp_path / "images") for kind in (DirectoryStorage, Unlisted))
    assert write_index(source, tmp_path) == 9
    dataset = S3ImageFolder(unlisted, colour_of, index=tmp_path)
    listed = S3ImageFolder(source, colour_of)
    assert (dataset.samples, dataset.targets) == (listed.samples, listed.targets)
    assert list(dataset) == list(listed)
    folder = S3ImageFolder("dog", storage=unlisted, index=tmp_path)
    assert folder.classes == ["cat", "dog", "eel"]


def test_image_folder_takes_torchvisions_own_for_a_path(tmp_path):
    """Torchvision's class reads a plain path, and ours reads what torchvision's can't."""
    folder = write_folder(tmp_path / "images", image_files(9))
    theirs = ImageFolder(str(folder))
    write_index(DirectoryStorage(folder), tmp_path)
    for place, options in [
        (str(folder), {}),
        (folder, {"index": tmp_path}),
        (DirectoryStorage(folder), {"on_error": "raise"}),
        ("images", {"storage": DirectoryStorage(tmp_path)}),
    ]:
        dataset = image_folder(place, colour_of, **options)
        assert type(dataset) is ImageFolder
        assert dataset.samples == theirs.samples
    with pytest.raises(TypeError, match="no argument colour"):
        image_folder(folder, colour=1)
    skipping = image_folder(folder, colour_of, on_error="skip")
    assert skipping.samples == theirs.samples
    *_, another = image_files(10).values()
    DirectoryStorage(folder).write("cat/new.png", another)
    assert (folder / ".tmp").is_dir()
    for ours in (skipping, image_folder(DirectoryStorage(folder), colour_of)):
        assert type(ours) is S3ImageFolder
        assert ours.class_to_idx == theirs.class_to_idx
        assert set(dataset) <= set(ours)
    assert len(ours) == 10


@pytest.mark.parametrize("changes", ["new", "gone"])
def test_a_folder_that_has_other_images_than_its_index_is_refused(tmp_path, changes):
    """The numbers of a split would mean other images, those of the training among them."""
    folder = write_folder(tmp_path / "images", image_files(9))
    write_index(DirectoryStorage(folder), tmp_path)
    first = next(folder.glob("*/*"))
    if changes == "new":
        (folder / "cat" / "000.png").write_bytes(first.read_bytes())
        says = r"1 new, 0 gone, such as cat/000\.png\. Put them back"
    else:
        first.unlink()
        says = f"0 new, 1 gone, such as {first.parent.name}/{first.name}"
    with pytest.raises(InvalidParamsError, match=says):
        image_folder(folder, colour_of, index=tmp_path)
    if changes == "gone":
        chosen = image_folder(folder, index=tmp_path, is_valid_file=lambda path: path != str(first))
        assert len(chosen) == 8


def test_what_cannot_be_read_is_named(tmp_path):
    """Corrupt, vanished, changed: never another image's label, never silence."""
    dataset = struck_images(tmp_path)
    uri, _ = dataset.samples[0]
    with pytest.raises(CorruptImageError, match=f"{uri} can't be decoded: .*on_error='skip'"):
        dataset[0]
    for index, kind in ((1, ObjectNotFoundError), (2, ObjectChangedError)):
        for read in (lambda: dataset[index], lambda: dataset.__getitems__([5, index, 6])):  # noqa: B023
            with pytest.raises(kind, match=dataset._objects[index].key):
                read()


@pytest.mark.parametrize("has_index", [False, True])
def test_an_empty_class_of_a_local_folder_keeps_its_number(tmp_path, has_index):
    """As torchvision's: the labels of the classes after it would be those of others."""
    folder = write_folder(tmp_path / "images", image_files(9))
    (folder / "bee").mkdir()
    options = {"on_error": "skip"}
    if has_index:
        write_index(DirectoryStorage(folder), tmp_path)
        options["index"] = tmp_path
    with pytest.raises(NoImagesError, match=r"classes bee in .*allow_empty=True"):
        image_folder(folder, **options)
    ours = image_folder(folder, allow_empty=True, **options)
    theirs = ImageFolder(folder, allow_empty=True)
    assert (ours.class_to_idx, ours.targets) == (theirs.class_to_idx, theirs.targets)


@pytest.mark.parametrize("loader", [None, Path.read_text])
def test_a_corrupt_image_of_a_local_folder_is_named(tmp_path, loader):
    """Torchvision's error is an OSError without a name, which would be tried again and again."""
    folder = tmp_path / "images"
    write_images(DirectoryStorage(folder), ["cat"], 2)
    first = folder / "cat" / "cat00.jpg"
    content = first.read_bytes()
    first.write_bytes(content[: len(content) // 2])
    options = {} if loader is None else {"loader": lambda path: loader(Path(path))}
    dataset = image_folder(folder, **options)
    with pytest.raises(CorruptImageError, match=f"{first} can't be decoded: .*on_error='skip'"):
        dataset[0]
    first.unlink()
    with pytest.raises(FileNotFoundError, match=str(first)):
        dataset[0]


def struck_images(folder, **options):
    """Return 24 images, of which the first is half, the second gone, the third another one."""
    root = write_folder(folder / "images", image_files(24))
    names = sorted(image_files(24))
    data = (root / names[0]).read_bytes()
    (root / names[0]).write_bytes(data[: len(data) // 2] + b"\0" * (len(data) - len(data) // 2))
    dataset = S3ImageFolder(DirectoryStorage(root), colour_of, **options)
    (root / names[1]).unlink()
    (root / names[2]).write_bytes((root / names[3]).read_bytes() + b"\0")
    return dataset


def test_what_is_skipped_is_counted_and_every_label_is_right(tmp_path, caplog):
    """Batches are smaller by what is missing; the rank's loader says which samples came."""
    dataset = struck_images(tmp_path, on_error="skip")
    whole = ImageFolder(write_folder(tmp_path / "whole", image_files(24)), colour_of)
    with caplog.at_level(logging.WARNING):
        samples = dataset.__getitems__(range(24))
    assert samples == list(whole)[3:]
    assert dataset.num_skipped == 3
    said = [line.partition(" skipped") for line in caplog.messages]
    assert [number for number, is_ours, _ in said if is_ours] == ["1", "2"]
    assert f"{dataset.samples[0][0]} can't be decoded" in caplog.text
    assert dataset._objects[1].key in caplog.text
    seen = {}
    for (colours, targets), share in loader_of(dataset, 8, keep_ids=True).lockstep(0):
        assert share.num_local == 8
        assert len(colours) == len(share.samples) == 8 - share.num_skipped
        pairs = zip(colours.tolist(), targets.tolist(), strict=True)
        seen |= zip(share.samples, pairs, strict=True)
    assert seen == dict(enumerate(samples, start=3))
    with pytest.raises(CorruptImageError, match="every image of a batch had to be skipped"):
        dataset.__getitems__([0, 1, 2])


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_augmentation_depends_on_the_sample_alone(tmp_path, on_error):
    """Augmentation depends only on the sample, also if images before it are skipped."""
    dataset = struck_images(tmp_path, on_error=on_error)
    dataset.transform = lambda image: (colour_of(image), torch.rand(()).item())
    first = 1 if on_error == "skip" else 3
    whole = drawn_of(dataset, [[*range(first, 8)]])
    assert whole == drawn_of(dataset, [[*range(first, 5)], [5, 6, 7]])
    assert len(whole) == 5


def damaged_images(tmp_path):
    """Return seven images, of which that in the tail of epoch 1 is corrupt, its number, and the
    same images whole."""
    files = image_files(7)
    whole = S3ImageFolder(DirectoryStorage(write_folder(tmp_path / "whole", files)), pil_to_tensor)
    shares = [share for _, share in RankLoader(whole, rank=0, world_size=1, **OPTIONS).lockstep(1)]
    (tail,) = shares[-1].samples
    root = write_folder(tmp_path / "damaged", files)
    (root / whole.samples[tail][0].removeprefix(f"{whole.root}/")).write_bytes(b"corrupt")
    return S3ImageFolder(DirectoryStorage(root), pil_to_tensor, on_error="skip"), tail, whole


def test_a_share_of_which_nothing_is_left_counts_for_nothing(tmp_path):
    """Three ranks continue in lockstep after a tail of one corrupt image."""
    dataset, tail, whole = damaged_images(tmp_path)
    loaders = [RankLoader(dataset, rank=rank, world_size=3, **OPTIONS) for rank in range(3)]
    seen = []
    for loader in loaders:
        steps = list(loader.lockstep(1))
        assert [share.batch for _, share in steps] == [0, 1, 2]
        for (images, labels), share in steps:
            counted = share.num_local - share.num_skipped
            assert counted == len(share.samples)
            assert len(images) == max(counted, 1)
            for image, label, number in zip(images, labels, share.samples, strict=bool(counted)):
                assert torch.equal(image, whole[number][0])
                assert label == whole[number][1]
                seen.append(number)
        loader.epoch = 1
    assert sorted(seen) == [number for number in range(7) if number != tail]
    assert sum(len(labels) for loader in loaders for _, labels in loader) == 6


def test_alone_an_empty_batch_is_an_error(tmp_path):
    """With one rank nobody's gradients would outweigh a stand-in's: the error names the
    image."""
    dataset, tail, _ = damaged_images(tmp_path)
    with pytest.raises(CorruptImageError, match=dataset.samples[tail][0]):
        list(RankLoader(dataset, rank=0, world_size=1, **OPTIONS).lockstep(1))


def test_a_storage_that_refuses_is_never_skipped(tmp_path):
    """Nor is want of memory: that is no fault of one image, and a training on nothing, or on half
    of the dataset, would be the answer."""

    class Refusing(DirectoryStorage):
        def read_many(self, parts):
            return [StorageError("the secret is wrong")] * len(parts)

    def loader(file: object) -> None:
        raise MemoryError

    root = Path(write_folder(tmp_path, image_files(7)))
    for dataset, error in (
        (S3ImageFolder(Refusing(root), on_error="skip"), StorageError),
        (S3ImageFolder(DirectoryStorage(root), on_error="skip", loader=loader), MemoryError),
    ):
        with pytest.raises(error):
            dataset.__getitems__([0, 1, 2])
