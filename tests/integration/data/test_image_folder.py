"""S3ImageFolder on a real server: torchvision's ImageFolder in meaning and order, whatever lies
beside the images."""

import logging
import pickle
from dataclasses import replace
from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Subset
from torchvision.datasets import ImageFolder

from prefect_torch_ddp import (
    CorruptImageError,
    InvalidParamsError,
    NoImagesError,
    ObjectChangedError,
    ObjectNotFoundError,
)
from prefect_torch_ddp.data import LookAhead, S3ImageFolder, image_folder, write_index
from prefect_torch_ddp.data.loader import RankLoader
from prefect_torch_ddp.errors import StorageError
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.storage.s3.client import client_of
from tests.support.s3_server import Wire

NUM = 24


def png(colour, size=8):
    """Make an image of one colour."""
    data = BytesIO()
    Image.new("RGB", (size, size), (colour, 255 - colour, 7)).save(data, "PNG")
    return data.getvalue()


def colour_of(image):
    """Return the colour that an image was made with."""
    return image.getpixel((0, 0))[0]


def to_tensor(image):
    """Make a tensor of it."""
    return torch.from_numpy(np.asarray(image).copy())


def fill(storage, num=NUM):
    """Write images of three classes, of which each has its own colours, and what else lies in
    such buckets."""
    for i in range(num):
        folder = ("cat", "cat-x", "dog/deep")[i % 3]
        storage.write(f"{folder}/{i:03}.png", png(i))
    storage.write("notes.txt", b"no class")
    storage.write("dog/notes.txt", b"no image")
    return storage


@pytest.fixture(scope="module")
def filled(s3_server):
    """Give a storage with images in a bucket; tests don't change it."""
    return fill(s3_server.storage())


@pytest.fixture
def over_wire(open_s3_server):
    """Give images behind a wire, and the wire."""
    with Wire(open_s3_server.endpoint_url) as wire:
        yield fill(open_s3_server.storage(endpoint_url=wire.endpoint_url)), wire


def as_local(storage, folder):
    """Copy all objects into a folder."""
    for item in storage.list_objects(""):
        if item.key.endswith("/"):
            continue
        path = folder / item.key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(storage.read(item.key))
    return ImageFolder(str(folder))


def test_it_is_torchvisions_image_folder(filled, tmp_path):
    """The same classes, samples, targets, order and pixels; the URIs in place of the paths."""
    ours, theirs = S3ImageFolder(filled), as_local(filled, tmp_path)
    assert ours.classes == theirs.classes == ["cat", "cat-x", "dog"]
    assert ours.class_to_idx == theirs.class_to_idx
    assert ours.targets == theirs.targets
    assert ours.samples == [(p.replace(str(tmp_path), filled.uri), t) for p, t in theirs.samples]
    assert len(ours) == len(theirs) == NUM
    for (image, target), (their_image, their_target) in zip(ours, theirs, strict=True):
        assert target == their_target
        assert image.mode == their_image.mode == "RGB"
        assert image.tobytes() == their_image.tobytes()
    assert ours[-1][0].tobytes() == theirs[-1][0].tobytes()
    with pytest.raises(IndexError):
        ours[NUM]
    assert filled.uri in repr(ours)


@pytest.mark.parametrize("num", [4, pytest.param(1100, marks=pytest.mark.extended)])
def test_markers_many_objects_and_a_neighbour_of_the_same_beginning(s3_server, num):
    """1,100 objects take two pages; `train2` isn't `train`; folder markers are neither class
    nor image of their own."""
    storage = s3_server.storage()
    client, data = client_of(storage), png(5)
    names = [f"train/c{i % 2}/{i:05}.png" for i in range(num)]
    for name in (*names, "train2/c9/0.png", "train/c0/", "train/", "train.png"):
        body = b"" if name.endswith("/") else data
        client.put_object(Bucket=storage.bucket, Key=storage.name_of(name), Body=body)
    dataset = S3ImageFolder("train", storage=storage)
    assert dataset.classes == ["c0", "c1"]
    assert len(dataset) == num
    assert S3ImageFolder(f"{storage.uri}/train", storage=storage).samples == dataset.samples
    with pytest.raises(
        NoImagesError, match=rf"any class folder in {storage.uri}/train3: there is nothing"
    ):
        S3ImageFolder("train3", storage=storage)


