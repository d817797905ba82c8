"""The shape of a run's cluster, how many ranks a Dask worker holds; and a scheduler's file."""

from pathlib import Path
from typing import Any

import pytest
from prefect.context import FlowRunContext
from prefect_dask import DaskTaskRunner

from prefect_torch_ddp import ClusterParams, InvalidParamsError, TrainParams
from prefect_torch_ddp.tasks.cluster import with_ranks_placed
from prefect_torch_ddp.tasks.scheduler_file import scheduler_address


@pytest.mark.parametrize(
    ("given", "runner", "expected"),
    [
        ({}, {}, 3),
        ({"ranks_per_worker": 1}, {}, 1),
        ({"min_world_size": 1}, {}, 1),
        ({"cluster": {"cluster_kwargs": {"n_workers": 3}}}, {}, 1),
        ({"cluster": {"address": "tcp://a:8786"}}, {}, 1),
        ({"cluster": {"scheduler_file": "a.json"}}, {}, 1),
        ({"cluster": {"cluster_class": "a.B"}, "ranks_per_worker": 2}, {}, 2),
        ({}, {"address": "tcp://a:8786"}, 1),
        ({}, {"cluster_kwargs": {"n_workers": 3}}, 1),
    ],
)
def test_a_cluster_of_a_runs_own_has_one_worker_for_all_ranks(
    given: dict[str, Any], runner: dict[str, Any], expected: int
) -> None:
    """A local cluster has one worker unless parameters or the task runner say otherwise."""
    context = FlowRunContext.model_construct(task_runner=DaskTaskRunner(**runner))
    with context:
        placed = with_ranks_placed(TrainParams(world_size=3, **given))
    assert placed.ranks_per_worker == expected


def test_the_file_of_a_scheduler_has_its_address(tmp_path: Path) -> None:
    """A file that doesn't appear, and one of something else, are refused by name."""
    file = tmp_path / "scheduler.json"
    cluster = ClusterParams(scheduler_file=str(file))
    with pytest.raises(InvalidParamsError, match=r"scheduler.json' didn't appear within 0.1 s"):
        scheduler_address(cluster, 0.1)
    file.write_text('{"id": "x"}')
    with pytest.raises(InvalidParamsError, match=r"isn't the file of a Dask scheduler: KeyError"):
        scheduler_address(cluster, 0.1)
    file.write_text('{"address": "tcp://10.0.0.1:8786"}')
    assert scheduler_address(cluster, 0.1) == "tcp://10.0.0.1:8786"
    assert scheduler_address(ClusterParams(address="tcp://a:1"), 0.1) == "tcp://a:1"
    assert scheduler_address(ClusterParams(), 0.1) is None
