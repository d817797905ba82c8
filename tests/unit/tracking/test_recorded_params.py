"""The parameters on a run's record, by which its checkpoint is evaluated, or a refusal."""

from pathlib import Path
from typing import Any

import pytest

from prefect_torch_ddp import DirectoryStorage, InvalidParamsError
from prefect_torch_ddp.params import ContextParams, TrainParams
from prefect_torch_ddp.records.run_record import write_record
from prefect_torch_ddp.tracking.description import draft_record, recorded_params
from tests.support.pages import DATASET


def put_on_record(
    storage: DirectoryStorage, options: dict[str, Any], kind: str = "a flow's"
) -> None:
    """Write a run's record as a training does."""
    params: ContextParams = TrainParams(storage=storage.uri, options=options)
    if kind == "a task's":
        params = ContextParams(storage=storage.uri, options=options)
    about = {"workload": "w", "dataset": DATASET if kind == "a flow's" else None}
    write_record(storage, draft_record(params, "r", "e", storage, **about))


def test_the_parameters_come_back(tmp_path: Path) -> None:
    """All of them, with the dataset and the experiment."""
    storage = DirectoryStorage(tmp_path)
    given = {"names": ["a <b>", "a of 3", "timm:resnet50@v1", "docker://repo:tag@sha256:abc"]}
    put_on_record(storage, {"epochs": 3, "about": given})
    params, dataset, experiment = recorded_params(storage, "r")
    assert (params.options["epochs"], dataset.dataset_id, experiment) == (3, "d", "e")
    assert dataset.model_dump() == DATASET
    assert params.options["about"] == given


@pytest.mark.parametrize(
    ("options", "kind", "why"),
    [
        ({"net": [{"api_token": "x"}]}, "a flow's", r"\['options.net'\] is not on record"),
        (
            {"table": "postgresql://me:x@host/db"},
            "a flow's",
            r"\['options.table'\] is not on record",
        ),
        ({"rows": list(range(2_000))}, "a flow's", r"\['options.rows'\] is not on record"),
        ({"fn": Path.cwd}, "a flow's", r"\['options.fn'\] is not on record"),
        ({}, "a task's", "it isn't a run of train_flow"),
        ({}, "not prepared", "it ended before its data was prepared"),
    ],
    ids=["hidden", "a URL with a user", "long", "not plain", "no flow", "not prepared"],
)
def test_what_is_not_on_record_is_named(
    tmp_path: Path, options: dict[str, Any], kind: str, why: str
) -> None:
    """A value that the record lacks is an error, and no stand-in replaces it."""
    storage = DirectoryStorage(tmp_path)
    put_on_record(storage, options, kind)
    with pytest.raises(InvalidParamsError, match=why):
        recorded_params(storage, "r")
