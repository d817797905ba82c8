"""The objects of a checkpoint are read together, verified, and come back as they were saved."""

import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3

from prefect_torch_ddp.checkpoint import objects
from prefect_torch_ddp.checkpoint.manifest import Manifest, ManifestObject
from prefect_torch_ddp.checkpoint.objects import digest_of, read_states
from prefect_torch_ddp.checkpoint.serial import to_bytes
from prefect_torch_ddp.errors import CheckpointError
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.storage.protocol import Storage

STATES: dict[str, Any] = {
    "model": {"weight": torch.randn(2**20), "name": "text"},
    "optimizer": {"state": {0: {"exp_avg": torch.randn(7)}}, "groups": [{"lr": 0.1}]},
    "empty": {},
}


def written(storage: Storage, states: dict[str, Any] = STATES) -> Manifest:
    """Write states as a checkpoint's objects."""
    items = []
    for name, state in states.items():
        data = state if isinstance(state, bytes) else to_bytes(state)
        storage.write(f"{name}.pt", data)
        digest = digest_of(data)
        assert digest == blake3(data).hexdigest()
        items.append(ManifestObject(name, f"{name}.pt", len(data), digest))
    return Manifest("run", 3, 1, 1, {}, 1, {}, tuple(items))


def test_states_come_back_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that are large enough to be hashed by several threads."""
    storage = DirectoryStorage(tmp_path)
    manifest = written(storage)
    for large in (1, 2**40):
        monkeypatch.setattr(objects, "_LARGE_BYTES", large)
        states = read_states(storage, manifest, manifest.objects)
        assert states.keys() == STATES.keys()
        assert torch.equal(states["model"]["weight"], STATES["model"]["weight"])
        assert to_bytes(states["optimizer"]) == to_bytes(STATES["optimizer"])


class Bomb:
    """Makes a folder where somebody unpickles it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._folder),)


def test_a_pickle_in_a_checkpoint_is_refused(tmp_path: Path) -> None:
    """With the digest that belongs to it, by itself and as torch writes it; nothing of it runs."""
    storage, ran = DirectoryStorage(tmp_path / "store"), tmp_path / "ran"
    saved = io.BytesIO()
    torch.save({"weight": Bomb(ran)}, saved)
    for data in (pickle.dumps(Bomb(ran)), saved.getvalue()):
        manifest = written(storage, {"odd": data})
        with pytest.raises(CheckpointError, match=r"odd\.pt"):
            read_states(storage, manifest, manifest.objects)
    assert not ran.exists()
    pickle.loads(pickle.dumps(Bomb(ran)))
    assert ran.exists(), "it would have"


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("damage", ["flipped", "truncated", "longer", "missing"])
def test_what_is_damaged_is_named(tmp_path: Path, name: str, damage: str) -> None:
    """Whichever it is, and nothing of it is decoded."""
    storage = DirectoryStorage(tmp_path)
    manifest = written(storage)
    path = tmp_path / f"{name}.pt"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.unlink()
    if damage != "missing":
        path.write_bytes({"flipped": data, "truncated": data[:-1], "longer": data + b"\0"}[damage])
    reason = "missing" if damage == "missing" else "damaged"
    says = rf"step 3 of run run: its object {name}\.pt is {reason}"
    with pytest.raises(CheckpointError, match=says):
        read_states(storage, manifest, manifest.objects)
    odd = written(storage, {"odd": b"of another version of torch"})
    with pytest.raises(CheckpointError, match=r"odd\.pt is what was written, and this version of"):
        read_states(storage, odd, odd.objects)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried ..."),
        MemoryError(),
    ],
)
def test_want_of_memory_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Else the checkpoint before would be taken, and this one, which is whole, be void and
    deleted."""
    storage = DirectoryStorage(tmp_path)
    manifest = written(storage)

    def refuse(_data: object) -> None:
        raise error

    monkeypatch.setattr(objects, "from_bytes", refuse)
    with pytest.raises(type(error)) as raised:
        read_states(storage, manifest, manifest.objects)
    assert raised.value is error
