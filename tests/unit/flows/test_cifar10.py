"""CIFAR-10's prepare reads both versions, runs no pickle's code, and splits them once."""

import pickle
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

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


def test_torchvisions_files_give_the_same_images(tmp_path: Path) -> None:
    """The python version, pickled in any protocol."""
    write_cifar10(tmp_path / "bin", 20)
    expected = prepare(tmp_path / "bin", tmp_path / "data")
    (tmp_path / "py").mkdir()
    for path in (tmp_path / "bin").iterdir():
        records = np.frombuffer(path.read_bytes(), np.uint8).reshape(-1, 3073)
        batch = {b"data": records[:, 1:], b"labels": records[:, 0].tolist(), b"batch_label": b"1"}
        (tmp_path / "py" / path.stem).write_bytes(pickle.dumps(batch, protocol=2))
    (tmp_path / "py/batches.meta").write_bytes(b"no part of it")
    (tmp_path / "py/data_batch_1.md5").write_bytes(b"no part of it either")
    found = prepare(tmp_path / "py", tmp_path / "from-py")
    for split, (images, targets) in expected.items():
        assert (found[split][0] == images).all()
        assert (found[split][1] == targets).all()


def test_a_pickle_runs_no_code(tmp_path: Path) -> None:
    """It is refused with the name of what it would run; so is one that is damaged."""
    (tmp_path / "py").mkdir()
    (tmp_path / "py/data_batch_1").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(InvalidParamsError, match=r"data_batch_1 is .*: it would run os.system"):
        prepare(tmp_path / "py", tmp_path / "data")
    (tmp_path / "py/data_batch_1").write_bytes(pickle.dumps({b"data": b""}))
    with pytest.raises(InvalidParamsError, match="data_batch_1 is damaged, or no file of"):
        prepare(tmp_path / "py", tmp_path / "again")


def test_both_versions_in_one_folder_are_refused(tmp_path: Path) -> None:
    """Each image would be there twice, and one of the two perhaps held out."""
    write_cifar10(tmp_path / "both", 2)
    for path in sorted((tmp_path / "both").iterdir()):
        records = np.frombuffer(path.read_bytes(), np.uint8).reshape(-1, 3073)
        batch = {b"data": records[:, 1:], b"labels": records[:, 0].tolist()}
        path.with_suffix("").write_bytes(pickle.dumps(batch))
    with pytest.raises(InvalidParamsError, match=r"both has data_batch_\* of both versions"):
        prepare(tmp_path / "both", tmp_path / "data")


def test_a_folder_without_it_is_refused(tmp_path: Path) -> None:
    """With both versions that can be given."""
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidParamsError, match=r"cifar-10-batches-bin, or cifar-10-batches-py"):
        prepare(tmp_path / "empty", tmp_path / "data")


def test_three_epochs_and_three_resumed_are_six(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit, with augmentation, dropout and validation, at a constant rate; here of a
    small net."""
    layers = (nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    small = (*layers, nn.Dropout(0.5), nn.Linear(4, 10))
    monkeypatch.setattr(cifar10, "make_net", lambda: nn.Sequential(*deepcopy(small)))
    write_cifar10(tmp_path / "bin", 6)
    prepare(tmp_path / "bin", tmp_path / "data")

    def train(name: str, epochs: int, resume_from: str | None = None) -> dict[str, torch.Tensor]:
        options = {"epochs": epochs, "schedule": "constant", "global_batch_size": 10}
        with RankContext.local(
            data=tmp_path / "data",
            options=options,
            storage=tmp_path / "store",
            run_id=name,
            resume_from=resume_from,
            seed=1,
        ) as ctx:
            cifar10.train(ctx)
            state = ctx._assembly.tracked["model"].state_dict()
            return {name: value.clone() for name, value in state.items()}

    train("half", 3)
    resumed, straight = train("rest", 6, "half"), train("straight", 6)
    assert all(torch.equal(resumed[name], straight[name]) for name in straight)


@pytest.mark.parametrize("damage", [b"", b"\x00" * 3000, b"\x0b" + b"\x00" * 3072])
def test_a_damaged_file_is_named(tmp_path: Path, damage: bytes) -> None:
    """Empty, cut, or with a class that isn't one."""
    write_cifar10(tmp_path / "bin", 2)
    (tmp_path / "bin/data_batch_3.bin").write_bytes(damage)
    says = r"data_batch_3.bin in .*bin is damaged, or not of CIFAR-10"
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
