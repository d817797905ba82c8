"""Land use: what plain PyTorch offers is there by an option each, and what can't work is
named."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from flows import land_use
from flows.land_use import Options, make_net
from prefect_torch_ddp import CorruptImageError, InvalidParamsError, RankContext, StorageError
from prefect_torch_ddp.storage.directory import DirectoryStorage
from tests.integration.data.image_files import write_images
from tests.support.records import read_records

CLASSES = ["field", "forest", "harbor"]


Prepared = tuple[Path, Path]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """Return the folder of JPEG images, and what prepare wrote."""
    source, data = (tmp_path_factory.mktemp(name) for name in ("images", "prepared"))
    write_images(DirectoryStorage(source), CLASSES, num_each=10)
    with RankContext.local(data=data, source=source, stage="prepare") as ctx:
        land_use.prepare(ctx)
    return source, data


def train(
    prepared: Prepared, storage: Path, **options: Any
) -> tuple[torch.Tensor, list[dict[str, float]]]:
    """Train squeezenet1_1; return the weights of its last layer and the metrics of each step."""
    source, data = prepared
    given = {"size": 32, "model": "squeezenet1_1", "epochs": 2, "global_batch_size": 12, "lr": 0.01}
    given |= options
    with RankContext.local(data=data, source=source, options=given, storage=storage, seed=1) as ctx:
        land_use.train(ctx)
        weights = ctx._assembly.tracked["model"].state_dict()
    metrics = [dict(record.metrics) for record in read_records(DirectoryStorage(storage), "local")]
    assert len(metrics) == 4
    assert torch.tensor([step["loss"] for step in metrics]).isfinite().all()
    return weights["classifier.1.weight"], metrics


def test_compiled_and_in_float16_it_learns_the_same(prepared: Prepared, tmp_path: Path) -> None:
    """By torch.compile, in place, the same weights by the same names: here with the backend that
    changes no bit. In float16 the loss is scaled by GradScaler, the gradient is clipped by its true
    norm, and the scale resumes."""
    head, plain = train(prepared, tmp_path / "plain")
    compiled_head, compiled = train(prepared, tmp_path / "compiled", compile="eager")
    assert torch.equal(compiled_head, head)
    assert compiled == plain
    _, (first, *_) = train(prepared, tmp_path / "float16", precision="float16")
    assert first["loss_scale"] >= 2**13
    assert first["loss"] == pytest.approx(plain[0]["loss"], rel=0.05)
    assert first["gradient_norm"] == pytest.approx(plain[0]["gradient_norm"], rel=0.25)


def test_held_out_images_are_the_same_share_of_each_class(prepared: Prepared) -> None:
    """Each image in one split; brought to one size, with three channels."""
    split = json.loads((prepared[1] / "split.json").read_text())
    assert split["classes"] == CLASSES
    assert sorted(split["train"] + split["test"]) == list(range(30))
    assert [sum(number // 10 == i for number in split["test"]) for i in range(3)] == [2, 2, 2]
    with RankContext.local(data=prepared[1], source=prepared[0], options={"size": 40}) as ctx:
        classes, images = land_use.images_of(ctx, "test")
    assert (classes, len(images)) == (CLASSES, 6)
    image, target = images[5]
    assert (image.shape, image.dtype, target) == ((3, 40, 40), torch.float32, 2)


def test_an_image_that_cannot_be_decoded_is_named(prepared: Prepared, tmp_path: Path) -> None:
    """The error has its place."""
    shutil.copytree(prepared[0], tmp_path / "images")
    (tmp_path / "images/forest/forest03.jpg").write_bytes(b"\xff\xd8 cut")
    with pytest.raises(CorruptImageError, match=r"forest/forest03.jpg can't be decoded"):
        train((tmp_path / "images", prepared[1]), tmp_path / "store")


def test_an_unknown_model_is_refused() -> None:
    """With those that there are."""
    says = r"model is 'resnet19', .* there are alexnet, .*resnet18"
    with pytest.raises(InvalidParamsError, match=says):
        make_net(Options(model="resnet19"), 21)


@pytest.mark.parametrize("model", ["googlenet", "mobilenet_v3_small"])
def test_other_models_have_as_many_classes(model: str) -> None:
    """Also those that torchvision gives auxiliary outputs."""
    assert make_net(Options(model=model), 21).train()(torch.zeros(2, 3, 64, 64)).shape == (2, 21)


def test_weights_are_taken_but_for_the_last_layer(tmp_path: Path) -> None:
    """From a file of ten classes for a model of three; those of another model are refused."""
    ten = make_net(Options(model="squeezenet1_1"), 10).state_dict()
    path = str(tmp_path / "ten.safetensors")
    safetensors.torch.save_file(ten, path)
    three = make_net(Options(model="squeezenet1_1", weights=path), 3).state_dict()
    assert torch.equal(three["features.0.weight"], ten["features.0.weight"])
    assert three["classifier.1.weight"].shape[0] == 3
    says = r"ten.safetensors has \d+ of the \d+ tensors of resnet18"
    with pytest.raises(InvalidParamsError, match=says):
        make_net(Options(weights=path), 3)


def test_weights_at_the_root_arent_those_of_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path that begins with a slash is read as it is; one without a slash is the folder's."""
    monkeypatch.chdir(tmp_path)
    net = make_net(Options(model="squeezenet1_1"), 3)
    safetensors.torch.save_file(net.state_dict(), "m.safetensors")
    make_net(Options(model="squeezenet1_1", weights="m.safetensors"), 3)
    with pytest.raises(StorageError, match=r"m.safetensors"):
        make_net(Options(model="squeezenet1_1", weights="/m.safetensors"), 3)
