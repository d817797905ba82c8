"""The parameters on a run's record, by which its checkpoint is evaluated, or a refusal."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.settings import PREFECT_API_URL, temporary_settings

from prefect_torch_ddp import DirectoryStorage, InvalidParamsError
from prefect_torch_ddp.cli.train import resume
from prefect_torch_ddp.params import ClusterParams, ContextParams, TrainParams
from prefect_torch_ddp.records.run_record import read_run_record, write_run_record
from prefect_torch_ddp.server import ServerError
from prefect_torch_ddp.tracking.description import draft_record, recorded_params, values_for_record
from tests.support.formats import rewrite
from tests.support.pages import DATASET
from tests.support.storage_0_1 import RUN_ID, copied


def put_on_record(
    storage: DirectoryStorage, options: dict[str, Any], kind: str = "a flow's"
) -> None:
    """Write a run's record as a training does."""
    params: ContextParams = TrainParams(storage=storage.uri, options=options)
    if kind == "a task's":
        params = ContextParams(storage=storage.uri, options=options)
    about = {"workload": "w", "dataset": DATASET if kind == "a flow's" else None}
    write_run_record(storage, draft_record(params, "r", "e", storage, **about))


def test_the_parameters_come_back(tmp_path: Path) -> None:
    """All of them, with the dataset and the experiment."""
    storage = DirectoryStorage(tmp_path)
    given = {"names": ["a <b>", "a of 3", "timm:resnet50@v1", "docker://repo:tag@sha256:abc"]}
    put_on_record(storage, {"epochs": 3, "about": given})
    params, dataset, experiment = recorded_params(storage, "r")
    assert (params.options["epochs"], dataset.dataset_id, experiment) == (3, "d", "e")
    assert dataset.model_dump() == DATASET
    assert params.options["about"] == given


def test_floats_that_json_lacks_come_back(tmp_path: Path) -> None:
    """They came back as None; a text that is written like one stays a text."""
    storage, inf = DirectoryStorage(tmp_path), math.inf
    given = {"clip": inf, "bounds": [-inf, {"high": inf}], "missing": ["NaN", "(text) Infinity"]}
    put_on_record(storage, {**given, "fill": math.nan})
    for _ in range(2):
        params, *_ = recorded_params(storage, "r")
        assert math.isnan(params.options["fill"])
        assert {**params.options, "fill": 0} == {**given, "fill": 0}
        write_run_record(storage, read_run_record(storage, "r"))  # as an evaluation does
    (file,) = tmp_path.rglob("run-records/**/*.json")
    stored = json.loads(file.read_text("utf-8"), parse_constant=pytest.fail)
    assert stored["options"] == {
        "clip": "Infinity",
        "bounds": ["-Infinity", {"high": "Infinity"}],
        "missing": ["(text) NaN", "(text) (text) Infinity"],
        "fill": "NaN",
    }


def test_texts_of_a_record_without_marks_stay_texts(tmp_path: Path) -> None:
    """Earlier versions marked none, and their table's word for a missing value became a float."""
    given = {"na_values": ["NaN", "", "(text) NaN"]}
    folder = copied(tmp_path / "storage")
    storage = DirectoryStorage(folder)
    (file,) = folder.rglob("run-records/**/*.json")
    rewrite(storage, file.relative_to(folder).as_posix(), {"options": given})
    assert "non_finite" not in json.loads(file.read_text("utf-8"))
    for _ in range(3):
        record = read_run_record(storage, RUN_ID)
        assert (record.options, record.unknown) == (given, ())
        write_run_record(storage, record)  # as an evaluation does: with marks
    stored = json.loads(file.read_text("utf-8"))
    assert stored["options"] == {"na_values": ["(text) NaN", "", "(text) (text) NaN"]}
    assert stored["non_finite"] == "texts"


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
        ({}, "a task's", "it isn't a run of train_flow; to resume it, call its task again"),
        ({}, "not prepared", "it ended before its data was prepared; train it from the start"),
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


