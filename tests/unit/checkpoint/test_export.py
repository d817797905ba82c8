"""A finished training's model is exported once, by the newest attempt, as a file that plain
PyTorch loads."""

import hashlib
import io
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, load_file
from torch import nn

from prefect_torch_ddp.checkpoint.attempts import claim_attempt, newest_attempt
from prefect_torch_ddp.checkpoint.export import export_model, weights_file
from prefect_torch_ddp.checkpoint.keys import attempts_prefix, object_key
from prefect_torch_ddp.checkpoint.manifest import Manifest, ManifestObject
from prefect_torch_ddp.checkpoint.objects import digest_of
from prefect_torch_ddp.checkpoint.serial import from_bytes, to_bytes
from prefect_torch_ddp.errors import CheckpointError, SupersededError
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.storage.protocol import Storage
from tests.support.forwarding import WatchedStorage

ABOUT = {"workload": "prefect_torch_ddp.examples.digits", "options": {"lr": 0.1}, "seed": 3}


def checkpoint(storage: Storage, attempt: int, value: float = 1.0) -> Manifest:
    """Write a checkpoint's model of one weight, by an attempt."""
    data = to_bytes({"weight": torch.full((2, 2), value), "bias": torch.zeros(2)})
    key = object_key("run", 4, attempt, "model")
    storage.write(key, data)
    item = ManifestObject("model", key, len(data), digest_of(data))
    metrics = {"loss": 0.5, "other": math.nan}
    return Manifest("run", 4, attempt, 2, {}, 1, metrics, (item,))


def card_in(folder: Path) -> dict[str, Any]:
    """Read the card, which must be JSON by the standard."""
    text = (folder / "runs/run/model/model.json").read_bytes()
    card: dict[str, Any] = json.loads(text, parse_constant=pytest.fail)
    return card


