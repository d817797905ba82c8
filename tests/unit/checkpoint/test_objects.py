"""Shows that the objects of a checkpoint are read together, verified, and come back as they
were saved."""

import dataclasses
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from prefect_torch_ddp.checkpoint import objects
from prefect_torch_ddp.checkpoint.manifest import Manifest, ManifestObject
from prefect_torch_ddp.checkpoint.objects import NUM_AHEAD, digest_of, read_states
from prefect_torch_ddp.checkpoint.restore import Restorer
from prefect_torch_ddp.checkpoint.serial import to_bytes
from prefect_torch_ddp.errors import CheckpointError
from prefect_torch_ddp.storage.directory import PART_BYTES, DirectoryStorage
from prefect_torch_ddp.storage.directory_objects import is_local
from prefect_torch_ddp.storage.protocol import HasFiles, ShowsContent, Storage

PARTS_OF_DIGEST = 2 * objects.PART_BYTES // 8 + 1
"""So many numbers are two parts of a digest and a little."""
STATES: dict[str, Any] = {
    "model": {"weight": torch.randn(3, PART_BYTES // 4), "name": "text"},
    "optimizer": {"state": {0: {"exp_avg": torch.randn(7)}}, "groups": [{"lr": 0.1}]},
    "long": {"weight": torch.randn(PARTS_OF_DIGEST, dtype=torch.float64)},
    "empty": {},
}


@dataclasses.dataclass(frozen=True)
class WholeObjects:
    """A real storage behind the protocol's methods alone."""

    inner: Storage

    def read(self, key: str) -> bytes:
        """Read it."""
        return self.inner.read(key)


@dataclasses.dataclass(frozen=True)
class InParts(WholeObjects):
    """The same, which shows what it reads; so does a directory on a file system of another
    machine."""

    def read_seen(self, key: str, see: Callable[[memoryview], object]) -> memoryview:
        """Read it."""
        assert isinstance(self.inner, ShowsContent)
        return self.inner.read_seen(key, see)


def written(storage: Storage) -> Manifest:
    """Write the states as a checkpoint's objects."""
    items = []
    for name, state in STATES.items():
        data = to_bytes(state)
        storage.write(f"{name}.pt", data)
        items.append(ManifestObject(name, f"{name}.pt", len(data), digest_of(data)))
    return Manifest("run", 3, 1, 1, {}, 1, {}, tuple(items))


KINDS: dict[str, Any] = {
    "mapped": lambda storage: storage,
    "in parts": InParts,
    "whole": WholeObjects,
}


@pytest.mark.parametrize("kind", KINDS)
def test_states_come_back_by_name(tmp_path: Path, kind: str) -> None:
    """From files, from a storage that shows what it reads, from one that gives whole objects;
    some are larger than a part."""
    storage = KINDS[kind](DirectoryStorage(tmp_path))
    assert isinstance(storage, HasFiles) == (kind == "mapped")
    assert isinstance(storage, ShowsContent) == (kind != "whole")
    manifest = written(DirectoryStorage(tmp_path))
    read = read_states(storage, manifest, manifest.objects)
    assert {item.is_mapped for item in read.values()} == {kind == "mapped"}
    for states in (
        {name: item.state for name, item in read.items()},
        {name: item.to_keep() for name, item in read.items()},
    ):
        assert states.keys() == STATES.keys()
        assert torch.equal(states["model"]["weight"], STATES["model"]["weight"])
        assert torch.equal(states["long"]["weight"], STATES["long"]["weight"])
        assert to_bytes(states["optimizer"]) == to_bytes(STATES["optimizer"])
    kept = read_states(storage, manifest, manifest.objects, {"model"})
    assert [name for name, item in kept.items() if not item.is_mapped] == (
        ["model"] if kind == "mapped" else list(kept)
    )
    assert torch.equal(kept["model"].to_keep()["weight"], STATES["model"]["weight"])


def test_nobody_keeps_a_deleted_checkpoint_mapped(tmp_path: Path) -> None:
    """An optimizer keeps the tensors that it is given; were they the file, its room on the disk
    would not be free for as long."""
    storage = DirectoryStorage(tmp_path)
    model = torch.nn.Linear(300, 300)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 300)).sum().backward()
    optimizer.step()
    items = {"model": model, "optimizer": optimizer}
    expected = to_bytes([model.state_dict(), optimizer.state_dict()])
    objects = []
    for name, item in items.items():
        data = to_bytes(item.state_dict())
        storage.write(f"{name}.pt", data)
        objects.append(ManifestObject(name, f"{name}.pt", len(data), digest_of(data)))
    manifest = Manifest("run", 3, 1, 1, {}, 1, {}, tuple(objects))
    optimizer.step()
    restorer = Restorer(storage, manifest, read_states(storage, manifest, manifest.objects))
    assert str(tmp_path) in Path("/proc/self/maps").read_text()
    for name, item in items.items():
        storage.delete(f"{name}.pt")
        restorer.restore(name, item)
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    assert to_bytes([model.state_dict(), optimizer.state_dict()]) == expected


