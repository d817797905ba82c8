"""A finished training's models are exported as files that plain PyTorch loads."""

import hashlib
import io
import json
import math
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, load_file
from torch import nn

from prefect_torch_ddp.checkpoint.attempts import claim_attempt
from prefect_torch_ddp.checkpoint.export import export_models, weights_file
from prefect_torch_ddp.checkpoint.keys import object_key
from prefect_torch_ddp.checkpoint.manifest import Manifest, ManifestObject
from prefect_torch_ddp.checkpoint.state.objects import content_digest
from prefect_torch_ddp.checkpoint.state.serial import from_bytes, to_bytes
from prefect_torch_ddp.errors import CheckpointError, SupersededError
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.storage.formats import CARD
from prefect_torch_ddp.storage.protocol import Storage

ABOUT = {"workload": "prefect_torch_ddp.examples.digits", "options": {"lr": 0.1}, "seed": 3}


def checkpoint(storage: Storage, attempt: int) -> Manifest:
    """Write a checkpoint's model of one weight, by an attempt."""
    data = to_bytes({"weight": torch.ones(2, 2), "bias": torch.zeros(2)})
    key = object_key("run", 4, attempt, "model")
    storage.write(key, data)
    item = ManifestObject("model", key, len(data), content_digest(data))
    metrics = {"loss": 0.5, "other": math.nan}
    return Manifest("run", 4, attempt, 2, {}, 1, metrics, (item,))


def test_weights_and_a_card_of_plain_json(tmp_path: Path) -> None:
    """The card in the attempt's folder is plain JSON, with text for values that JSON lacks."""
    storage = DirectoryStorage(tmp_path)
    attempt = claim_attempt(storage, "run")
    about = {**ABOUT, "options": {"max_norm": math.inf, 3: [math.nan, (1, Path("x"))]}}
    uris = export_models(storage, checkpoint(storage, attempt), ["model"], attempt, about)
    uri = f"{tmp_path}/runs/run/models/000001/model.safetensors"
    assert uris == {"model": uri}
    torch.nn.Linear(2, 2).load_state_dict(load_file(uri))
    text = Path(uri).with_suffix(".json").read_bytes()
    assert json.loads(text, parse_constant=pytest.fail) == CARD.stamp(ABOUT) | {
        "options": {"max_norm": "inf", "3": ["nan", [1, "x"]]},
        "file": "model.safetensors",
        "sha256": hashlib.sha256(Path(uri).read_bytes()).hexdigest(),
        "num_bytes": Path(uri).stat().st_size,
        "num_tensors": 2,
        "num_parameters": 6,
        "tracked_as": "model",
        "run_id": "run",
        "step": 4,
        "epoch": 2,
        "attempt": 1,
        "world_size": 1,
        "metrics": {"loss": 0.5, "other": "nan"},
    }


def test_each_attempt_has_a_folder_of_its_own(tmp_path: Path) -> None:
    """One that is held up after its look for newer ones changes nothing of theirs; one that
    looks later exports nothing."""
    storage = DirectoryStorage(tmp_path)
    old, new = (claim_attempt(storage, "run") for _ in range(2))
    uris = export_models(storage, checkpoint(storage, old), ["model"], new, ABOUT)
    assert uris == {"model": f"{tmp_path}/runs/run/models/000002/model.safetensors"}
    with pytest.raises(SupersededError):
        export_models(storage, checkpoint(storage, old), ["model"], old, ABOUT)
    assert [path.name for path in (tmp_path / "runs/run/models").iterdir()] == ["000002"]


def test_damage_is_named(tmp_path: Path) -> None:
    """Nothing is exported of an object that isn't what was written, or isn't there."""
    storage = DirectoryStorage(tmp_path)
    attempt = claim_attempt(storage, "run")
    found = checkpoint(storage, attempt)
    with pytest.raises(CheckpointError, match="step 4 of run run has no object 'net' to export"):
        export_models(storage, found, ["net"], attempt, ABOUT)
    damaged = replace(found, objects=(replace(found.objects[0], digest="0" * 64),))
    with pytest.raises(CheckpointError, match=r"000001/model.pt is damaged"):
        export_models(storage, damaged, ["model"], attempt, ABOUT)
    assert not (tmp_path / "runs/run/models").exists()


class Tied(nn.Module):
    """An embedding whose weights are the output's too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 3)
        self.output = nn.Linear(3, 7, bias=False)
        self.output.weight = self.embedding.weight


class Odd(nn.Module):
    """Tensors of kinds that files of weights seldom hold."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("phase", torch.randn(3, dtype=torch.complex64))
        self.register_buffer("bfloat", torch.randn(3).to(torch.bfloat16))
        self.register_buffer("none", torch.zeros(0, 4))
        self.register_buffer("also_none", torch.zeros(0, 4))
        self.register_buffer("count", torch.tensor(2**40))
        self.register_buffer("turned", torch.randn(4, 3).t())
        self.register_buffer("row", torch.randn(4, 3)[1])
        self.register_buffer("spread", torch.randn(1, 3).expand(4, 3))
        self.register_buffer("conjugate", torch.randn(3, dtype=torch.complex64).conj())


class WithConfiguration(nn.Linear):
    """A module with state that is no tensor."""

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"version": 3}


def file_of(state: Any) -> tuple[str, bytes]:
    """Make the file of a state as a checkpoint holds it."""
    return weights_file("model", from_bytes(to_bytes(state)))


@pytest.mark.parametrize(
    "made",
    [
        pytest.param(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), id="buffers"),
        pytest.param(
            lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), id="channels last"
        ),
        pytest.param(Tied, id="tied weights"),
        pytest.param(Odd, id="odd dtypes and layouts"),
    ],
)
def test_every_value_comes_back_by_load_state_dict(made: Any) -> None:
    """Into a new module, strictly, to the last bit."""
    module = made()
    suffix, data = file_of(module.state_dict())
    assert suffix == ".safetensors"
    state = load(data)
    assert {name: value.dtype for name, value in state.items()} == {
        name: value.dtype for name, value in module.state_dict().items()
    }
    other = made()
    for name, buffer in list(other.named_buffers(recurse=False)):
        other.register_buffer(name, buffer.clone())  # an expanded one can't be written to
    other.load_state_dict(state)
    for key, value in module.state_dict().items():
        assert torch.equal(other.state_dict()[key], value), key


@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")
@pytest.mark.parametrize(
    "state",
    [
        WithConfiguration(3, 2).state_dict(),
        {"weight": torch.eye(3).to_sparse()},
        {3: torch.zeros(1)},
        [torch.zeros(1)],
        {"weight": torch.zeros(2, dtype=torch.complex128)},
    ],
    ids=["extra state", "sparse", "no text for a name", "no dict", "unknown dtype"],
)
def test_what_safetensors_cannot_hold_is_left_for_torch_load(
    state: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """As the checkpoint has it, with the reason in the log."""
    suffix, data = file_of(state)
    assert suffix == ".pt"
    assert "since safetensors can't hold it: " in caplog.text
    again = torch.load(io.BytesIO(data), weights_only=True)
    assert type(again) is type(state)
    assert len(again) == len(state)
    assert zipfile.ZipFile(io.BytesIO(data)).testzip() is None, "also for other programs"
