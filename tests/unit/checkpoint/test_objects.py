"""The objects of a checkpoint are read together, verified, and come back as they were saved."""

import dataclasses
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from prefect_torch_ddp.checkpoint import objects
from prefect_torch_ddp.checkpoint.manifest import Manifest, ManifestObject
from prefect_torch_ddp.checkpoint.objects import (
    NUM_AHEAD,
    Digest,
    digest_of,
    digest_of_parts,
    read_states,
)
from prefect_torch_ddp.checkpoint.restore import Restorer
from prefect_torch_ddp.checkpoint.serial import to_bytes
from prefect_torch_ddp.errors import CheckpointError
from prefect_torch_ddp.storage.directory import PART_BYTES, DirectoryStorage
from prefect_torch_ddp.storage.directory_files import is_local
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


def written(storage: Storage, states: dict[str, Any] = STATES) -> Manifest:
    """Write states as a checkpoint's objects."""
    items = []
    for name, state in states.items():
        data = state if isinstance(state, bytes) else to_bytes(state)
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
    """Each rank has an object, and a process may have 1,024 files open by default; want of them
    was taken for damage."""
    storage = DirectoryStorage(tmp_path)
    names = [f"rank-{rank:05d}" for rank in range(3 * NUM_AHEAD)]
    manifest = written(storage, {name: {} for name in names})
    open_now = len(list(Path("/proc/self/fd").iterdir()))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_now + 2 * NUM_AHEAD, hard))
    try:
        assert read_states(storage, manifest, manifest.objects).keys() == set(names)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    storage.delete(f"{names[NUM_AHEAD + 3]}.pt")
    with pytest.raises(CheckpointError, match="missing"):
        read_states(storage, manifest, manifest.objects)
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
    reason = "missing" if damage == "missing" else "damaged"
    says = rf"step 3 of run run: its object {name}\.pt is {reason}"
    with pytest.raises(CheckpointError, match=says):
        read_states(storage, manifest, manifest.objects)


def test_what_verifies_and_cannot_be_decoded_is_named_too(tmp_path: Path) -> None:
    """Such as what another version of torch wrote."""
    storage = DirectoryStorage(tmp_path)
    manifest = written(storage, {"odd": b"no checkpoint"})
    says = r"its object odd\.pt is what was written, and this version of torch can't read it"
    with pytest.raises(CheckpointError, match=says):
        read_states(storage, manifest, manifest.objects)


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


BYTES = bytes(range(251)) * (3 * objects.PART_BYTES // 251)


@settings(deadline=None)
@given(
    st.sampled_from(
        [
            0,
            1,
            objects.PART_BYTES - 1,
            objects.PART_BYTES,
            objects.PART_BYTES + 1,
            2 * objects.PART_BYTES,
            len(BYTES),
        ]
    ),
    st.data(),
)
def test_the_digest_is_of_the_content_and_not_of_how_it_comes(
    num_bytes: int, data: st.DataObject
) -> None:
    """At once, piece by piece, by parts."""
    content = memoryview(BYTES)[:num_bytes]
    cuts = sorted(data.draw(st.lists(st.integers(0, num_bytes), max_size=5)))
    digest = Digest()
    for start, end in zip([0, *cuts], [*cuts, num_bytes], strict=True):
        digest.update(content[start:end])
    size = objects.PART_BYTES
    parts = [content[start : start + size] for start in range(0, num_bytes, size)]
    assert (
        digest.hexdigest()
        == digest_of(content)
        == digest_of_parts(blake3(part).digest() for part in parts)
    )


def test_it_is_another_one_for_other_content() -> None:
    """Swapped parts, one part less, and a part's digest in place of the part among them."""
    one, two = BYTES[: objects.PART_BYTES], BYTES[objects.PART_BYTES : 2 * objects.PART_BYTES]
    contents = [b"", b"\0", one, two, one + two, two + one, one + two + b"\0", blake3(one).digest()]
    assert len({digest_of(content) for content in contents}) == len(contents)
