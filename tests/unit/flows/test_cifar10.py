"""CIFAR-10's prepare reads only the binary version and splits it once; the net fits its size."""

from pathlib import Path

import numpy as np
import pytest
import torch

from flows import cifar10
from prefect_torch_ddp import InvalidParamsError, RankContext
from tests.integration.data.image_files import write_cifar10


def prepare(source: Path, data: Path, **options: float) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Prepare into a folder; return images and targets of each split."""
    data.mkdir()
    with RankContext.local(data=data, source=source, options=options, stage="prepare") as ctx:
        cifar10.prepare(ctx)
    files = {path.stem: np.load(path, allow_pickle=False) for path in data.iterdir()}
    return {split: (file["images"], file["targets"]) for split, file in files.items()}


def test_each_image_is_in_one_split(tmp_path: Path) -> None:
    """As it is in the file; the test split is the test file's; a second time the same."""
    write_cifar10(tmp_path / "bin", 20)
    splits = prepare(tmp_path / "bin", tmp_path / "data", validation=0.2)
    sizes = {split: len(targets) for split, (_, targets) in splits.items()}
    assert sizes == {"train": 80, "val": 20, "test": 20}
    for images, targets in splits.values():
        assert images.shape[1:] == (3, 32, 32)
        assert (images[:, 0] == 25 * targets[:, None, None]).all(), "the first plane is red"
    assert np.bincount(splits["val"][1]).tolist() == [2] * 10
    learnt = {image.tobytes() for split in ("train", "val") for image in splits[split][0]}
    assert len(learnt) == 100
    assert not learnt & {image.tobytes() for image in splits["test"][0]}
    again = prepare(tmp_path / "bin", tmp_path / "again", validation=0.2)
    assert all((again[split][0] == images).all() for split, (images, _) in splits.items())


def test_pickles_are_not_read(tmp_path: Path) -> None:
    """The python version is refused by name, with the one to take."""
    (tmp_path / "py").mkdir()
    (tmp_path / "py/data_batch_1").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    says = r"has no data_batch_\*.bin; give the folder .*: pickles aren't read"
    with pytest.raises(InvalidParamsError, match=says):
        prepare(tmp_path / "py", tmp_path / "data")


@pytest.mark.parametrize("damage", [b"", b"\x00" * 3000, b"\x0b" + b"\x00" * 3072])
def test_a_damaged_file_is_named(tmp_path: Path, damage: bytes) -> None:
    """Empty, cut, or with a class that isn't one."""
    write_cifar10(tmp_path / "bin", 2)
    (tmp_path / "bin/data_batch_3.bin").write_bytes(damage)
    says = r"data_batch_3.bin in .*bin is damaged, or not of CIFAR-10's binary version"
    with pytest.raises(InvalidParamsError, match=says):
        prepare(tmp_path / "bin", tmp_path / "data")


def test_images_are_augmented_when_they_are_to_train(tmp_path: Path) -> None:
    """Another one each time; held-out ones stay."""
    write_cifar10(tmp_path / "bin", 2)
    prepare(tmp_path / "bin", tmp_path / "data")
    with RankContext.local(data=tmp_path / "data", seed=1) as ctx:
        learnt, held_out = cifar10.Images(ctx, "train", augmented=True), cifar10.Images(ctx, "val")
    assert len({learnt[0][0].numpy().tobytes() for _ in range(8)}) > 4
    assert torch.equal(held_out[0][0], held_out[0][0])
    assert learnt[0][0].shape == held_out[0][0].shape == (3, 32, 32)
