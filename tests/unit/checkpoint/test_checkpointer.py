"""What rank 0 compares before it commits; the ranks are threads with one key-value store."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from prefect_torch_ddp.checkpoint import gather
from prefect_torch_ddp.checkpoint.attempts import claim_attempt
from prefect_torch_ddp.checkpoint.checkpointer import Checkpointer
from prefect_torch_ddp.checkpoint.commit import Committer
from prefect_torch_ddp.checkpoint.manifest import Manifest, list_manifests
from prefect_torch_ddp.checkpoint.rank_store import KeyValueStore
from prefect_torch_ddp.checkpoint.shard import Shard
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.params import CheckpointParams
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.storage.protocol import Storage, StoredObject
from tests.support.forwarding import ForwardingStorage
from tests.support.tracked import Tracked

ON_RANK_0 = {"model": nn.Linear(1, 1), "ema": nn.Linear(1, 1), "other": nn.Linear(1, 1)}


def ranks_of(storages: Sequence[Storage]) -> list[Checkpointer]:
    """Make the checkpointers of ranks, each with its storage."""
    for storage in dict.fromkeys(storages):
        claim_attempt(storage, "run")
    store, policy = KeyValueStore(dist.HashStore()), CheckpointParams()
    committers = [Committer(storage, "run", 1, policy) for storage in storages]
    return [Checkpointer(rank, store, c, lambda: None) for rank, c in enumerate(committers)]


def whole(objects: Mapping[str, Any], rank: int) -> dict[Shard, Any]:
    """Return what a rank saves if rank 0 saves everything."""
    return {Shard(name): item for name, item in objects.items()} if rank == 0 else {}


def save(
    ranks: list[Checkpointer],
    tracked: Sequence[Mapping[str, Any]],
    step: int = 1,
    shares: Callable[[Mapping[str, Any], int], Mapping[Shard, Any]] = whole,
) -> None:
    """Save on each rank what it tracks, by such shares."""
    for rank, (checkpointer, objects) in enumerate(zip(ranks, tracked, strict=True)):
        manifest = Manifest("run", step, 1, 1, {}, len(ranks))
        checkpointer.save(manifest, objects, shares(objects, rank))
    for checkpointer in ranks:
        checkpointer.wait()


@pytest.mark.parametrize(
    ("on_rank_1", "expected"),
    [
        ({"model": nn.Linear(1, 1)}, "rank 0 model, ema, other; rank 1 model; call ctx.track"),
        (dict(reversed(ON_RANK_0.items())), "rank 0 model, ema, other; rank 1 other, ema, model"),
        ({**ON_RANK_0, "ema": nn.BatchNorm1d(1)}, "'ema' differs between the ranks"),
    ],
)
def test_ranks_that_track_different_objects_are_refused(
    tmp_path: Path, on_rank_1: dict[str, Any], expected: str
) -> None:
    """Each object is one rank's to write, so it might be written by none: nothing is committed
    and the training ends, though failed checkpoints only warn."""
    storage = DirectoryStorage(tmp_path)
    first, second = ranks = ranks_of([storage, storage])
    save(ranks, [ON_RANK_0, on_rank_1])
    assert list_manifests(storage, "run") == []
    second.raise_failure()
    with pytest.raises(InvalidParamsError, match=expected):
        first.raise_failure()


@pytest.mark.parametrize(
    ("of_ranks", "expected"),
    [
        pytest.param([(1.0, (1, 4), 0), (3.0, (1, 4), 0)], 2.0, id="a validation"),
        pytest.param([(1.0, (1, 4), 3), (3.0, (1, 4), 1)], 1.5, id="by samples"),
        pytest.param([(1.0, (1, 4), 3), (3.0, (1, 4), 0)], 1.0, id="one without samples"),
        pytest.param([(0.1, (1, 4), 1), (0.1, (1, 4), 2)], 0.1, id="alike, to the last bit"),
        pytest.param([(1.0, (1, 4), 0), (3.0, (2, 5), 0)], 3.0, id="one reported later"),
        pytest.param([None, (3.0, (2, 5), 0)], 3.0, id="one reports at all"),
    ],
)
def test_a_checkpoint_has_the_mean_of_a_metric(
    tmp_path: Path, of_ranks: list[tuple[float, tuple[int, int], int] | None], expected: float
) -> None:
    """Over the ranks that reported it last, as the records have it; it is chosen by that value."""
    storage = DirectoryStorage(tmp_path)
    ranks = ranks_of([storage, storage])
    for rank, (checkpointer, given) in enumerate(zip(ranks, of_ranks, strict=True)):
        named = (
            {} if given is None else {"metrics": {"val": given[0]}, "reports": {"val": given[1]}}
        )
        weights = {} if given is None else {"val": given[2]}
        manifest = Manifest("run", 1, 1, 1, {}, len(ranks), **named)
        checkpointer.save(manifest, ON_RANK_0, whole(ON_RANK_0, rank), weights=weights)
    for checkpointer in ranks:
        checkpointer.wait()
    (found,) = list_manifests(storage, "run")
    assert found.metrics == {"val": expected}
    assert found.reports == {"val": max(each[1] for each in of_ranks if each is not None)}


def test_a_storage_that_the_hosts_do_not_share_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 commits nothing, and the error names the hosts with separate folders."""
    monkeypatch.setattr(gather, "LOOK_S", 0.0)
    storages = [DirectoryStorage(tmp_path / name) for name in ("a", "b")]
    ranks = ranks_of(storages)
    save(ranks, [ON_RANK_0] * 2)
    assert list_manifests(storages[0], "run") == []
    with pytest.raises(InvalidParamsError, match=r"share the storage .*/a: rank 0 on .* by rank 1"):
        ranks[0].raise_failure()


