"""Trainings on a bad way to S3 end as on a good one, or with a clear error; never silently
wrong."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from distributed import Client

from prefect_torch_ddp import RankFailedError, run_gang
from prefect_torch_ddp.checkpoint.attempts import claim_attempt
from prefect_torch_ddp.checkpoint.keys import checkpoints_prefix
from prefect_torch_ddp.checkpoint.manifest import list_manifests
from prefect_torch_ddp.checkpoint.state.objects import read_states
from prefect_torch_ddp.errors import CheckpointError, StorageError
from prefect_torch_ddp.params import CheckpointParams
from prefect_torch_ddp.rank.config import RankConfig
from prefect_torch_ddp.records.saved_files import read_result
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.storage.protocol import Storage
from prefect_torch_ddp.storage.s3.client import client_of
from prefect_torch_ddp.storage.s3.storage import S3Storage
from tests.support.gangs import RUN_WITH_CONTEXT
from tests.support.records import read_records
from tests.support.s3_server import S3Server
from tests.support.waiting import HANG_S
from tests.support.wire_faults import FAULTS, FaultyWire
from tests.workloads import stored
from tests.workloads.stored import NUM_STEPS, RESUMES_FROM

pytestmark = pytest.mark.extended


EVERY_OTHER_STEP = CheckpointParams(every_steps=2, every_s=None, keep_last=3)


@pytest.fixture
def server(request: pytest.FixtureRequest, s3_server: S3Server, ceph_server: S3Server) -> S3Server:
    """Give a real server of the kind that the test names."""
    return {"moto": s3_server, "ceph": ceph_server}[request.param]


def train(
    client: Client, storage: Storage, direct: Storage, *, fails: bool = False, is_big: bool = False
) -> list[dict[str, Any]]:
    """Train on two ranks of real Dask workers, from the newest checkpoint on.

    The attempt is claimed on the direct way: which number it has is no matter of the network.
    """
    attempt = claim_attempt(direct, "run")
    config = RankConfig("run", attempt, "task", storage, checkpoint=EVERY_OTHER_STEP)
    arguments = (config, stored.leave_all, (fails, is_big))
    return run_gang(client, RUN_WITH_CONTEXT, args=arguments, world_size=2)


def train_and_fail(client: Client, storage: Storage, direct: Storage) -> None:
    """Train until rank 0 fails after a checkpoint."""
    with pytest.raises(RankFailedError, match="as the test wants it"):
        train(client, storage, direct, fails=True)
    assert list_manifests(storage, "run")[-1].step == RESUMES_FROM


@pytest.fixture(scope="module")
def undisturbed(
    dask_cluster: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[dict[str, Any]]]:
    """What the training gives when nothing happens."""
    with Client(dask_cluster) as client:
        client.wait_for_workers(2, timeout=HANG_S)
        storage = DirectoryStorage(tmp_path_factory.mktemp("undisturbed"))
        yield train(client, storage, storage)


def check_that_all_is_right(
    storage: S3Storage, values: list[dict[str, Any]], undisturbed: list[dict[str, Any]]
) -> None:
    """The weights are those of an undisturbed run; each record, checkpoint and file is there,
    once and whole."""
    assert [value["sha256"] for value in values] == [value["sha256"] for value in undisturbed]
    records = read_records(storage, "run")
    assert Counter((record.rank, record.step) for record in records) == {
        (rank, step): 1 for rank in range(2) for step in range(1, NUM_STEPS + 1)
    }
    manifests = list_manifests(storage, "run")
    assert [manifest.step for manifest in manifests] == [NUM_STEPS - 4, NUM_STEPS - 2, NUM_STEPS]
    for manifest in manifests:
        read_states(storage, manifest, manifest.objects)  # compares the digests
    kept = {item.key for manifest in manifests for item in manifest.objects}
    there = {
        found.key
        for found in storage.list(checkpoints_prefix("run"))
        if not found.key.endswith("manifest.json")
    }
    assert there == kept
    assert read_result(storage, "run", "note.txt") == stored.NOTE
    assert "Uploads" not in client_of(storage).list_multipart_uploads(
        Bucket=storage.bucket, Prefix=storage.prefix
    )


CASES = [
    pytest.param("ceph", ("reset", "cut", "lost answer"), id="ceph, broken connections"),
    pytest.param("ceph", ("truncated", "changed byte", "wrong ETag"), id="ceph, damaged answers"),
    pytest.param("ceph", ("503", "500", "slow", "hangs"), id="ceph, busy, slow or silent"),
    pytest.param("moto", tuple(FAULTS), id="moto, all together", marks=pytest.mark.more),
]


@pytest.mark.parametrize(("server", "kinds"), CASES, indirect=["server"])
def test_a_training_on_a_bad_network_ends_right(
    dask_client: Client, server: S3Server, undisturbed: list[dict[str, Any]], kinds: tuple[str, ...]
) -> None:
    """Faults in a sixth of all answers, also during the resume, change no result."""
    with FaultyWire(server.endpoint_url, kinds, rate=1 / 6, seed=1) as wire:
        storage = server.storage(endpoint_url=wire.endpoint_url, read_timeout_s=2.0, max_attempts=8)
        direct = replace(storage, endpoint_url=server.endpoint_url)
        train_and_fail(dask_client, storage, direct)
        values = train(dask_client, storage, direct)
        assert [value["first"] for value in values] == [RESUMES_FROM + 1] * 2
    assert len(wire.hits) >= min(len(kinds), 5), wire.hits
    check_that_all_is_right(direct, values, undisturbed)


def test_big_checkpoints_on_a_bad_network_are_whole(
    dask_client: Client, ceph_server: S3Server
) -> None:
    """Uploads by parts survive all faults that a retry mends, and leave no part."""
    kinds = tuple(FAULTS.keys() - {"wrong ETag"})
    with FaultyWire(ceph_server.endpoint_url, sorted(kinds), rate=1 / 10, seed=5) as wire:
        storage = ceph_server.storage(
            endpoint_url=wire.endpoint_url, read_timeout_s=5.0, max_attempts=8
        )
        direct = replace(storage, endpoint_url=ceph_server.endpoint_url)
        values = train(dask_client, storage, direct, is_big=True)
    assert wire.count("POST") >= 4, "nothing was uploaded in parts"
    manifests = list_manifests(direct, "run")
    assert manifests[-1].step == NUM_STEPS
    for manifest in manifests:
        read_states(direct, manifest, manifest.objects)
    assert len({value["sha256"] for value in values}) == 1
    # One whose answer was lost may have begun, and is found by nobody but a sweep: it has no
    # part, so it takes no room.
    where = {"Bucket": direct.bucket}
    for begun in (
        client_of(direct).list_multipart_uploads(**where, Prefix=direct.prefix).get("Uploads", ())
    ):
        assert "Parts" not in client_of(direct).list_parts(
            **where, Key=begun["Key"], UploadId=begun["UploadId"]
        )


@pytest.mark.parametrize("kind", ["truncated", "503"])
def test_a_network_that_only_fails_ends_in_a_clear_error(
    dask_client: Client, ceph_server: S3Server, kind: str
) -> None:
    """A resume that can't read its checkpoint raises the reason, and neither starts over nor
    falls back."""
    storage = ceph_server.storage()
    train_and_fail(dask_client, storage, storage)
    with FaultyWire(ceph_server.endpoint_url, (kind,), rate=1.0, seed=1) as wire:
        behind = replace(storage, endpoint_url=wire.endpoint_url, max_attempts=2)
        with pytest.raises(RankFailedError) as caught:
            train(dask_client, behind, storage)
    assert isinstance(caught.value.__cause__, StorageError | CheckpointError)
    assert f"s3://{storage.bucket}/{storage.prefix}/" in str(caught.value)
    assert f"at {wire.endpoint_url}" in str(caught.value)
    for _, secret in ceph_server.keys.values():
        assert secret not in str(caught.value)
    assert list_manifests(storage, "run")[-1].step == RESUMES_FROM
