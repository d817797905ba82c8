"""What is typed as `name=value`, and which run is meant."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from prefect_torch_ddp import ClusterParams, DirectoryStorage, InvalidParamsError, TrainParams
from prefect_torch_ddp.cli.app import app
from prefect_torch_ddp.cli.options import checked_params, find_run, nested, parse_values
from prefect_torch_ddp.cli.train import _before, _excluded, _names, _over
from prefect_torch_ddp.records.run_record import write_run_record
from tests.support.pages import BEGAN, RECORD

OTTER, NEWER_OTTER, SKUA = "calm-otter-1234", "calm-otter-5678", "wild-skua-1234"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("n=3", 3),
        ("n=1e-3", 1e-3),
        ("n=true", True),
        ("n=null", None),
        ("n=False", False),
        ("n=None", None),
        ('n="None"', "None"),
        ("n=false1", "false1"),
        ("n=[1, 2]", [1, 2]),
        ("n=resnet18", "resnet18"),
        ("n=a=b", "a=b"),
        ("n=", ""),
        ('n="3"', "3"),
    ],
)
def test_a_value_is_json_or_text(text: str, value: Any) -> None:
    """Numbers and lists are read as such; whatever isn't JSON is a text."""
    assert parse_values([text], "-o") == {"n": value}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["epochs"], "-o epochs: write it as name=value"),
        (["=3"], "write it as name=value"),
        (["n=1", "n=2"], "-o n is given twice"),
    ],
)
def test_what_is_no_pair_is_refused(given: list[str], says: str) -> None:
    """By name, rather than read as something else."""
    with pytest.raises(InvalidParamsError, match=says):
        parse_values(given, "-o")


def test_dotted_names_are_groups() -> None:
    """As in the parameters of a deployment."""
    values = {"seed": 1, "checkpoint.every_steps": 5, "checkpoint.keep_last": 1}
    whole = {"seed": 1, "checkpoint": {"every_steps": 5, "keep_last": 1}}
    assert nested(values, "-p") == whole


@pytest.mark.parametrize("names", [("a", "a.b"), ("a.b", "a"), ("a.b", "a.b.c")])
def test_a_name_is_a_value_or_a_group(names: tuple[str, str]) -> None:
    """Not both, in any order."""
    with pytest.raises(InvalidParamsError, match="a is given both as a value and as a group"):
        nested(dict.fromkeys(names, 1), "-p")


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"sed": 1}, "there is no option sed; did you mean seed?"),
        (
            {"checkpoint": {"every_step": 1}},
            "there is no option checkpoint.every_step; did you mean checkpoint.every_steps?",
        ),
        ({"world_size": 0}, "world_size is 0; it should be greater than or equal to 1"),
        ({"evaluate_on": "bets"}, "evaluate_on is 'bets'; choose one of last, best"),
        ({"xyz": 1}, "there is no option xyz"),
    ],
)
def test_a_wrong_parameter_is_named_with_the_near_one(values: dict[str, Any], says: str) -> None:
    """In groups too, by its whole name."""
    with pytest.raises(InvalidParamsError) as caught:
        checked_params(values)
    assert str(caught.value) == says


@pytest.fixture
def storage(tmp_path: Path) -> DirectoryStorage:
    """Make a storage with three runs, the last of which is the newest."""
    storage = DirectoryStorage(tmp_path)
    for day, run_id in enumerate((OTTER, SKUA, NEWER_OTTER)):
        began = BEGAN.replace(day=1 + day)
        changes = {"run_id": run_id, "began": began, "experiment": f"z{9 - day}"}
        write_run_record(storage, RECORD.model_copy(update=changes))
    return storage


