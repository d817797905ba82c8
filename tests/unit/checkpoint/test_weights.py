"""Shows which file a model's state becomes, and that plain PyTorch gets back what was
trained."""

import io
import sys
from typing import Any

import pytest
import torch
from safetensors.torch import load
from torch import nn

from prefect_torch_ddp.checkpoint.export import weights_file
from prefect_torch_ddp.checkpoint.serial import from_bytes, to_bytes


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