def test_weights_and_a_card_of_plain_json(tmp_path: Path) -> None:
    """In the run's folder `model`, the card with all that a reader of the weights may ask
    for."""
    storage = DirectoryStorage(tmp_path)
    attempt = claim_attempt(storage, "run")
    uri = export_model(storage, checkpoint(storage, attempt), "model", attempt, ABOUT)
    assert uri == f"{tmp_path}/runs/run/model/model.safetensors"
    torch.nn.Linear(2, 2).load_state_dict(load_file(uri))
    assert card_in(tmp_path) == ABOUT | {
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


def test_a_card_takes_every_option(tmp_path: Path) -> None:
    """What JSON has no word for becomes text: after a whole training nothing may fail for
    that."""
    storage = DirectoryStorage(tmp_path)
    attempt = claim_attempt(storage, "run")
    about = {"options": {"max_norm": math.inf, 3: [math.nan, (1, Path("x"))]}}
    export_model(storage, checkpoint(storage, attempt), "model", attempt, about)
    assert card_in(tmp_path)["options"] == {"max_norm": "inf", "3": ["nan", [1, "x"]]}


def test_the_same_weights_stand_and_others_get_a_folder_of_their_own(tmp_path: Path) -> None:
    """A later attempt that adds nothing finds the model there; one that trained on leaves the
    first one's as it is."""
    storage = DirectoryStorage(tmp_path)
    first = claim_attempt(storage, "run")
    found = checkpoint(storage, first)
    uri = export_model(storage, found, "model", first, ABOUT)
    before = {path: (path.stat().st_ino, path.read_bytes()) for path in Path(uri).parent.iterdir()}
    second = claim_attempt(storage, "run")
    assert export_model(storage, found, "model", second, ABOUT) == uri
    third = claim_attempt(storage, "run")
    other = export_model(storage, checkpoint(storage, third, 2.0), "model", third, ABOUT)
    assert other == f"{tmp_path}/runs/run/model/000003/model.safetensors"
    assert json.loads(Path(other).with_name("model.json").read_bytes())["attempt"] == 3
    assert before == {path: (path.stat().st_ino, path.read_bytes()) for path in before}


def test_a_model_without_its_card_is_completed(tmp_path: Path) -> None:
    """As an attempt leaves it that is killed between the two."""
    storage = DirectoryStorage(tmp_path)
    attempt = claim_attempt(storage, "run")
    found = checkpoint(storage, attempt)
    uri = export_model(storage, found, "model", attempt, ABOUT)
    card = Path(uri).with_name("model.json")
    text = card.read_bytes()
    card.unlink()
    assert export_model(storage, found, "model", claim_attempt(storage, "run"), ABOUT) == uri
    assert card.read_bytes() == text


def test_damage_is_named(tmp_path: Path) -> None:
    """Nothing is exported of an object that isn't what was written, or isn't there."""
    storage = DirectoryStorage(tmp_path)
    attempt = claim_attempt(storage, "run")
    found = checkpoint(storage, attempt)
    with pytest.raises(CheckpointError, match="step 4 of run run has no object 'net' to export"):
        export_model(storage, found, "net", attempt, ABOUT)
    damaged = replace(found, objects=(replace(found.objects[0], digest="0" * 64),))
    with pytest.raises(CheckpointError, match=r"000001/model.pt is damaged"):
        export_model(storage, damaged, "model", attempt, ABOUT)
    assert not (tmp_path / "runs/run/model").exists()


@pytest.mark.parametrize(
    "where", ["write_if_absent runs/run/model/model.safetensors", f"list {attempts_prefix('run')}"]
)
def test_an_older_attempt_that_was_held_up_changes_nothing(tmp_path: Path, where: str) -> None:
    """Right before it looks for newer attempts, or right after; the newer one's model stays."""
    storage = DirectoryStorage(tmp_path)
    old = claim_attempt(storage, "run")
    left: dict[Path, bytes] = {}

    def export_as_newer(request: str) -> None:
        if request != where or newest_attempt(storage, "run") > old:
            return
        new = claim_attempt(storage, "run")
        uri = export_model(storage, checkpoint(storage, new, 2.0), "model", new, ABOUT)
        left.update({path: path.read_bytes() for path in Path(uri).parent.glob("model.*")})

    held_up = WatchedStorage(storage, export_as_newer)
    with pytest.raises(SupersededError):
        export_model(held_up, checkpoint(storage, old), "model", old, ABOUT)
    folder = tmp_path / "runs/run/model"
    assert left == {path: path.read_bytes() for path in folder.iterdir()}
    assert len(left) == 2


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
        """Return it."""
        return {"version": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        """Take it back."""
        assert state == {"version": 3}


def file_of(state: Any) -> tuple[str, bytes]:
    """Make the file of a state as a checkpoint holds it."""
    return weights_file(from_bytes(to_bytes(state)), to_bytes(state))


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
    name, data = file_of(module.state_dict())
    assert name == "model.safetensors"
    state = load(data)
    assert {name: value.dtype for name, value in state.items()} == {
        name: v.dtype for name, v in module.state_dict().items()
    }
    other = made()
    for name, buffer in list(other.named_buffers(recurse=False)):
        other.register_buffer(name, buffer.clone())  # an expanded one can't be written to
    other.load_state_dict(state)
    for key, value in module.state_dict().items():
        assert torch.equal(other.state_dict()[key], value), key


def test_the_same_state_is_the_same_file() -> None:
    """Byte by byte, so that equal weights are seen by their digests."""
    state = nn.Linear(3, 2).state_dict()
    assert file_of(state) == file_of(
        {name: value.clone() for name, value in reversed(state.items())}
    )


@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")
@pytest.mark.parametrize(
    ("state", "says"),
    [
        (WithConfiguration(3, 2).state_dict(), "'_extra_state' in its state is a dict"),
        (
            {"weight": torch.eye(3).to_sparse()},
            "'weight' in its state is a Tensor and no plain, dense tensor",
        ),
        ({3: torch.zeros(1)}, "3 in its state is a Tensor"),
        ([torch.zeros(1)], "its state is a list"),
        ({"weight": torch.zeros(2, dtype=torch.complex128)}, "safetensors refuses it"),
    ],
    ids=["extra state", "sparse", "no text for a name", "no dict", "unknown dtype"],
)
def test_what_safetensors_cannot_hold_is_left_for_torch_load(
    state: Any, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As the checkpoint has it, with the reason in the log."""
    name, data = file_of(state)
    assert name == "model.pt"
    assert says in caplog.text
    again = torch.load(io.BytesIO(data), weights_only=True)
    assert type(again) is type(state)
    assert len(again) == len(state)


def test_without_safetensors_there_is_the_other_way(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On machines where it isn't installed."""
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    module = nn.Linear(3, 2)
    name, data = file_of(module.state_dict())
    assert name == "model.pt"
    assert "safetensors is not installed here" in caplog.text
    nn.Linear(3, 2).load_state_dict(torch.load(io.BytesIO(data), weights_only=True))
