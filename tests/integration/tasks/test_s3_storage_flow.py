"""train_flow runs with a saved s3-bucket block on a real Prefect server, on Ceph and moto."""

import os
from pathlib import Path
from uuid import UUID

import psutil
import pytest
from prefect.client.orchestration import get_client

from prefect_torch_ddp import CheckpointParams, ClusterParams, StorageError, TrainParams, train_flow
from tests.support.blocks import FOLDER, save_block
from tests.support.gangs import by_rank
from tests.support.runs import artifacts_of, flow_run_id_of, logs_of, states_of, task_runs_of
from tests.support.s3_server import S3Server

pytestmark = [
    pytest.mark.extended,
    pytest.mark.usefixtures("prefect_api"),
    pytest.mark.timeout(480),  # two whole flows
]


def all_that_was_recorded(flow_run_id: UUID) -> str:
    """Return as one text what the Prefect server has of a run: its log, artifacts,
    parameters and states."""
    runs = task_runs_of(flow_run_id)
    with get_client(sync_client=True) as client:
        parts = [client.read_flow_run(flow_run_id).model_dump_json()]
    parts += [line.message for line in logs_of(flow_run_id)]
    parts += [artifact.model_dump_json() for artifact in artifacts_of(flow_run_id).values()]
    parts += [run.model_dump_json() + str(states_of(run)) for run in runs.values()]
    return "\n".join(parts)


def persisted() -> dict[Path, bytes]:
    """Return everything that Prefect wrote below its home here, including results of tasks."""
    files = (path for path in Path(os.environ["PREFECT_HOME"]).rglob("*") if path.is_file())
    return {path: path.read_bytes() for path in files}


@pytest.mark.long
def test_everything_of_a_run_is_in_the_bucket(
    ceph_server: S3Server,
    shared: ClusterParams,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """All files are objects, the secret key is nowhere, and a second run prepares nothing."""
    _, secret = ceph_server.keys["owner"]
    block = save_block("training", ceph_server)
    params = TrainParams(workload="tests.workloads.tiny", storage=block, cluster=shared)
    before = persisted()
    first, second = train_flow(params), train_flow(params)

    storage = ceph_server.storage(FOLDER)
    keys = [found.key for found in storage.list("")]
    run = f"runs/{first.run_id}/"
    for rank in (0, 1):
        parts = storage.list(f"{run}metrics/rank-{rank:05d}/")
        num_lines = [len(storage.read(part.key).splitlines()) - 1 for part in parts]
        assert sum(num_lines) == first.training.num_steps
    manifest = f"{run}checkpoints/step-{first.checkpoint.step:08d}/000001/manifest.json"
    assert manifest in keys
    assert first.checkpoint.uri == f"s3://{ceph_server.bucket}/{FOLDER}/{manifest}"
    assert first.model_uri.removeprefix(f"{storage.uri}/") in keys
    assert first.dataset.uri.startswith(f"{storage.uri}/datasets/")
    dataset = [key for key in keys if key.startswith("datasets/")]
    assert {key.rsplit("/", 1)[1] for key in dataset} >= {"train.npz", "test.npz"}

    for report, prepared in ((first, "Completed"), (second, "Cached")):
        flow_run_id = flow_run_id_of(report.flow_run_url)
        assert task_runs_of(flow_run_id, "prepare")["prepare"].state_name == prepared
        recorded = all_that_was_recorded(flow_run_id)
        lines = by_rank(line.message for line in logs_of(flow_run_id))
        assert "[rank 1] step 1" in lines
        assert report.model_uri in recorded
        assert secret not in recorded
    assert first.evaluation == second.evaluation
    assert first.dataset == second.dataset
    assert dataset == [found.key for found in storage.list("datasets/")]

    results = {path: data for path, data in persisted().items() if path not in before}
    digest = first.dataset.digest.encode()
    assert any(digest in data for data in results.values()), "we do look where results are"
    assert not [path for path, data in results.items() if secret.encode() in data]
    assert secret not in first.model_dump_json()
    printed = capfd.readouterr()
    assert secret not in caplog.text + printed.out + printed.err


def test_a_run_begins_from_the_checkpoint_of_another_storage(
    s3_server: S3Server, shared: ClusterParams, tmp_path: Path
) -> None:
    """A run in a directory resumes from a block's bucket, which stays as it was."""
    block, bucket = save_block("resumed", s3_server), s3_server.storage(FOLDER)
    policy = CheckpointParams(every_s=None, every_steps=5, keep_last=9)
    given = {"workload": "tests.workloads.tiny", "cluster": shared}
    params = TrainParams(**given, seed=3, checkpoint=policy)
    first = train_flow(params.model_copy(update={"storage": block, "options": {"epochs": 1}}))
    there = {found.key: bucket.read(found.key) for found in bucket.list("runs/")}
    in_folder = {"storage": str(tmp_path), "resume_from": f"{block}/runs/{first.run_id}"}
    second = train_flow(params.model_copy(update=in_folder))
    assert second.training.resumed_from_step == first.training.num_steps == 7
    assert second.training.num_steps == 21
    assert str(second.model_uri).startswith(str(tmp_path))
    assert {key: bucket.read(key) for key in there} == there


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("key", "the store doesn't know this access key"),
        ("secret", "the secret is wrong"),
        ("user", "the credentials need the rights"),
    ],
)
def test_wrong_credentials_are_refused_before_a_process_starts(
    ceph_server: S3Server, wrong: str, says: str
) -> None:
    """The error names the place and the reason, and shows no secret."""
    user = "reader" if wrong == "user" else "owner"
    key, secret = ceph_server.keys[user]
    changed = {
        "key": {"aws_access_key_id": key[::-1]},
        "secret": {"aws_secret_access_key": secret[::-1]},
    }
    reference = save_block(f"wrong-{wrong}", ceph_server, user, **changed.get(wrong, {}))
    before = set(psutil.Process().children(recursive=True))
    there = list(ceph_server.storage(FOLDER).list())
    with pytest.raises(StorageError, match=f"s3://{ceph_server.bucket}/{FOLDER}") as caught:
        train_flow(TrainParams(workload="tests.workloads.tiny", storage=reference))
    assert says in str(caught.value)
    for shown in (secret, secret[::-1]):
        assert shown not in str(caught.value) + repr(caught.value.__cause__)
    assert not set(psutil.Process().children(recursive=True)) - before
    assert list(ceph_server.storage(FOLDER).list()) == there
