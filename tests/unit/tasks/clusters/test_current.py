"""A run's cluster: whose it is, and how many ranks a Dask worker holds."""

from typing import Any

import pytest
from prefect.context import FlowRunContext
from prefect_dask import DaskTaskRunner

from prefect_torch_ddp import ClusterParams, InvalidParamsError, TrainParams
from prefect_torch_ddp.tasks.clusters.chosen import point_at_cluster
from prefect_torch_ddp.tasks.clusters.current import with_ranks_placed


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


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("address", "tcp://a:8786"),
        ("cluster_class", "distributed.LocalCluster"),
        ("cluster_kwargs", {"n_workers": 3}),
        ("adapt_kwargs", {"maximum": 3}),
    ],
)
def test_the_cluster_of_a_flows_own_task_runner_is_kept(name: str, value: Any) -> None:
    """`with_options(task_runner=...)` isn't overwritten in silence; two clusters are refused."""
    runner, like = (DaskTaskRunner(**{name: value}) for _ in range(2))
    point_at_cluster(runner, TrainParams())
    assert {**vars(runner), "_exit_stack": None} == {**vars(like), "_exit_stack": None}
    other = ClusterParams(cluster_kwargs={"n_workers": 2})
    with pytest.raises(InvalidParamsError, match=rf"the flow's task runner \({name}\) both say"):
        point_at_cluster(runner, TrainParams(cluster=other))


@pytest.mark.parametrize(
    ("given", "room"),
    [
        ({}, 2),
        ({"ranks_per_worker": 1}, 2),
        ({"min_world_size": 1}, 2),
        ({"ranks_per_worker": 3}, 3),
        ({"cluster": {"cluster_kwargs": {"n_workers": 3}}}, 3),
        ({"cluster": {"adapt_kwargs": {"maximum": 8}}}, None),
        ({"cluster": {"address": "tcp://a:8786"}}, None),
    ],
)
def test_a_local_cluster_without_room_to_grow_is_refused(
    given: dict[str, Any], room: int | None
) -> None:
    """However its ranks are placed: it would never grow, without a word."""
    params = TrainParams(world_size=2, max_world_size=4, **given)
    with FlowRunContext.model_construct(task_runner=DaskTaskRunner()):
        if room is None:
            assert with_ranks_placed(params).max_world_size == 4
            return
        with_ranks_placed(params.model_copy(update={"max_world_size": room}))
        with pytest.raises(
            InvalidParamsError, match=f"own local cluster has room for {room} ranks"
        ):
            with_ranks_placed(params)
