"""Gangs run on clusters that start and end workers by themselves: Dask's own Adaptive."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from distributed import Client, LocalCluster, Scheduler

from prefect_torch_ddp import NotEnoughWorkersError, run_gang
from prefect_torch_ddp.gang.caller.wanted import PREFIX
from tests.integration.gang.test_leaving import training
from tests.support.gangs import attempts_in, begun, sleeping_gang
from tests.support.waiting import HANG_S, wait_until
from tests.workloads import plain

if TYPE_CHECKING:
    from prefect_torch_ddp.protocol.events import GangEvent

pytestmark = [pytest.mark.timeout(300), pytest.mark.extended]


@contextmanager
def scaling(maximum: int, **shape: Any) -> Iterator[Client]:
    """Run a cluster that has as many workers as its tasks need, none at first."""
    given = {"n_workers": 0, "dashboard_address": ":0", "threads_per_worker": 1, **shape}
    with LocalCluster(**given) as cluster, Client(cluster) as client:
        cluster.adapt(minimum=0, maximum=maximum)
        yield client


def num_workers(client: Client) -> int:
    """Count the cluster's workers."""
    return len(client.scheduler_info(n_workers=-1)["workers"])


def num_asked(client: Client) -> int:
    """Count the stand-in tasks for workers that a gang lacks."""

    def count(dask_scheduler: Scheduler) -> int:
        return sum(str(key).startswith(PREFIX) for key in dask_scheduler.tasks)

    return int(client.run_on_scheduler(count))


def num_started(client: Client) -> int:
    """Count the workers that have ever joined the cluster."""
    return sum(event["action"] == "add-worker" for _, event in client.get_events("all"))


def most_at_once(client: Client) -> int:
    """Return how many workers the cluster has had at most.

    On a slow machine Dask may end an idle one between two attempts, and start another.
    """
    changes = {"add-worker": 1, "remove-worker": -1}
    events = [changes.get(event["action"], 0) for _, event in client.get_events("all")]
    return max(accumulate(events))


@pytest.mark.long
@pytest.mark.parametrize(
    "threads",
    [
        pytest.param(1, id="workers-of-1-thread"),
        pytest.param(3, id="workers-of-3-threads", marks=pytest.mark.more),
    ],
)
def test_a_cluster_without_workers_starts_as_many_as_a_gang_needs(threads: int) -> None:
    """The cluster starts no more workers than needed, and ends them after the gang."""
    with scaling(maximum=4, threads_per_worker=threads, resources={"GPU": 1}) as client:
        call = {"world_size": 2, "resources": {"GPU": 1}, "workers_timeout_s": HANG_S}
        assert run_gang(client, plain.sum_of_ones, **call) == [2.0, 2.0]
        wait_until(lambda: num_asked(client) == 0)
        wait_until(lambda: num_workers(client) == 0)
        assert num_started(client) == 2


@pytest.mark.long
def test_a_gang_that_finds_all_workers_busy_gets_another(tmp_path: Path) -> None:
    """Another gang keeps the only worker, and the cluster starts one more."""
    one = {"world_size": 1, "workers_timeout_s": HANG_S}
    with scaling(maximum=2) as client, sleeping_gang(client, tmp_path, **one) as (other, ranks):
        assert num_workers(client) == 1
        assert run_gang(client, plain.sum_of_ones, **one, queue_timeout_s=HANG_S) == [1.0]
        wait_until(lambda: num_asked(client) == 0)
        assert not other.done()
        ranks[0].kill()
        assert other.exception(HANG_S)


@pytest.mark.long
def test_a_training_that_may_grow_has_workers_started(tmp_path: Path) -> None:
    """After its first checkpoint the training asks for one more worker and adds it."""
    events: list[GangEvent] = []
    options = {"world_size": 1, "max_world_size": 2, "workers_timeout_s": HANG_S}
    options |= {"on_event": events.append}
    with scaling(maximum=4) as client, training(client, tmp_path, 25, **options) as gang:
        begun(tmp_path / "marks", 2, 1)
        (tmp_path / "marks" / "enough").touch()
        gang.result(HANG_S)
        assert attempts_in(events) == [(1, 1), (2, 2)]
        assert most_at_once(client) == 2
        wait_until(lambda: num_asked(client) == 0)


def test_nothing_is_left_of_a_gang_that_gives_up() -> None:
    """The request for workers ends with the gang's time."""
    with scaling(maximum=1) as client:
        with pytest.raises(NotEnoughWorkersError, match="need 2"):
            run_gang(client, plain.sum_of_ones, world_size=2, workers_timeout_s=15.0)
        assert num_started(client) == 1
        wait_until(lambda: num_asked(client) == 0)
