"""A waiting task holds back nothing from others, and a task that does is named."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import UUID, uuid4

import dask
import pytest
from distributed import Client, LocalCluster
from prefect import flow, task
from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound
from prefect_dask import DaskTaskRunner, get_dask_client

from prefect_torch_ddp import (
    InvalidParamsError,
    NotEnoughWorkersError,
    RankContext,
    ddp_task,
    run_gang,
)
from tests.support.waiting import wait_until
from tests.workloads import plain

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.extended,
    pytest.mark.usefixtures("prefect_api"),
]


@contextmanager
def limit_of_one() -> Iterator[str]:
    """Make a tag of which Prefect runs one task at a time."""
    tag = f"one-at-a-time-{uuid4().hex[:8]}"
    with get_client(sync_client=True) as client:
        client.create_concurrency_limit(tag=tag, concurrency_limit=1)
        try:
            yield tag
        finally:
            client.delete_concurrency_limit_by_tag(tag)


def on(cluster: LocalCluster) -> DaskTaskRunner:
    """Name the cluster to a flow."""
    return DaskTaskRunner(address=cluster.scheduler_address)


def state_of(task_run_id: UUID) -> str:
    """Return a task run's state; empty if Prefect has not heard of it yet."""
    with get_client(sync_client=True) as client, suppress(ObjectNotFound):
        return str(client.read_task_run(task_run_id).state_name)
    return ""


def test_trainings_of_one_concurrency_limit_run_one_after_the_other(
    dask_cluster: LocalCluster, tmp_path: Path
) -> None:
    """A training that waits for its slot leaves its worker's only thread to the other one."""
    with limit_of_one() as tag:

        @ddp_task(world_size=2, storage=str(tmp_path), tags=[tag])
        def fit(ctx: RankContext, number: int) -> tuple[int, int]:
            return number, ctx.world_size

        @flow(task_runner=on(dask_cluster))
        def both() -> list[tuple[int, int]]:
            return [each.result() for each in fit.map([1, 2])]

        assert both() == [(1, 2), (2, 2)]


@pytest.mark.long
def test_a_task_that_waits_for_its_retry_leaves_its_thread_to_others(tmp_path: Path) -> None:
    """Another training takes all workers while a retry waits for an hour."""

    @ddp_task(world_size=1, storage=str(tmp_path), retries=1, retry_delay_seconds=3600)
    def fails(ctx: RankContext) -> None:
        raise OSError(ctx.run_id)

    @ddp_task(world_size=2, storage=str(tmp_path))
    def fit(ctx: RankContext) -> int:
        return ctx.world_size

    # Its own cluster: a thread of it sleeps when the flow has ended.
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster:

        @flow(task_runner=on(cluster))
        def both() -> tuple[int, str]:
            waiting = fails.submit()
            wait_until(lambda: state_of(waiting.task_run_id) == "AwaitingRetry")
            return fit.submit().result(), state_of(waiting.task_run_id)

        assert both() == (2, "AwaitingRetry")


def test_a_training_ends_while_others_use_the_threads_of_its_worker(tmp_path: Path) -> None:
    """A task needs no thread once its ranks have returned."""
    begun, mark = tmp_path / "the first one has begun", tmp_path / "the first one has ended"

    @ddp_task(world_size=1, storage=str(tmp_path))
    def first(ctx: RankContext) -> int:
        begun.touch()
        return ctx.world_size

    @ddp_task(world_size=1, storage=str(tmp_path))
    def second(ctx: RankContext) -> int:
        wait_until(mark.exists)
        return ctx.world_size

    with LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=":0") as cluster:

        @flow(task_runner=on(cluster))
        def both() -> tuple[int, int]:
            the_first = first.submit()
            wait_until(begun.exists)  # else the second one's gang may have the worker before it
            the_second = second.submit()
            ended = the_first.result()
            mark.touch()
            return ended, the_second.result()

        assert both() == (1, 1)


def test_a_gang_of_a_task_may_run_where_the_task_runs(dask_cluster: LocalCluster) -> None:
    """`run_gang` in a Prefect task takes all workers of the cluster, including the task's own."""

    @task
    def train() -> list[float]:
        with get_dask_client() as client:
            return run_gang(client, plain.sum_of_ones, world_size=2)

    @flow(task_runner=on(dask_cluster))
    def main() -> list[float]:
        return train.submit().result()

    assert main() == [2.0, 2.0]


def test_a_task_that_waits_in_prefect_is_named_with_what_it_waits_for(
    dask_cluster: LocalCluster, tmp_path: Path
) -> None:
    """A waiting gang names the task that keeps a thread, and the limit for which it waits."""
    may_end, address = tmp_path / "may end", dask_cluster.scheduler_address

    def names(what: str) -> bool:
        with Client(address) as client, pytest.raises(NotEnoughWorkersError) as caught:
            run_gang(client, plain.sum_of_ones, world_size=2, queue_timeout_s=1)
        return f", which waits for {what}" in str(caught.value)

    with limit_of_one() as tag:

        @task(tags=[tag])
        def holds() -> None:
            wait_until(may_end.exists)

        @task(tags=[tag])
        def waits() -> int:
            return 1

        @flow(task_runner=on(dask_cluster))
        def main() -> int:
            holder = holds.submit()
            wait_until(lambda: state_of(holder.task_run_id) == "Running")
            waiting = waits.submit()
            wait_until(lambda: names("a slot of a concurrency limit"))
            may_end.touch()
            return waiting.result()

        assert main() == 1


def test_a_task_that_holds_what_its_gang_needs_is_refused(tmp_path: Path) -> None:
    """A task that holds the GPU that its gang needs is refused."""

    @ddp_task(world_size=1, resources={"GPU": 1}, storage=str(tmp_path), retries=2)
    def fit(ctx: RankContext) -> int:
        return ctx.world_size

    given = {"n_workers": 1, "threads_per_worker": 1, "resources": {"GPU": 1}}
    with LocalCluster(**given, dashboard_address=":0") as cluster:

        @flow(task_runner=on(cluster))
        def main() -> int:
            with dask.annotate(resources={"GPU": 1}):
                held = fit.submit()
            says = r"itself holds GPU=1 of worker tcp.*; submit the task without dask.annotate\("
            with pytest.raises(InvalidParamsError, match=says):
                held.result()
            return fit.submit().result()

        assert main() == 1


def test_a_flow_on_a_cluster_that_starts_from_nothing_trains(tmp_path: Path) -> None:
    """A task has workers started on a cluster whose `adapt_kwargs` have a minimum of 0."""

    @ddp_task(world_size=2, storage=str(tmp_path))
    def fit(ctx: RankContext) -> int:
        return ctx.world_size

    shape = {"n_workers": 0, "threads_per_worker": 1, "dashboard_address": ":0"}
    scales = {"minimum": 0, "maximum": 2}

    @flow(task_runner=DaskTaskRunner(cluster_kwargs=shape, adapt_kwargs=scales))
    def main() -> int:
        return fit.submit().result()

    assert main() == 2