def test_a_thousand_ranks_generators_are_not_a_thousand_open_files(tmp_path: Path) -> None:
    """Each rank has an object, and a process may have 1,024 files open by default; want of them
    was taken for damage."""
    storage, data = DirectoryStorage(tmp_path), to_bytes({})
    names = [f"rank-{rank:05d}" for rank in range(3 * NUM_AHEAD)]
    for name in names:
        storage.write(f"{name}.pt", data)
    objects = tuple(
        ManifestObject(name, f"{name}.pt", len(data), digest_of(data)) for name in names
    )
    open_now = len(list(Path("/proc/self/fd").iterdir()))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_now + 2 * NUM_AHEAD, hard))
    try:
        assert read_states(
            storage, Manifest("run", 3, 1, 1, {}, 1, {}, objects), objects
        ).keys() == set(names)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    (tmp_path / f"{names[NUM_AHEAD + 3]}.pt").unlink()
    with pytest.raises(CheckpointError, match="missing"):
        read_states(storage, Manifest("run", 3, 1, 1, {}, 1, {}, objects), objects)
    assert len(list(Path("/proc/self/fd").iterdir())) == open_now


def test_only_a_file_system_of_this_machine_is_mapped(tmp_path: Path) -> None:
    """What isn't known as one, isn't: the kernel's own here, as NFS elsewhere."""
    assert is_local(tmp_path)
    assert not is_local(Path("/proc"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("damage", ["flipped", "truncated", "longer", "missing"])
def test_what_is_damaged_is_named(tmp_path: Path, name: str, damage: str, kind: str) -> None:
    """Whichever it is, and nothing of it is decoded."""
    manifest = written(DirectoryStorage(tmp_path))
    path = tmp_path / f"{name}.pt"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.unlink()
    storage = KINDS[kind](DirectoryStorage(tmp_path))
    if damage != "missing":
        path.write_bytes({"flipped": data, "truncated": data[:-1], "longer": data + b"\0"}[damage])
    says = rf"step 3 of run run: its object {name}\.pt is {'missing' if damage == 'missing' else 'damaged'}"
    with pytest.raises(CheckpointError, match=says):
        read_states(storage, manifest, manifest.objects)


def test_what_verifies_and_cannot_be_decoded_is_named_too(tmp_path: Path) -> None:
    """Such as what another version of torch wrote."""
    storage = DirectoryStorage(tmp_path)
    storage.write("odd.pt", b"no checkpoint")
    manifest = Manifest(
        "run",
        3,
        1,
        1,
        {},
        1,
        {},
        (ManifestObject("odd", "odd.pt", 13, digest_of(b"no checkpoint")),),
    )
    with pytest.raises(
        CheckpointError,
        match=r"its object odd\.pt is what was written, and this version of torch can't read it",
    ):
        read_states(storage, manifest, manifest.objects)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(
            "unable to mmap 100001577 bytes from file </proc/self/fd/4>: Cannot allocate memory (12)"
        ),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried ..."
        ),
        RuntimeError(
            "unable to open file </proc/self/fd/4> in read-only mode: Too many open files (24)"
        ),
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

    def refuse(_file: object) -> None:
        raise error

    monkeypatch.setattr(objects, "from_file", refuse)
    with pytest.raises(type(error)) as raised:
        read_states(storage, manifest, manifest.objects)
    assert raised.value is error
