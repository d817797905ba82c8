"""Shows that the objects of a checkpoint are read together, verified, and come back as they were saved."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from prefect_torch_ddp.checkpoint.manifest import Manifest, ManifestObject
from prefect_torch_ddp.checkpoint.reading import read_states
from prefect_torch_ddp.checkpoint.serial import sha256_of, to_bytes
from prefect_torch_ddp.errors import CheckpointError
from prefect_torch_ddp.storage.directory import PART_BYTES, DirectoryStorage
from prefect_torch_ddp.storage.protocol import ShowsContent, Storage

STATES: dict[str, Any] = {
    "model": {"weight": torch.randn(3, PART_BYTES // 4), "name": "text"},
    "optimizer": {"state": {0: {"exp_avg": torch.randn(7)}}, "groups": [{"lr": 0.1}]},
    "empty": {},
}


@dataclasses.dataclass(frozen=True)
class WholeObjects:
    """A real storage behind the protocol's methods alone."""

    inner: Storage

    def read(self, key: str) -> bytes:
        """Read it."""
        return self.inner.read(key)


def written(storage: Storage) -> Manifest:
    """Write the states as a checkpoint's objects."""
    items = []
    for name, state in STATES.items():
        data = to_bytes(state)
        storage.write(f"{name}.pt", data)
        items.append(ManifestObject(name, f"{name}.pt", len(data), sha256_of(data)))
    return Manifest("run", 3, 1, 1, {}, 1, {}, tuple(items))


@pytest.mark.parametrize("kind", [lambda storage: storage, WholeObjects], ids=["in parts", "whole"])
def test_states_come_back_by_name(tmp_path: Path, kind: Any) -> None:
    """Also from a storage that gives whole objects only; larger ones than a part among them."""
    storage = kind(DirectoryStorage(tmp_path))
    assert isinstance(storage, ShowsContent) == (kind is not WholeObjects)
    manifest = written(DirectoryStorage(tmp_path))
    states = read_states(storage, manifest, manifest.objects)
    assert states.keys() == STATES.keys()
    assert torch.equal(states["model"]["weight"], STATES["model"]["weight"])
    assert to_bytes(states["optimizer"]) == to_bytes(STATES["optimizer"])


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("damage", ["flipped", "truncated", "longer", "missing"])
def test_what_is_damaged_is_named(tmp_path: Path, name: str, damage: str) -> None:
    """Whichever it is, and nothing of it is decoded."""
    manifest = written(DirectoryStorage(tmp_path))
    path = tmp_path / f"{name}.pt"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.unlink()
    if damage != "missing":
        path.write_bytes({"flipped": data, "truncated": data[:-1], "longer": data + b"\0"}[damage])
    says = rf"step 3 of run run: its object {name}\.pt is {'missing' if damage == 'missing' else 'damaged'}"
    with pytest.raises(CheckpointError, match=says):
        read_states(DirectoryStorage(tmp_path), manifest, manifest.objects)


def test_what_verifies_and_cannot_be_decoded_is_named_too(tmp_path: Path) -> None:
    """Such as what another version of torch wrote."""
    storage = DirectoryStorage(tmp_path)
    storage.write("odd.pt", b"no checkpoint")
    manifest = Manifest("run", 3, 1, 1, {}, 1, {}, (ManifestObject("odd", "odd.pt", 13, sha256_of(b"no checkpoint")),))
    with pytest.raises(CheckpointError, match=r"its object odd\.pt is what was written, and this version of torch can't read it"):
        read_states(storage, manifest, manifest.objects)
