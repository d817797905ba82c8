"""How a person names the checkpoint that a new run begins from, and that it does begin there."""

from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from prefect_torch_ddp import InvalidParamsError, RankContext
from prefect_torch_ddp.checkpoint.manifest import list_manifests
from prefect_torch_ddp.checkpoint.resume_point import ResumePoint, parse_resume_from
from prefect_torch_ddp.errors import CheckpointError
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.storage.locate import storage_from_uri
from prefect_torch_ddp.storage.s3.storage import S3Storage
from tests.support.tracked import Tracked
from tests.unit.checkpoint.test_commit import count_to

OWN = DirectoryStorage(Path("/own"))


def at(path: str) -> DirectoryStorage:
    """Return the storage of a folder."""
    return DirectoryStorage(Path(path))


@pytest.mark.parametrize(
    ("reference", "point"),
    [
        ("calm-otter", ResumePoint(OWN, "calm-otter")),
        ("calm-otter/checkpoints/step-00000400", ResumePoint(OWN, "calm-otter", 400)),
        ("otter/checkpoints/step-00000007/000012", ResumePoint(OWN, "otter", 7, 12)),
        ("/data/store/runs/otter", ResumePoint(at("/data/store"), "otter")),
        ("/data/store/runs/otter/", ResumePoint(at("/data/store"), "otter")),
        ("/data/runs/x/runs/o/checkpoints/step-7", ResumePoint(at("/data/runs/x"), "o", 7)),
        ("/x/runs/o/checkpoints/step-7/manifest.json", ResumePoint(at("/x"), "o", 7)),
        ("/x/runs/o/checkpoints/step-7/000002/manifest.json", ResumePoint(at("/x"), "o", 7, 2)),
        ("/runs/otter", ResumePoint(at("/"), "otter")),
        ("runs/otter", ResumePoint(at("."), "otter")),
        ("~/store/runs/otter", ResumePoint(at("~/store"), "otter")),
        ("s3://bucket/a/b/runs/otter", ResumePoint(S3Storage("bucket", "a/b"), "otter")),
        (
            "s3://bucket/runs/otter/checkpoints/step-00000400",
            ResumePoint(S3Storage("bucket"), "otter", 400),
        ),
    ],
)
def test_a_reference_is_parsed(reference: str, point: ResumePoint) -> None:
    """An id, a path, a URI; with the step or without; a manifest's place, as reports show it."""
    assert parse_resume_from(reference, OWN, storage_from_uri) == point
    assert parse_resume_from(point.uri, OWN, storage_from_uri) == point


@pytest.mark.parametrize(
    "reference",
    [
        *("", "/", ".", "..", "/data/store", "s3://bucket/otter", "a/b", "/data/runs/"),
        *("x/runs/a/b", "s3://KEY:SECRET@bucket/prefix/my-run"),
    ],
)
def test_what_names_no_run_is_refused(reference: str) -> None:
    """With the forms that there are; credentials in a URI aren't shown."""
    says = r"names no run; write a run's id, or <storage>/runs/<run id>"
    with pytest.raises(InvalidParamsError, match=says) as error:
        parse_resume_from(reference, OWN, storage_from_uri)
    assert reference.rpartition("@")[2] in str(error.value)
    assert "SECRET" not in str(error.value)


def test_the_runs_own_bucket_is_reached_as_the_run_reaches_it() -> None:
    """With its endpoint and credentials, which a URI can't hold; another bucket isn't."""
    way = {"endpoint_url": "http://minio:9000", "access_key_id": "k", "secret_access_key": "s"}
    own = S3Storage("bucket", "new", **way)
    for uri, expected in (
        ("s3://bucket/old/runs/otter", S3Storage("bucket", "old", **way)),
        ("s3://other/runs/otter", S3Storage("other")),
    ):
        assert parse_resume_from(uri, own, storage_from_uri).storage == expected


def begin(storage: Path, resume_from: str, run_id: str) -> tuple[int, int]:
    """Begin a run there; return the step and the count that it begins with."""
    with RankContext.local(storage=storage, run_id=run_id, resume_from=resume_from) as ctx:
        counter = Tracked()
        ctx.track(counter=counter)
        return ctx.step, counter.value


def contents(folder: Path) -> dict[Path, bytes]:
    """Read all files there."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("is_elsewhere", [True, False])
def test_a_new_run_begins_from_another(tmp_path: Path, is_elsewhere: bool) -> None:
    """A new run resumes from another one's checkpoint until it has its own."""
    old = tmp_path / "old"
    count_to(old, 3)
    new, run_id = (tmp_path / "new", "local") if is_elsewhere else (old, "next")
    source = f"{old}/runs/local" if is_elsewhere else "local"
    before = contents(old / "runs/local")
    for _ in range(2):
        assert begin(new, source, run_id) == (3, 3)
    assert [manifest.step for manifest in list_manifests(DirectoryStorage(new), run_id)] == [3]
    of_a_step = {"run_id": "third", "resume_from": f"{source}/checkpoints/step-00000002"}
    ctx, count = count_to(new, 5, **of_a_step)
    assert (ctx.step, count, ctx._assembly.outcome()["resumed_from_step"]) == (5, 5, 2)
    assert contents(old / "runs/local") == before


def test_only_the_weights_of_a_run(tmp_path: Path) -> None:
    """Fine-tuning has the other run's model, and the order, the steps and the optimizer of a new
    one."""

    def tune(run_id: str, resume_from: ResumePoint | None) -> tuple[float, list[int], float]:
        with RankContext.local(storage=tmp_path, run_id=run_id, resume_from=resume_from) as ctx:
            torch.manual_seed(0)
            model = torch.nn.Linear(1, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
            ctx.track(model=model, optimizer=optimizer)
            began, order = model.weight.item(), []
            loader = ctx.loader(TensorDataset(torch.arange(8.0)), global_batch_size=1)
            for (number,) in ctx.steps(loader, epochs=1):
                if not order:
                    assert (ctx.step, optimizer.state_dict()["state"]) == (1, {})
                order.append(int(number))
                optimizer.zero_grad()
                model(number[:, None] / 8).sum().backward()
                optimizer.step()
            return began, order, model.weight.item()

    initial, order, learnt = tune("first", None)
    weights = ResumePoint(DirectoryStorage(tmp_path), "first", only_weights=True)
    began, again, _ = tune("second", weights)
    assert (began, again) == (learnt, order)
    assert initial != learnt


def test_a_step_that_was_asked_for_is_that_step(tmp_path: Path) -> None:
    """No other step is taken if the given one is damaged or doesn't exist."""
    count_to(tmp_path, 3)
    (tmp_path / "runs/local/checkpoints/step-00000002/000001/counter.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"step-00000002/000001/counter.pt is damaged"):
        begin(tmp_path, "local/checkpoints/step-00000002", "next")
    with pytest.raises(CheckpointError, match="resume_from is 'nobody'"):
        begin(tmp_path, "nobody", "third")
    storage = DirectoryStorage(tmp_path)
    for found in (ResumePoint(storage, "local", 3), ResumePoint(storage, "local")):
        assert found.find().step == 3
    for source in (ResumePoint(storage, "local", 4), ResumePoint(storage, "nobody")):
        says = f"resume_from names {source.uri}, but .*no (complete )?checkpoint of"
        with pytest.raises(InvalidParamsError, match=says):
            source.find()
