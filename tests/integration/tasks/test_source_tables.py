"""A workload without `prepare` trains on the Parquet files of its source, where they lie."""

import io
import json
from pathlib import Path

import pytest

from prefect_torch_ddp import (
    ClusterParams,
    InvalidParamsError,
    RankContext,
    TrainParams,
    evaluate_flow,
    train_flow,
)
from prefect_torch_ddp.data import table
from prefect_torch_ddp.data.preparing import tables_in
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.storage.protocol import Storage
from tests.workloads.dask_parts import part

pytestmark = [pytest.mark.timeout(200), pytest.mark.usefixtures("prefect_api")]
WORKLOAD = "tests.workloads.raw_table"


def write_parts(raw: Storage) -> None:
    """Write three files of 100 rows."""
    for number in (0, 1, 3):
        content = io.BytesIO()
        part(number).to_parquet(content)
        raw.write(f"{number}.parquet", content.getvalue())


def test_a_rank_reads_the_source_as_its_dataset(storage: Storage) -> None:
    """`data_storage` has the files that are described, in a folder or a bucket."""
    write_parts(storage)
    found = tables_in(storage)
    with RankContext.local(source=storage) as ctx:
        rows = table(ctx.data_storage, features=["number"], target="half")
    assert (len(rows), found.num_files, found.uri) == (300, 3, storage.uri)
    assert found.num_bytes == sum(item.num_bytes for item in storage.list_objects(""))


@pytest.mark.extended
def test_a_flow_trains_on_its_source_without_a_prepare(
    shared: ClusterParams,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is copied, and a checkpoint is evaluated on the same files, or with a warning, from
    any folder."""
    monkeypatch.chdir(tmp_path)
    raw = DirectoryStorage(tmp_path / "raw")
    write_parts(raw)
    store = tmp_path / "store"
    params = TrainParams(
        workload=WORKLOAD, source="raw", storage=str(store), cluster=shared, ledger=True
    )
    report = train_flow(params)
    assert (report.dataset.uri, report.dataset.num_files) == (raw.uri, 3)
    assert report.training.value["rows"] == report.evaluation.num_samples == 300
    assert report.ledger.is_clean
    assert not (store / "datasets").exists()
    (card,) = store.rglob("model.json")
    assert json.loads(card.read_bytes())["dataset"]["digest"] == report.dataset.digest
    (tmp_path / "elsewhere/raw").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "elsewhere")
    again = evaluate_flow(report.checkpoint.uri, cluster=shared)
    assert again.metrics == report.evaluation.metrics
    assert "have changed since run" not in caplog.text

    content = io.BytesIO()
    part(4).to_parquet(content)
    raw.write("4.parquet", content.getvalue())
    changed = evaluate_flow(report.checkpoint.uri, cluster=shared)
    assert changed.num_samples == 400
    (said,) = {each for each in caplog.messages if "have changed since run" in each}
    assert f"{raw.uri} have changed since run {report.run_id}: 4 files of" in said
    assert f"they were 3 of {report.dataset.num_bytes}" in said


def test_a_source_without_tables_is_refused_before_a_cluster_is_used(tmp_path: Path) -> None:
    """The error names the source, and what the workload lacks."""
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw/cat.jpg").write_bytes(b"x")
    given = {"workload": WORKLOAD, "storage": str(tmp_path / "store")}
    with pytest.raises(InvalidParamsError, match=r"no Parquet file in .*raw.*prepare"):
        train_flow(TrainParams(source=str(tmp_path / "raw"), **given))
    with pytest.raises(InvalidParamsError, match=r"has no function 'prepare'.*Parquet.*source="):
        train_flow(TrainParams(**given))
