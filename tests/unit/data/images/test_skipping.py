"""Images that can't be read and are to be skipped: what is left keeps its label and its weight,
whatever the shares."""

from pathlib import Path

import pytest
import torch
from torchvision.transforms.functional import pil_to_tensor

from prefect_torch_ddp.data.images.folder import S3ImageFolder
from prefect_torch_ddp.data.loader import RankLoader
from prefect_torch_ddp.errors import CorruptImageError
from prefect_torch_ddp.storage.directory import DirectoryStorage
from tests.integration.data.image_files import image_files, write_folder

OPTIONS = {"global_batch_size": 3, "seed": 1, "keep_ids": True}


@pytest.fixture
def damaged(tmp_path):
    """Give seven images, of which one is corrupt."""
    return damaged_images(tmp_path)


def damaged_images(tmp_path):
    """Return seven images, of which that in the tail of epoch 1 is corrupt, its number, and the
    same images whole."""
    files = image_files(7)
    whole = S3ImageFolder(DirectoryStorage(write_folder(tmp_path / "whole", files)), pil_to_tensor)
    (tail,) = [
        share.samples for _, share in RankLoader(whole, rank=0, world_size=1, **OPTIONS).lockstep(1)
    ][-1]
    root = write_folder(tmp_path / "damaged", files)
    (root / whole.samples[tail][0].removeprefix(f"{whole.root}/")).write_bytes(b"corrupt")
    return S3ImageFolder(DirectoryStorage(root), pil_to_tensor, on_error="skip"), tail, whole


def test_a_share_of_which_nothing_is_left_counts_for_nothing(damaged):
    """Three ranks, a tail of one corrupt image: all go on in lockstep; the others are used once
    each, with their labels."""
    dataset, tail, whole = damaged
    seen = []
    for rank in range(3):
        steps = list(RankLoader(dataset, rank=rank, world_size=3, **OPTIONS).lockstep(1))
        assert [share.batch for _, share in steps] == [0, 1, 2]
        for (images, labels), share in steps:
            counted = share.num_local - share.num_skipped
            assert counted == len(share.samples)
            assert len(images) == max(counted, 1)
            for image, label, number in zip(images, labels, share.samples, strict=bool(counted)):
                assert torch.equal(image, whole[number][0])
                assert label == whole[number][1]
                seen.append(number)
    assert sorted(seen) == [number for number in range(7) if number != tail]


def test_an_evaluation_never_counts_a_stand_in(damaged):
    """Plain iteration over all ranks gives each image that can be read once."""
    dataset, _, _ = damaged
    loaders = [RankLoader(dataset, rank=rank, world_size=3, **OPTIONS) for rank in range(3)]
    for loader in loaders:
        loader.epoch = 1
    assert sum(len(labels) for loader in loaders for _, labels in loader) == 6


def test_alone_an_empty_batch_is_an_error(damaged):
    """With one rank nobody's gradients would outweigh a stand-in's: the error names the
    image."""
    dataset, tail, _ = damaged
    with pytest.raises(CorruptImageError, match=dataset.samples[tail][0]):
        list(RankLoader(dataset, rank=0, world_size=1, **OPTIONS).lockstep(1))


def test_want_of_memory_is_never_skipped(damaged):
    """It is no fault of an image, and half a dataset would be left out."""
    _, _, whole = damaged

    def loader(file: object) -> None:
        raise MemoryError

    dataset = S3ImageFolder(DirectoryStorage(Path(whole.root)), on_error="skip", loader=loader)
    with pytest.raises(MemoryError):
        dataset.__getitems__([0, 1])