def test_places_that_cannot_be_are_refused(filled, tmp_path):
    """Each says what to give instead."""
    for uri, options, words in [
        ("s3://other/place", {"storage": filled}, "isn't in the storage"),
        ("/else", {"storage": filled}, "isn't in the storage"),
        ("../up", {"storage": filled}, "isn't in the storage"),
        (filled, {"storage": filled}, "leave out storage"),
        (str(tmp_path), {"region": "here"}, "is a folder; region"),
        ("train", {"storage": filled, "anonymous": True}, "along with a storage"),
        (filled, {"on_error": "ignore"}, "choose raise or skip"),
        (object(), {}, "can't be read from a object"),
    ]:
        with pytest.raises(InvalidParamsError, match=words):
            S3ImageFolder(uri, **options)


def test_a_uri_finds_its_credentials_as_awss_tools_do(filled, s3_server, monkeypatch):
    """Environment variables; without them, an error that says what to do."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    with pytest.raises(StorageError, match="there are no credentials"):
        S3ImageFolder(filled.uri, endpoint_url=s3_server.endpoint_url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", filled.access_key_id)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", filled.secret_access_key)
    dataset = S3ImageFolder(filled.uri, endpoint_url=s3_server.endpoint_url, region="us-east-1")
    assert colour_of(dataset[0][0]) == 0
    assert filled.secret_access_key.encode() not in pickle.dumps(dataset)


def test_image_folder_takes_torchvisions_own_for_a_path(filled, tmp_path):
    """A str, a Path, a storage, a folder in it; S3 gives ours; to skip, a folder is read by
    ours too."""
    theirs = as_local(filled, tmp_path / "images")
    for place, options in [
        (str(tmp_path / "images"), {}),
        (tmp_path / "images", {"index": tmp_path}),
        (DirectoryStorage(tmp_path / "images"), {"on_error": "raise"}),
        ("images", {"storage": DirectoryStorage(tmp_path)}),
    ]:
        dataset = image_folder(place, colour_of, **options)
        assert type(dataset) is ImageFolder
        assert dataset.samples == theirs.samples
        assert dataset[0] == (0, 0)
    assert type(image_folder(filled)) is S3ImageFolder
    local = image_folder(tmp_path / "images", colour_of, on_error="skip")
    assert type(local) is S3ImageFolder
    assert local.samples == theirs.samples
    assert local[0] == (0, 0)
    with pytest.raises(TypeError, match="no argument colour"):
        image_folder(tmp_path / "images", colour=1)


def test_a_folder_that_a_storage_wrote_has_no_class_of_unfinished_files(tmp_path):
    """Which torchvision alone would find, and refuse as empty."""
    storage = DirectoryStorage(tmp_path)
    storage.write("cat/1.png", png(9))
    assert (tmp_path / ".tmp").is_dir()
    dataset = image_folder(storage, colour_of)
    assert (dataset.class_to_idx, list(dataset)) == ({"cat": 0}, [(9, 0)])


def test_an_index_takes_the_place_of_the_listing(over_wire, tmp_path):
    """The same dataset with no request at all; also of a folder in what was indexed."""
    storage, wire = over_wire
    listed = S3ImageFolder(storage)
    assert write_index(storage, tmp_path) == NUM + 2
    before = len(wire.exchanges)
    dataset = S3ImageFolder(storage, index=tmp_path)
    assert dataset.samples == listed.samples
    assert dataset.targets == listed.targets
    assert S3ImageFolder("dog", storage=storage, index=tmp_path).classes == ["deep"]
    assert len(wire.exchanges) == before
    assert colour_of(dataset[0][0]) == 0
    assert len(wire.exchanges) == before + 1


# ---- Batches


def read_all(storage, num_workers, context):
    """Read all samples with the stock DataLoader, in a process that has read before; expect each
    once, with its own label."""
    dataset = S3ImageFolder(storage, colour_of)
    expected = sorted(dataset[i] for i in range(len(dataset)))
    assert len(expected) == NUM
    options = {"num_workers": num_workers, "multiprocessing_context": context}
    sampler = BatchSampler(RandomSampler(dataset), 5, drop_last=False)
    loader = DataLoader(dataset, batch_sampler=LookAhead(sampler, num_workers), **options)
    columns = ([column.tolist() for column in one] for one in loader)
    assert sorted(pair for one in columns for pair in zip(*one, strict=True)) == expected


@pytest.mark.parametrize(("num_workers", "context"), [(0, None), (2, "fork"), (1, "spawn")])
def test_a_dataloader_gives_each_sample_once_with_its_own_label(filled, num_workers, context):
    """The stock DataLoader, looking ahead, in any kind of process, after the parent has read
    itself."""
    read_all(filled, num_workers, context)


def test_each_sample_is_one_request_and_the_next_batch_is_read_meanwhile(over_wire):
    """The rank's loader in this process: nothing is read twice, nothing is left over, also when
    an epoch is left and resumed."""
    storage, wire = over_wire
    dataset = S3ImageFolder(storage, colour_of)
    before = wire.count("GET")
    loader = RankLoader(dataset, global_batch_size=5, rank=0, world_size=1, seed=3)
    whole = [colours.tolist() for (colours, _), _ in loader.lockstep(0)]
    assert wire.count("GET") == before + NUM
    resumed = [colours.tolist() for (colours, _), _ in loader.lockstep(0, 3)]
    assert resumed == whole[3:]
    begun = loader.lockstep(1)
    next(begun)
    del begun
    assert [colours.tolist() for (colours, _), _ in loader.lockstep(0)] == whole


def draw(image):
    """Augment by a random number."""
    return colour_of(image), torch.rand(()).item()


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_augmentation_depends_on_the_sample_alone(filled, on_error):
    """Whatever the world size and the batch, also where images may be skipped."""
    seen = []
    for size, world_size in ((8, 1), (6, 2)):
        numbers_of = {}
        for rank in range(world_size):
            dataset = S3ImageFolder(filled, draw, on_error=on_error)
            options = {"rank": rank, "world_size": world_size, "seed": 1, "num_workers": 1}
            for (colours, numbers), _ in RankLoader(dataset, global_batch_size=size, **options):
                numbers_of |= dict(zip(colours.tolist(), numbers.tolist(), strict=True))
        seen.append(numbers_of)
    assert len(seen[0]) == NUM
    assert seen[0] == seen[1]


# ---- What can't be read


def damage(storage):
    """Write half an image over the first one."""
    data = storage.read("cat/000.png")
    storage.write("cat/000.png", data[: len(data) // 2] + b"\0" * (len(data) - len(data) // 2))
    return storage


def strike(storage):
    """Delete the second image and put another into the third one's place."""
    storage.delete("cat/003.png")
    storage.write("cat/006.png", png(200))


