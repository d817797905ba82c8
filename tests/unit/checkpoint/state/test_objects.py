"""The objects of a checkpoint are read together, verified, and come back as they were saved."""

import io
import os
import pickle
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3

from prefect_torch_ddp.checkpoint.manifest import Manifest, ManifestObject
from prefect_torch_ddp.checkpoint.restore import Restorer
from prefect_torch_ddp.checkpoint.state import objects
from prefect_torch_ddp.checkpoint.state.objects import (
    NUM_THREADS,
    PIECE_BYTES,
    content_digest,
    is_local,
    read_states,
)
from prefect_torch_ddp.checkpoint.state.serial import to_bytes
from prefect_torch_ddp.errors import CheckpointError, NewerFormatError
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.storage.protocol import Storage
from tests.support.forwarding import ForwardingStorage

STATES: dict[str, Any] = {
    "model": {"weight": torch.randn(PIECE_BYTES // 2), "name": "text"},
    "optimizer": {"state": {0: {"exp_avg": torch.randn(7)}}, "groups": [{"lr": 0.1}]},
    "empty": {},
}
KINDS: dict[str, Any] = {"mapped": lambda storage: storage, "whole": ForwardingStorage}


def written(storage: Storage, states: dict[str, Any] = STATES) -> Manifest:
    """Write states as a checkpoint's objects; the one called model is a module's."""
    items = []
    for name, state in states.items():
        data = state if isinstance(state, bytes) else to_bytes(state)
        storage.write(f"{name}.pt", data)
        digest = content_digest(data)
        assert digest == blake3(data).hexdigest()
        items.append(ManifestObject(name, f"{name}.pt", len(data), digest, name == "model"))
    return Manifest("run", 3, 1, 1, {}, 1, {}, tuple(items))


@pytest.mark.parametrize("large", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_states_come_back_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, large: bool
) -> None:
    """From files and from a storage that gives whole objects; some are larger than a piece, and
    may be hashed by several threads."""
    monkeypatch.setattr(objects, "_LARGE_BYTES", 1 if large else 2**40)
    storage = KINDS[kind](DirectoryStorage(tmp_path))
    manifest = written(DirectoryStorage(tmp_path))
    states = read_states(storage, manifest, manifest.objects)
    assert states.keys() == STATES.keys()
    assert torch.equal(states["model"]["weight"], STATES["model"]["weight"])
    assert to_bytes(states["optimizer"]) == to_bytes(STATES["optimizer"])
    maps = Path("/proc/self/maps").read_text()
    assert (f"{tmp_path}/model.pt" in maps) == (kind == "mapped")
    assert f"{tmp_path}/optimizer.pt" not in maps


class Bomb:
    """Makes a folder where somebody unpickles it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._folder),)


@pytest.mark.parametrize("kind", KINDS)
def test_a_pickle_in_a_checkpoint_is_refused(tmp_path: Path, kind: str) -> None:
    """With the digest that belongs to it, by itself and as torch writes it; nothing of it runs."""
    storage, ran = KINDS[kind](DirectoryStorage(tmp_path / "store")), tmp_path / "ran"
    saved = io.BytesIO()
    torch.save({"weight": Bomb(ran)}, saved)
    for data in (pickle.dumps(Bomb(ran)), saved.getvalue()):
        manifest = written(storage, {"odd": data})
        with pytest.raises(NewerFormatError, match=r"odd\.pt"):
            read_states(storage, manifest, manifest.objects)
    assert not ran.exists()
    pickle.loads(pickle.dumps(Bomb(ran)))
    assert ran.exists(), "it would have"


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
    manifest = written(storage, {name: item.state_dict() for name, item in items.items()})
    optimizer.step()
    restorer = Restorer(storage, manifest, read_states(storage, manifest, manifest.objects))
    assert str(tmp_path) in Path("/proc/self/maps").read_text()
    for name, item in items.items():
        storage.delete(f"{name}.pt")
        restorer.restore(name, item)
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    assert to_bytes([model.state_dict(), optimizer.state_dict()]) == expected


def test_a_thousand_ranks_generators_are_not_a_thousand_open_files(tmp_path: Path) -> None:
    """A process with the default limit of 1,024 open files reads one object for each of
    1,000 ranks."""
    storage = DirectoryStorage(tmp_path)
    names = [f"rank-{rank:05d}" for rank in range(100)]
    manifest = written(storage, {name: {} for name in names})
    open_now = len(list(Path("/proc/self/fd").iterdir()))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_now + 4 * NUM_THREADS, hard))
    try:
        assert read_states(storage, manifest, manifest.objects).keys() == set(names)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    storage.delete(f"{names[30]}.pt")
    with pytest.raises(CheckpointError, match="missing"):
        read_states(storage, manifest, manifest.objects)
    assert len(list(Path("/proc/self/fd").iterdir())) == open_now


def test_only_a_file_system_of_this_machine_is_mapped(tmp_path: Path) -> None:
    """What isn't known as one, isn't: the kernel's own here, as NFS elsewhere."""
    (tmp_path / "file").touch()
    for path, expected in ((tmp_path / "file", True), (Path("/proc/self/status"), False)):
        with path.open("rb") as file:
            assert is_local(file) == expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("damage", ["flipped", "truncated", "longer", "empty", "missing"])
def test_what_is_damaged_is_named(tmp_path: Path, name: str, damage: str, kind: str) -> None:
    """Whichever it is, and nothing of it is decoded."""
    manifest = written(DirectoryStorage(tmp_path))
    path = tmp_path / f"{name}.pt"
    data = path.read_bytes()
    middle = len(data) // 2
    path.unlink()
    storage = KINDS[kind](DirectoryStorage(tmp_path))
    flipped = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
    wrong = {"flipped": flipped, "truncated": data[:-1], "longer": data + b"\0", "empty": b""}
    if damage != "missing":
        path.write_bytes(wrong[damage])
    reason = "missing" if damage == "missing" else "damaged"
    says = rf"step 3 of run run: its object {name}\.pt is {reason}"
    with pytest.raises(CheckpointError, match=says):
        read_states(storage, manifest, manifest.objects)
    odd = written(storage, {"odd": b"of another version of torch"})
    with pytest.raises(NewerFormatError, match=r"odd\.pt is what was written, and torch .* can't"):
        read_states(storage, odd, odd.objects)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("unable to mmap 9 bytes from file </x>: Cannot allocate memory (12)"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried ..."),
        RuntimeError("unable to open file </x> in read-only mode: Too many open files (24)"),
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
