"""What rank 0 compares before it commits; the ranks are threads with one key-value store."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from prefect_torch_ddp.checkpoint import reports
from prefect_torch_ddp.checkpoint.attempts import claim_attempt
from prefect_torch_ddp.checkpoint.checkpointer import Checkpointer, CheckpointMetadata, Writer
from prefect_torch_ddp.checkpoint.commit import Committer
from prefect_torch_ddp.checkpoint.manifest import list_manifests
from prefect_torch_ddp.checkpoint.rank_store import KeyValueStore
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.params import CheckpointParams
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.storage.protocol import Storage, StoredObject
from tests.support.forwarding import ForwardingStorage


def save(storages: Sequence[Storage], tracked: Sequence[Mapping[str, Any]]) -> list[Checkpointer]:
    """Save once, each rank to its storage and what it tracks; return the ranks' checkpointers."""
    for storage in dict.fromkeys(storages):
        claim_attempt(storage, "run")
    rank_store = KeyValueStore(dist.HashStore())
    ranks = [
        Checkpointer(
            Writer(storage, "run", 1, rank, len(storages)),
            rank_store,
            Committer(storage, "run", 1, CheckpointParams()),
            lambda: None,
        )
        for rank, storage in enumerate(storages)
    ]
    for checkpointer, objects in zip(ranks, tracked, strict=True):
        checkpointer.save(CheckpointMetadata(step=1, epoch=1, position={}), objects)
    for checkpointer in ranks:
        checkpointer.wait()
    return ranks


ON_RANK_0 = {"model": nn.Linear(1, 1), "ema": nn.Linear(1, 1), "other": nn.Linear(1, 1)}


@pytest.mark.parametrize(
    ("on_rank_1", "expected"),
    [
        ({"model": nn.Linear(1, 1), "other": nn.Linear(1, 1)}, "'ema' only on rank 0; call ctx"),
        (dict(reversed(ON_RANK_0.items())), "orders: rank 0 model, ema, other; rank 1 other, ema"),
        ({**ON_RANK_0, "ema": nn.BatchNorm1d(1)}, "'ema' differs between the ranks"),
    ],
)
def test_ranks_that_track_different_objects_are_refused(
    tmp_path: Path, on_rank_1: dict[str, Any], expected: str
) -> None:
    """Each object is one rank's to write, so it might be written by none: nothing is committed
    and the training ends, though failed checkpoints only warn."""
    storage = DirectoryStorage(tmp_path)
    first, second = save([storage, storage], [ON_RANK_0, on_rank_1])
    assert list_manifests(storage, "run") == []
    second.raise_if_over()
    with pytest.raises(InvalidParamsError, match=expected):
        first.raise_if_over()
    with pytest.raises(InvalidParamsError, match=expected):
        first.raise_failure()


def test_ranks_that_track_the_same_objects_commit(tmp_path: Path) -> None:
    """Each object once, with the generators of each rank."""
    storage = DirectoryStorage(tmp_path)
    save([storage] * 2, [ON_RANK_0] * 2)[0].raise_if_over()
    (manifest,) = list_manifests(storage, "run")
    names = {item.name for item in manifest.objects}
    assert len(manifest.objects) == len(names) == 5
    assert names > ON_RANK_0.keys()


def test_a_storage_that_the_hosts_do_not_share_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each host has a folder of its own under the same path: rank 0 commits nothing, and the
    training ends by an error that says who wrote elsewhere."""
    monkeypatch.setattr(reports, "LOOK_S", 0.0)
    storages = [DirectoryStorage(tmp_path / name) for name in ("a", "b")]
    first, _ = save(storages, [ON_RANK_0] * 2)
    assert list_manifests(storages[0], "run") == []
    with pytest.raises(InvalidParamsError, match=r"share the storage .*/a: rank 0 on .* by rank 1"):
        first.raise_if_over()


class Late(ForwardingStorage):
    """A directory that shows objects of others only when it is listed for the second time."""

    num_lists = 0

    def list(self, prefix: str = "") -> Iterator[StoredObject]:
        """Show nothing at first."""
        self.num_lists += "step-" in prefix
        return iter(()) if self.num_lists == 1 else super().list(prefix)


def test_a_shared_storage_may_show_objects_late_and_is_looked_at_once(tmp_path: Path) -> None:
    """As folders over a network do; later checkpoints of the attempt cost no such look."""
    storage = Late(tmp_path)
    ranks = save([storage, storage], [ON_RANK_0] * 2)
    for checkpointer in ranks:
        checkpointer.save(CheckpointMetadata(step=2, epoch=1, position={}), ON_RANK_0)
    for checkpointer in ranks:
        checkpointer.wait()
    assert [manifest.step for manifest in list_manifests(storage, "run")] == [1, 2]
    assert storage.num_lists == 2