def of_each(objects: Mapping[str, Any], rank: int) -> dict[Shard, Any]:
    """Return each rank's own shards."""
    return {Shard.of_rank(name, rank): item for name, item in objects.items()}


SHARES: dict[str, tuple[Callable[[Mapping[str, Any], int], Mapping[Shard, Any]], str]] = {
    "the shard of rank 1 is missing": (
        lambda objects, rank: of_each(objects, rank) if rank == 0 else {},
        "the shard of rank 1 is missing",
    ),
    "a shard twice": (
        lambda objects, _: of_each(objects, rank=0),
        "the shard of rank 0 was written 2 times",
    ),
    "a whole twice": (lambda objects, _: whole(objects, rank=0), "it was written 2 times"),
    "by nobody": (lambda _objects, _rank: {}, "no rank wrote it"),
}


@pytest.mark.parametrize(("shares", "why"), SHARES.values(), ids=SHARES)
def test_shards_that_do_not_make_the_object_are_not_committed(
    tmp_path: Path,
    shares: Callable[[Mapping[str, Any], int], Mapping[Shard, Any]],
    why: str,
) -> None:
    """The error names the object and what is wrong, and nothing of the checkpoint stays."""
    storage = DirectoryStorage(tmp_path)
    ranks = ranks_of([storage, storage])
    save(ranks, [{"loader": Tracked()}] * 2, shares=shares)
    assert [found.key for found in storage.list("runs/run/checkpoints/")] == []
    with pytest.raises(InvalidParamsError, match=rf"'loader' differs between the ranks \({why}\)"):
        ranks[0].raise_failure()


class Late(ForwardingStorage):
    """A directory that shows objects of others only when it is listed for the second time."""

    num_lists = 0

    def list(self, prefix: str = "") -> Iterator[StoredObject]:
        self.num_lists += "step-" in prefix
        return iter(()) if self.num_lists == 1 else super().list(prefix)


def test_a_shared_storage_may_show_objects_late_and_is_looked_at_once(tmp_path: Path) -> None:
    """As folders over a network do; later checkpoints of the attempt cost no such look."""
    storage = Late(tmp_path)
    ranks = ranks_of([storage, storage])
    save(ranks, [ON_RANK_0] * 2)
    save(ranks, [ON_RANK_0] * 2, step=2)
    first, second = list_manifests(storage, "run")
    assert (first.step, second.step, storage.num_lists) == (1, 2, 2)
    names = sorted(item.name for item in first.objects)  # each once, of whichever rank
    assert names == ["ema", "model", "other", "rank-00000", "rank-00001"]


@pytest.mark.parametrize(
    ("num_ranks", "compares", "is_hashed"),
    [(1, True, False), (2, False, False), (2, True, True)],
    ids=["one rank", "turned off", "compared"],
)
def test_a_state_is_hashed_only_if_it_is_compared(
    tmp_path: Path, num_ranks: int, *, compares: bool, is_hashed: bool
) -> None:
    """A sampler's order of a million numbers costs nothing in ctx.track otherwise."""
    policy = CheckpointParams(compare_replicas=compares)
    committer = Committer(DirectoryStorage(tmp_path), "run", 1, policy)
    checkpointer = Checkpointer(0, KeyValueStore(dist.HashStore()), committer, lambda: None)
    checkpointer.check_tracked("order", Tracked([1, 2, 3]), num_ranks)
    assert bool(checkpointer._at_first) == is_hashed