@pytest.mark.parametrize(
    ("given", "run_id"),
    [(OTTER, OTTER), ("wild", SKUA), ("latest", NEWER_OTTER), ("calm-otter-5", NEWER_OTTER)],
)
def test_a_run_is_named_whole_by_its_beginning_or_as_the_latest(
    storage: DirectoryStorage, given: str, run_id: str
) -> None:
    """The latest is that of all experiments, whatever their names."""
    assert find_run(storage, given) == run_id


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("calm", f"2 runs begin with calm: {NEWER_OTTER}, {OTTER}"),
        ("wild-sku-1234", f"did you mean {SKUA}?"),
        ("x", "`prefect-torch-ddp runs` lists all"),
    ],
)
def test_no_run_is_guessed(storage: DirectoryStorage, given: str, says: str) -> None:
    """What may be meant is named instead."""
    with pytest.raises(InvalidParamsError) as caught:
        find_run(storage, given)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("sh", ["show"]),
        ("train --world", ["--world-size"]),
        ("show --storage STORE calm", [NEWER_OTTER, OTTER]),
        ("resume --storage STORE w", [SKUA]),
        ("metrics --storage nowhere w", []),
    ],
    ids=["a command", "an option", "runs", "a run", "no run"],
)
def test_tab_completes_commands_options_and_runs(
    storage: DirectoryStorage, words: str, completed: list[str]
) -> None:
    """As bash asks for it; of runs, those of the storage that was typed."""
    typed = f"prefect-torch-ddp {words}".replace("STORE", storage.uri)
    asked = {"COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    environment = {"_PREFECT_TORCH_DDP_COMPLETE": "complete_bash", **asked}
    result = CliRunner().invoke(app, env=environment, prog_name="prefect-torch-ddp")
    assert result.output.split() == completed


def test_an_empty_storage_says_so(tmp_path: Path) -> None:
    """The error names the option for another storage."""
    with pytest.raises(InvalidParamsError, match=r"there is no run in .*; choose .* --storage"):
        find_run(DirectoryStorage(tmp_path), "latest")


def test_a_changed_group_keeps_its_other_values_at_any_depth() -> None:
    """Else a job's queue and account would go with a change of its memory."""
    kwargs = {"queue": "gpu", "account": "a", "memory": "8GB"}
    before = {"cluster": {"cluster_class": "dask_jobqueue.SLURMCluster", "cluster_kwargs": kwargs}}
    changes = nested({"cluster.cluster_kwargs.memory": "16GB", "checkpoint.every_s": 5}, "-p")
    assert _over(before, changes) == {
        "cluster": {**before["cluster"], "cluster_kwargs": {**kwargs, "memory": "16GB"}},
        "checkpoint": {"every_s": 5},
    }


def test_an_empty_group_replaces_the_recorded_one() -> None:
    """It was merged, so that nothing could empty a recorded mapping."""
    before = {"cluster": {"cluster_class": "a.Cluster", "cluster_kwargs": {"queue": "gpu"}}}
    changes = nested({"cluster.cluster_kwargs": {}}, "-p")
    assert _over(before, changes) == {"cluster": {**before["cluster"], "cluster_kwargs": {}}}
    assert _over(before, {"cluster": {}}) == {"cluster": {}}


def test_what_changes_replace_is_named() -> None:
    """Those values needn't be on record: `resume` leaves them out of it."""
    changes = nested({"cluster.cluster_kwargs.api_token": "x", "checkpoint": {}, "seed": 1}, "-p")
    assert [*_names(changes)] == ["cluster.cluster_kwargs.api_token", "checkpoint", "seed"]


def test_a_run_of_its_own_cluster_is_placed_anew_on_another() -> None:
    """There one worker has all ranks, as is on record; on another cluster each has its own."""
    local = TrainParams(world_size=4, ranks_per_worker=4)
    moved = nested({"cluster.address": "tcp://a:8786"}, "-p")
    assert "ranks_per_worker" not in _before(local, moved)
    assert _before(local, {"seed": 1})["ranks_per_worker"] == 4
    given = TrainParams(ranks_per_worker=2, cluster=ClusterParams(address="tcp://a:8786"))
    assert (
        _before(given, nested({"cluster.address": "tcp://b:8786"}, "-p"))["ranks_per_worker"] == 2
    )


@pytest.mark.parametrize(
    ("recorded", "change", "expected"),
    [
        ({"cluster_class": "a.B", "cluster_kwargs": {"n": 1}}, {"address": "tcp://a:1"}, {}),
        ({"adapt_kwargs": {"maximum": 2}}, {"scheduler_file": "/s.json"}, {}),
        ({"address": "tcp://a:1"}, {"address": "tcp://b:1"}, {}),
        ({"address": "tcp://a:1"}, {"scheduler_file": "/s.json"}, {}),
        ({"scheduler_file": "/s.json"}, {"cluster_class": "a.B"}, {}),
        ({"cluster_class": "a.B", "cluster_kwargs": {"n": 1}}, {"cluster_class": "a.C"}, {}),
        ({"cluster_kwargs": {"n": 1}}, {"cluster_class": "a.C", "cluster_kwargs": {"m": 2}}, {}),
        ({"cluster_class": "a.B", "cluster_kwargs": {"n": 1}}, {"cluster_class": None}, {}),
        (
            {"cluster_class": "a.B", "cluster_kwargs": {"n": 1}, "adapt_kwargs": {"maximum": 2}},
            {"cluster_class": "a.C"},
            {"adapt_kwargs": {"maximum": 2}},
        ),
        (
            {"cluster_class": "a.B", "cluster_kwargs": {"n": 1}},
            {"cluster_class": "a.B"},
            {"cluster_kwargs": {"n": 1}},
        ),
    ],
)
def test_a_cluster_that_is_named_takes_the_place_of_the_recorded_one(
    recorded: dict[str, Any], change: dict[str, Any], expected: dict[str, Any]
) -> None:
    """A run of a batch system's cluster couldn't be resumed on one that runs, nor the other way.

    Another class got the arguments of the recorded one.
    """
    whole = ClusterParams(**recorded).model_dump()  # a record has every value
    before = _before(TrainParams(cluster=ClusterParams(**whole)), {"cluster": change})
    made = checked_params({**before, **_over(before, {"cluster": change})})
    assert made.cluster == ClusterParams(**change, **expected)


def test_two_clusters_that_are_named_are_refused() -> None:
    """Only what is on record gives way."""
    changes = {"cluster": {"address": "tcp://a:1", "cluster_class": "a.B"}}
    before = _before(TrainParams(), changes)
    with pytest.raises(InvalidParamsError, match="names a running cluster"):
        checked_params({**before, **_over(before, changes)})


def test_a_secret_of_the_recorded_cluster_is_not_needed_on_another_one() -> None:
    """What isn't on record of the cluster that gives way was asked for."""
    kwargs = "cluster.cluster_kwargs"
    assert {*_excluded({"cluster": {"address": "tcp://a:1"}}, None)} >= {kwargs}
    assert not {*_excluded({"cluster": {"address": None, "cluster_kwargs": {"n": 1}}}, None)}
    assert kwargs in {*_excluded({"cluster": {"cluster_class": "a.C"}}, "a.B")}
    assert kwargs not in {*_excluded({"cluster": {"cluster_class": "a.B"}}, "a.B")}
