"""Where a rank reads raw data from."""

from pathlib import Path

import pytest

from prefect_torch_ddp import InvalidParamsError, RankContext
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.storage.s3.storage import S3Storage
from prefect_torch_ddp.tasks.workload import dataset_id, read_workload


def test_the_source_of_a_local_context_is_a_path_a_uri_or_a_storage(tmp_path: Path) -> None:
    """As image_folder takes it."""
    storage = S3Storage("bucket", "raw")
    for source, expected in [
        (tmp_path, DirectoryStorage(tmp_path)),
        ("s3://bucket/raw", storage),
        (storage, storage),
    ]:
        with RankContext.local(source=source) as ctx:
            assert ctx.source == expected


def test_a_context_without_a_source_says_how_to_give_one() -> None:
    """An error with the ways to name it, when it is asked for."""
    with (
        RankContext.local() as ctx,
        pytest.raises(InvalidParamsError, match=r"TrainParams\(source=\.\.\.\)"),
    ):
        _ = ctx.source


def test_the_dataset_is_another_one_when_the_raw_data_is() -> None:
    """The same listing at the same place gives the same name; without a source it is as it
    was."""
    workload = read_workload("tests.workloads.tiny")
    ids = [
        dataset_id(workload, {}, source)
        for source in (
            None,
            {"uri": "a", "listing": "1"},
            {"uri": "a", "listing": "2"},
            {"uri": "b", "listing": "1"},
        )
    ]
    assert len(set(ids)) == 4
    assert dataset_id(workload, {}, {"uri": "a", "listing": "1"}) == ids[1]
