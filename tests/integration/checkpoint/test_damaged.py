"""Each object of a checkpoint is damaged in each way: a resume takes the previous one, or fails."""

import logging
from pathlib import Path

import pytest
import torch

from prefect_torch_ddp import RankContext
from prefect_torch_ddp.checkpoint.keys import checkpoints_prefix, manifest_key
from prefect_torch_ddp.checkpoint.manifest import list_manifests, read_manifest
from prefect_torch_ddp.checkpoint.restore import find_resumable
from prefect_torch_ddp.errors import CheckpointError
from prefect_torch_ddp.params import CheckpointParams
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.storage.protocol import Storage
from prefect_torch_ddp.storage.s3.client import client_of
from prefect_torch_ddp.storage.s3.storage import S3Storage
from tests.support.forwarding import WatchedStorage
from tests.support.s3_server import S3Server
from tests.workloads.healthy import sha256_of_weights

POLICY = CheckpointParams(every_steps=1, every_s=None, keep_last=9)
NUM_STEPS = 3


def _flipped(data: bytes) -> bytes:
    return data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :]


def train(
    storage: Storage, num_steps: int, policy: CheckpointParams = POLICY
) -> tuple[str, int | None]:
    """Train; return the weights' digest and the step that it resumed from."""
    with RankContext.local(storage=storage, run_id="run", checkpoint=policy) as ctx:
        model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Dropout(0.4)).double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        ctx.track(model=model, optimizer=optimizer)
        dataset = torch.utils.data.TensorDataset(torch.ones(1, 3, dtype=torch.float64))
        loader = ctx.loader(dataset, global_batch_size=1)
        for (batch,) in ctx.steps(loader, epochs=num_steps):
            ctx._assembly.saver._checkpointer.wait()
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return sha256_of_weights(model), ctx._assembly.outcome()["resumed_from_step"]


def copy(source: Storage, target: Storage) -> Storage:
    """Copy a storage's objects."""
    for found in source.list(""):
        target.write(found.key, source.read(found.key))
    return target


def damage(storage: Storage, key: str, how: str = "flipped") -> None:
    """Flip a bit of an object, or delete it."""
    if how == "flipped":
        storage.write(key, _flipped(storage.read(key)))
    else:
        storage.delete(key)


def damage_in_the_store(storage: S3Storage, key: str) -> None:
    """Flip a bit as a disk does; what the store keeps next to the content stays."""
    client, place = client_of(storage), {"Bucket": storage.bucket, "Key": storage.name_of(key)}
    metadata = client.head_object(**place)["Metadata"]
    client.put_object(**place, Body=_flipped(storage.read(key)), Metadata=metadata)


def objects_of(storage: Storage, step: int) -> list[str]:
    """Name a checkpoint's objects, the manifest too."""
    items = read_manifest(storage, "run", step, 1).objects
    return [*(item.key for item in items), manifest_key("run", step, 1)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Storage, str]:
    """Train three steps, a checkpoint each; and say what four make of the weights."""
    storage = DirectoryStorage(tmp_path_factory.mktemp("trained"))
    train(storage, NUM_STEPS)
    whole = copy(storage, DirectoryStorage(tmp_path_factory.mktemp("whole")))
    return storage, train(whole, NUM_STEPS + 1)[0]


@pytest.mark.parametrize(
    ("where", "how"),
    [
        ("directory", "flipped"),
        ("directory", "missing"),
        pytest.param("bucket", "flipped", marks=pytest.mark.extended),
    ],
)
def test_each_object(
    trained: tuple[Storage, str],
    open_s3_server: S3Server,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    *,
    where: str,
    how: str,
) -> None:
    """A resume takes the previous checkpoint, names the damaged object and replaces it."""
    original, expected = trained
    keys = objects_of(original, NUM_STEPS)
    names = [key.rsplit("/", 1)[1] for key in keys]
    assert names == ["model.pt", "optimizer.pt", "rank-00000.pt", "manifest.json"]
    for name, key in zip(names, keys, strict=True):
        empty = DirectoryStorage(tmp_path / name)
        storage = copy(original, empty if where == "directory" else open_s3_server.storage())
        damage(storage, key, how)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert train(storage, NUM_STEPS + 1) == (expected, NUM_STEPS - 1)
        # A checkpoint without a manifest is none, as after a kill in the midst of a save.
        is_none = how == "missing" and name == "manifest.json"
        assert (key in caplog.text) == (not is_none), caplog.text
        found = [(manifest.step, manifest.attempt) for manifest in list_manifests(storage, "run")]
        assert found == [(1, 1), (2, 1), (3, 2), (4, 2)]


@pytest.mark.parametrize("which", ["model.pt", "manifest.json"])
def test_what_the_store_itself_damaged_is_left_out(
    trained: tuple[Storage, str],
    ceph_server: S3Server,
    which: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Content with a wrong digest is a damaged checkpoint, not a failure of the storage."""
    original, expected = trained
    storage = ceph_server.storage(max_attempts=1)
    copy(original, storage)
    (key,) = [key for key in objects_of(original, NUM_STEPS) if key.endswith(which)]
    damage_in_the_store(storage, key)
    assert train(storage, NUM_STEPS + 1) == (expected, NUM_STEPS - 1)
    assert any(
        key in record.getMessage() and "sha256" in record.getMessage() for record in caplog.records
    )


@pytest.mark.parametrize("which", ["model.pt", "manifest.json"])
def test_a_run_whose_checkpoints_are_all_damaged_doesnt_begin_anew(
    trained: tuple[Storage, str], tmp_path: Path, which: str
) -> None:
    """The error names each object, and the run starts over only after a person deleted them."""
    storage = copy(trained[0], DirectoryStorage(tmp_path))
    steps = range(1, NUM_STEPS + 1)
    keys = [key for step in steps for key in objects_of(storage, step) if key.endswith(which)]
    for key in keys:
        damage(storage, key)
    before = [found.key for found in storage.list(checkpoints_prefix("run"))]
    says = r"has checkpoints in .*, and none of them can be restored"
    with pytest.raises(CheckpointError, match=says) as caught:
        train(storage, NUM_STEPS)
    assert all(key in str(caught.value) for key in keys)
    assert [found.key for found in storage.list(checkpoints_prefix("run"))] == before
    for key in before:
        storage.delete(key)
    assert train(storage, NUM_STEPS)[1] is None


@pytest.mark.parametrize("how_often", [1, 3, 99])
def test_a_run_that_still_trains_has_a_checkpoint_or_is_said_to_train(
    tmp_path: Path, how_often: int
) -> None:
    """It deletes the one that was found before it is read; nobody is told to delete anything."""
    inner, newest = DirectoryStorage(tmp_path), CheckpointParams(**{**vars(POLICY), "keep_last": 1})
    steps = iter(range(2, how_often + 2))
    train(inner, 1, newest)

    def train_on(request: str) -> None:
        if request.endswith("/model.pt") and (step := next(steps, None)) is not None:
            train(inner, step, newest)

    watched = WatchedStorage(inner, train_on)
    if how_often == 99:
        with pytest.raises(CheckpointError, match="it probably still trains") as caught:
            find_resumable(watched, "run")
        assert "or delete" not in str(caught.value)
    else:
        found = find_resumable(watched, "run")
        assert found is not None
        assert found[0].step == how_often + 1
