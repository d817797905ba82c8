"""The digits' prepare: every image once, in one of three splits that are fixed by the
options."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits
from torchvision.datasets import ImageFolder

from prefect_torch_ddp import InvalidParamsError, RankContext
from prefect_torch_ddp.examples import digits

SPLITS = ("train", "val", "test")


def prepared(folder: Path, **options: Any) -> dict[str, list[str]]:
    """Prepare into a folder; return each split's files by the number of their image."""
    folder.mkdir()
    with RankContext.local(data=folder, options=options, stage="prepare") as ctx:
        digits.prepare(ctx)
    return {
        split: sorted(path.stem for path in (folder / split).rglob("*.png")) for split in SPLITS
    }


def bytes_in(data: Path) -> list[bytes]:
    """Return the content of all images."""
    return [path.read_bytes() for path in sorted(data.rglob("*.png"))]


def test_each_image_is_in_exactly_one_split_and_again_in_the_same(tmp_path: Path) -> None:
    """No leak: 1,797 images, a fifth held out of each class, a tenth of the rest for validation.
    The pixels are scikit-learn's, in the folder of their digit. The same options, the same data;
    another split_seed or held_out, another split."""
    folder = tmp_path / "data"
    splits = prepared(folder)
    assert [len(splits[split]) for split in SPLITS] == [1294, 144, 359]
    names = sorted(name for names in splits.values() for name in names)
    assert names == [f"{i:04}" for i in range(1797)]
    bundled = load_digits()
    for split in SPLITS:
        images = ImageFolder(folder / split)
        assert images.classes == digits.CLASSES
        for path, target in images.samples:
            number = int(Path(path).stem)
            assert bundled.target[number] == target
            with Image.open(path) as image:
                assert np.allclose(np.asarray(image) / 255 * 16, bundled.images[number], atol=0.04)
    held_out = np.bincount(ImageFolder(folder / "test").targets) / np.bincount(bundled.target)
    assert np.all(np.abs(held_out - 0.2) < 0.01)

    assert prepared(tmp_path / "again") == splits
    assert bytes_in(tmp_path / "again") == bytes_in(folder)
    assert prepared(tmp_path / "seeded", split_seed=1)["test"] != splits["test"]
    assert len(prepared(tmp_path / "half", held_out=0.5)["test"]) == 898


@pytest.mark.parametrize("stage", [digits.prepare, digits.train])
def test_a_misspelt_option_is_named(stage: Any, tmp_path: Path) -> None:
    """Rather than ignored: the error lists the options that there are."""
    with (
        RankContext.local(data=tmp_path, options={"epoch": 3}) as ctx,
        pytest.raises(InvalidParamsError, match=r"did you mean epochs\?; there are held_out,"),
    ):
        stage(ctx)
