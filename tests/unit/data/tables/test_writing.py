"""A partition becomes a Parquet file whose entry in the manifest says what it holds."""

import re
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
from pydantic_core import from_json

from prefect_torch_ddp.data.datasets.dataset_manifest import DatasetManifest, manifest_of
from prefect_torch_ddp.data.tables.writing import write_partition
from prefect_torch_ddp.storage.directory import DirectoryStorage

PAGE = Path(__file__).parents[4] / "docs/formats.md"


def test_an_entry_has_the_rows_of_its_file(tmp_path: Path) -> None:
    """The manifest stores them, and each of its fields is explained in the manual."""
    storage = DirectoryStorage(tmp_path)
    frame = pd.DataFrame({"n": range(20_000)})
    (file,) = write_partition(frame, storage, "datasets/d/files-0", 0, dict(frame.dtypes)).files
    stored = manifest_of("d", "files-0", [file]).to_bytes()
    (entry,) = from_json(stored)["files"]
    assert (
        entry["num_rows"] == pq.read_metadata(tmp_path / "datasets/d/files-0" / file.key).num_rows
    )
    assert set(entry) <= set(re.findall(r"`(\w+)`", PAGE.read_text(encoding="utf-8")))
    assert DatasetManifest.from_bytes(stored, "here").files == (file,)


def test_an_entry_without_rows_is_read(tmp_path: Path) -> None:
    """Earlier versions stored none, nor do files that `prepare` itself wrote have any."""
    storage = DirectoryStorage(tmp_path)
    (file,) = write_partition(pd.DataFrame({"n": [1]}), storage, "files-0", 0, {}).files
    earlier = file.model_copy(update={"num_rows": None})
    stored = manifest_of("d", "files-0", [earlier]).to_bytes()
    assert b"num_rows" not in stored
    assert DatasetManifest.from_bytes(stored, "here").files == (earlier,)