def test_what_cannot_be_read_is_named(s3_server):
    """Corrupt, vanished, changed: never another image's label, never silence."""
    storage = damage(fill(s3_server.storage()))
    dataset = S3ImageFolder(storage)
    strike(storage)
    with pytest.raises(
        CorruptImageError, match=rf"{storage.uri}/cat/000.png can't be decoded: .*on_error='skip'"
    ):
        dataset[0]
    for index, kind in ((1, ObjectNotFoundError), (2, ObjectChangedError)):
        with pytest.raises(kind, match=f"cat/00{3 * index}.png"):
            dataset[index]
        with pytest.raises(kind, match=f"cat/00{3 * index}.png"):
            dataset.__getitems__([5, index, 6])


def test_what_is_skipped_is_counted_and_every_label_is_right(s3_server, caplog):
    """Batches are smaller by what is missing; the rank's loader says which samples came."""
    storage = damage(fill(s3_server.storage()))
    dataset = S3ImageFolder(storage, colour_of, on_error="skip")
    strike(storage)
    with caplog.at_level(logging.WARNING):
        samples = dataset.__getitems__(range(NUM))
    assert sorted(samples) == [(i, i % 3) for i in range(NUM) if i not in {0, 3, 6}]
    assert dataset.num_skipped == 3
    said = [line.partition(" skipped") for line in caplog.messages]
    assert [number for number, is_ours, _ in said if is_ours] == ["1", "2"]
    assert "cat/000.png can't be decoded" in caplog.text
    assert "cat/003.png" in caplog.text
    seen, came = [], []
    for (colours, targets), share in RankLoader(
        dataset, global_batch_size=8, rank=0, world_size=1, keep_ids=True
    ).lockstep(0):
        assert share.num_local == 8
        assert len(colours) == len(share.samples) == 8 - share.num_skipped
        seen += zip(colours.tolist(), targets.tolist(), strict=True)
        came += share.samples
    assert sorted(seen) == sorted(samples)
    assert sorted(came) == [i for i in range(NUM) if i not in (0, 1, 2)]
    with pytest.raises(CorruptImageError, match="no image of a batch is left"):
        dataset.__getitems__([0, 1, 2])
    with pytest.raises(InvalidParamsError, match="determinism='elastic'"):
        RankLoader(
            Subset(dataset, [1, 2]), global_batch_size=2, rank=0, world_size=1, virtual_ranks=2
        )


def test_a_storage_that_refuses_is_never_skipped(s3_server):
    """That is no fault of one image, and a training on nothing would be the answer."""
    storage = fill(s3_server.storage(), 6)
    dataset = S3ImageFolder(storage, on_error="skip")
    dataset._source = replace(storage, secret_access_key="wrong")
    with pytest.raises(StorageError, match="the secret is wrong"):
        dataset.__getitems__([0, 1, 2])