def test_what_is_replaced_need_not_be_on_record(tmp_path: Path) -> None:
    """A hidden value is refused, also of an evaluation on another cluster, only if it is used."""
    storage = DirectoryStorage(tmp_path)
    kwargs = {"api_token": "x", "queue": "gpu"}
    cluster = ClusterParams(cluster_class="a.Cluster", cluster_kwargs=kwargs)
    params = TrainParams(storage=storage.uri, cluster=cluster, options={"token": "y", "epochs": 3})
    about = {"workload": "w", "dataset": DATASET}
    write_run_record(storage, draft_record(params, "r", "e", storage, **about))
    with pytest.raises(InvalidParamsError, match=r"\['cluster.cluster_kwargs.api_token'\] is not"):
        recorded_params(storage, "r", ["options.token"])
    known, *_ = recorded_params(storage, "r", ["cluster", "options.token"])
    assert known.options == {"epochs": 3}
    replaced = ["cluster.cluster_class", "cluster.cluster_kwargs.api_token", "options.token"]
    same, *_ = recorded_params(storage, "r", replaced)
    assert same == known
    assert known.cluster.model_dump(exclude_unset=True)["cluster_kwargs"] == {"queue": "gpu"}


LONG = {f"column_{number}": "float32" for number in range(200)}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (["seed=1"], r"\['data_options.table'\] is not on record"),
        (["data_options.table.a=1"], r"\['data_options.table'\] is not on record"),
        (['data_options.table={"a": 1}'], "no Prefect server answers"),
        (['data_options={"table": {"a": 1}}'], "no Prefect server answers"),
        (["data_options={}"], "no Prefect server answers"),
    ],
    ids=["another", "a part", "the whole", "within its group", "none"],
)
def test_resume_takes_a_group_that_is_given_in_place_of_a_long_one(
    tmp_path: Path, changes: list[str], says: str
) -> None:
    """It was refused, as if only the values in it had been given.

    What is refused, is so before the server, which doesn't answer here, is asked.
    """
    storage = DirectoryStorage(tmp_path)
    params = TrainParams(storage=storage.uri, data_options={"table": LONG})
    about = {"workload": "w", "dataset": DATASET}
    about["data_options"] = values_for_record(params.data_options)
    write_run_record(storage, draft_record(params, "r", "e", storage, **about))
    with (
        temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}),
        pytest.raises((InvalidParamsError, ServerError), match=says),
    ):
        resume("r", param=changes, storage=str(tmp_path))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("a.Cluster", r"\['cluster.cluster_kwargs.api_token'\] is not"),
        ("b.Cluster", "no Prefect server answers"),
    ],
)
def test_a_group_that_is_given_keeps_its_other_values(tmp_path: Path, name: str, says: str) -> None:
    """So a hidden one among them is still needed, even if the whole group seems to be given.

    The arguments of another class aren't.
    """
    storage = DirectoryStorage(tmp_path)
    kwargs = {"api_token": "x"}
    cluster = ClusterParams(cluster_class="a.Cluster", cluster_kwargs=kwargs)
    params = TrainParams(storage=storage.uri, cluster=cluster)
    about = {"workload": "w", "dataset": DATASET}
    write_run_record(storage, draft_record(params, "r", "e", storage, **about))
    with (
        temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}),
        pytest.raises((InvalidParamsError, ServerError), match=says),
    ):
        resume("r", param=[f'cluster={{"cluster_class": "{name}"}}'], storage=str(tmp_path))


def test_the_pods_of_kubernetes_come_back(tmp_path: Path) -> None:
    """Also with a few variables more: the whole cluster was too long then.

    The reference to a secret in it was hidden, so that no such run could be resumed.
    """
    file = Path(__file__).parents[3] / "deployments/clusters/kubernetes.yaml"
    values = yaml.safe_load(file.read_text("utf-8"))
    (worker,) = values["cluster_kwargs"]["custom_cluster_spec"]["spec"]["worker"]["spec"][
        "containers"
    ]
    worker["env"] += [{"name": f"NCCL_{number}", "value": "x" * 40} for number in range(20)]
    storage, cluster = DirectoryStorage(tmp_path), ClusterParams(**values)
    params = TrainParams(storage=storage.uri, cluster=cluster)
    about = {"workload": "w", "dataset": DATASET}
    write_run_record(storage, draft_record(params, "r", "e", storage, **about))
    known, *_ = recorded_params(storage, "r")
    assert known.cluster == cluster


@pytest.mark.parametrize("kind", ["a task's", "not prepared"])
def test_resume_refuses_such_a_run_before_it_starts_a_server(tmp_path: Path, kind: str) -> None:
    """The command and `recorded_params` say the same."""
    storage = DirectoryStorage(tmp_path)
    put_on_record(storage, {}, kind)
    with pytest.raises(InvalidParamsError) as by_record:
        recorded_params(storage, "r")
    with pytest.raises(InvalidParamsError) as by_command:
        resume("r", storage=str(tmp_path))
    assert str(by_command.value) == str(by_record.value)
