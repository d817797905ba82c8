"""A run's parameters are resolved once, before anything is started."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from prefect import flow
from prefect.runtime import flow_run
from prefect_dask import DaskTaskRunner

from prefect_torch_ddp import InvalidParamsError, RankContext, TrainParams
from prefect_torch_ddp.data.datasets.dataset_store import publish_dataset
from prefect_torch_ddp.errors import PrefectTorchDdpError
from prefect_torch_ddp.records.run_record import write_run_record
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.tasks.train_run import Run
from prefect_torch_ddp.tracking.description import draft_record

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("prefect_api")]
DIGITS = "prefect_torch_ddp.examples.digits"


def runs_of(folder: Path, *given: dict[str, Any]) -> list[Run]:
    """Resolve parameters in a flow run, whose cluster is never used."""

    @flow(name="resolving", flow_run_name="brave-owl", task_runner=DaskTaskRunner())  # type: ignore[arg-type]
    def resolves() -> list[Run]:
        store = str(folder / "store")
        found = [Run.from_params(TrainParams(**{"storage": store, **each})) for each in given]
        assert {each.run_id for each in found} == {f"brave-owl-{flow_run.id[-12:]}"}
        return found

    return resolves()


def test_everything_that_parameters_name_is_resolved(tmp_path: Path) -> None:
    """The dataset's id depends on prepare's options and the raw data, not on the training's."""
    raw = {"source": str(tmp_path / "raw")}
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw/a.txt").write_text("a")
    plain, trained, options, other = runs_of(
        tmp_path,
        {"world_size": 3},
        {"seed": 1, "options": {"epochs": 3}},
        {"data_options": {"split_seed": 3}},
        raw,
    )
    assert isinstance(plain.storage, DirectoryStorage)
    assert plain.storage.uri == str(tmp_path / "store")
    assert plain.experiment == f"resolving/{DIGITS}"
    assert plain.params.ranks_per_worker == 3
    assert plain.resume_from is None
    assert plain.source is None
    assert other.source is not None
    assert trained.dataset_id == plain.dataset_id
    assert len({plain.dataset_id, options.dataset_id, other.dataset_id}) == 3


def test_a_relative_source_is_kept_as_the_folder_that_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record has it so: in another folder the same words would be another place."""
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw/a.txt").write_text("a")
    monkeypatch.chdir(tmp_path)
    (run,) = runs_of(tmp_path, {"source": "raw"})
    assert run.params.source == run.source.uri == str(tmp_path / "raw")  # type: ignore[union-attr]


@pytest.mark.parametrize("change", ["rewritten", "touched", "added", "removed"])
def test_a_chunk_of_the_raw_data_that_changes_makes_another_dataset(
    change: str, tmp_path: Path
) -> None:
    """All files below `source` count, so that no dataset of earlier data is used again."""
    chunk = tmp_path / "raw/t/c/0/1"
    chunk.parent.mkdir(parents=True)
    chunk.write_bytes(b"1")
    os.utime(chunk, (1, 1))
    raw = {"source": str(tmp_path / "raw")}
    first, again = runs_of(tmp_path, raw, raw)
    assert first.dataset_id == again.dataset_id
    match change:
        case "rewritten":
            chunk.write_bytes(b"2")
        case "touched":
            os.utime(chunk, (2, 2))
        case "added":
            (chunk.parent / "2").write_bytes(b"1")
        case "removed":
            (tmp_path / "raw/zarr.json").write_bytes(b"{}")
            chunk.unlink()
    (changed,) = runs_of(tmp_path, raw)
    assert changed.dataset_id != first.dataset_id


@pytest.mark.parametrize(
    ("given", "says"),
    [
        pytest.param({"workload": "no.such.module"}, "no.such.module", id="no such workload"),
        pytest.param({"resume_from": "no-such-run"}, "no-such-run", id="no such run"),
        pytest.param({"max_world_size": 4}, "max_world_size is 4", id="a cluster that can't grow"),
        pytest.param(
            {"data_options": {"split_seed": object()}}, "data_options", id="options not plain"
        ),
    ],
)
def test_what_can_not_work_is_refused(tmp_path: Path, given: dict[str, Any], says: str) -> None:
    """Each error names the parameter."""
    with pytest.raises(PrefectTorchDdpError, match=says):
        runs_of(tmp_path, given)


def test_an_evaluation_needs_no_raw_data_if_the_dataset_was_prepared(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning says that they are gone; without the dataset too it is an error."""
    storage, raw = DirectoryStorage(tmp_path / "store"), tmp_path / "raw"
    with RankContext.local(storage=storage, run_id="r") as ctx:
        ctx.track(model=torch.nn.Linear(1, 1))
    params = TrainParams(storage=storage.uri, source=str(raw))

    @flow(name="resolving", task_runner=DaskTaskRunner())  # type: ignore[arg-type]
    def resolves() -> tuple[Run, Run]:
        dataset = publish_dataset(storage, "d", lambda folder: (folder / "x").write_text("1"))
        about = {"workload": params.workload, "dataset": dataset}
        write_run_record(storage, draft_record(params, "r", "e", storage, **about))
        raw.mkdir()
        there, _ = Run.from_checkpoint(f"{storage.uri}/runs/r", None, None)
        raw.rmdir()
        gone, _ = Run.from_checkpoint(f"{storage.uri}/runs/r", None, None)
        shutil.rmtree(tmp_path / "store/datasets")
        with pytest.raises(InvalidParamsError, match=f"there is no folder {raw} here"):
            Run.from_checkpoint(f"{storage.uri}/runs/r", None, None)
        return there, gone

    there, gone = resolves()
    assert there.source is not None
    assert gone.source is None
    assert there.dataset_id == gone.dataset_id == "d"
    (said,) = {each for each in caplog.messages if "the prepared dataset d" in each}
    assert f"there is no folder {raw} here" in said


def test_a_run_without_a_record_is_not_evaluated(tmp_path: Path) -> None:
    """The evaluation is refused before a cluster is started."""
    with pytest.raises(PrefectTorchDdpError, match="no-such-run"):
        Run.from_checkpoint(f"{tmp_path}/store/runs/no-such-run", None, None)
