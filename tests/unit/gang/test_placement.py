"""Placement is a pure decision: which rank runs where."""

from hypothesis import given
from hypothesis import strategies as st

from prefect_torch_ddp.gang.caller.placement import choose, num_workers_needed, place
from prefect_torch_ddp.gang.caller.workers import too_few_text, with_resources
from prefect_torch_ddp.protocol.agent import WorkerIdentity


def worker(
    address: str,
    host: str,
    devices: str | None = None,
    occupant: str | None = None,
    free: dict[str, float] | None = None,
) -> WorkerIdentity:
    """Make a worker."""
    return WorkerIdentity(address, address, host, devices, occupant, free_resources=free or {})


def test_two_hosts_have_local_ranks_of_their_own() -> None:
    """A6: two hosts imitated by 127.0.0.1 and 127.0.0.2: local ranks 0, 1, 0, 1; ranks of a
    host side by side."""
    workers = [
        worker(f"tcp://{host}:{port}", host)
        for port in (9, 10)
        for host in ("127.0.0.2", "127.0.0.1")
    ]
    placement = place(choose(workers, 4), 4, 1)
    assert [p.host for p in placement.places] == [
        "127.0.0.1",
        "127.0.0.1",
        "127.0.0.2",
        "127.0.0.2",
    ]
    assert [p.local_rank for p in placement.places] == [0, 1, 0, 1]
    assert [p.node_rank for p in placement.places] == [0, 0, 1, 1]
    assert placement.shape.local_world_sizes == (2, 2)
    assert placement.workers[0] == "tcp://127.0.0.1:9"


def test_free_workers_come_first() -> None:
    """A gang that doesn't need all workers sits where nobody is."""
    workers = [
        worker("tcp://a:1", "a", occupant="gang 'x'"),
        worker("tcp://a:2", "a"),
        worker("tcp://a:3", "a"),
    ]
    assert [w.address for w in choose(workers, 2)] == ["tcp://a:2", "tcp://a:3"]


def test_devices_are_chosen_host_by_host() -> None:
    """A8: dask-cuda shows each worker of a host another GPU first; workers that all see the
    same count up."""
    workers = [
        worker("tcp://a:1", "a", "0,1"),
        worker("tcp://a:2", "a", "1,0"),
        worker("tcp://b:1", "b", "0,1"),
        worker("tcp://b:2", "b", "0,1"),
        worker("tcp://c:1", "c"),
    ]
    assert [p.device_position for p in place(workers, 5, 1).places] == [0, 0, 0, 1, None]


def test_a_worker_whose_resources_are_held_comes_last() -> None:
    """A task that holds a worker's GPU makes it one to wait for."""
    held = worker("tcp://a:1", "a", free={"GPU": 0})
    free = worker("tcp://a:2", "a", free={"GPU": 1})
    assert [w.address for w in choose([held, free], 1, {"GPU": 1})] == ["tcp://a:2"]
    assert [w.address for w in choose([held, free], 1)] == ["tcp://a:1"]


def test_workers_without_the_resources_are_not_chosen() -> None:
    """Only workers that have as much of every resource count, whoever holds it now."""
    running = {"one": {"GPU": 1.0}, "none": {}, "many": {"GPU": 2, "disk": 5}}
    assert with_resources(running, {"GPU": 1}) == ["one", "many"]
    assert with_resources(running, {"GPU": 2}) == ["many"]
    assert with_resources(running, {}) == ["one", "none", "many"]


def test_too_few_workers_with_resources_are_counted() -> None:
    """The refusal names both numbers, and the resource."""
    text = too_few_text(1, 3, 2, 1, {"GPU": 1}, 5.0)
    assert text.startswith(
        "the cluster has 1 worker with GPU>=1, need 2; it has 3 in all after 5 s"
    )
    assert "2 workers with GPU>=1, disk>=0.5, need 3 with 4 ranks each" in too_few_text(
        2, 2, 3, 4, {"GPU": 1, "disk": 0.5}, 5.0
    )


def test_an_uneven_tail_leaves_the_last_worker_fewer_ranks() -> None:
    """5 ranks, 2 on each worker: 2, 2 and 1."""
    workers = [worker(f"tcp://a:{port}", "a") for port in (1, 2, 3)]
    placement = place(choose(workers, num_workers_needed(5, 2)), 5, 2)
    assert [len(placement.ranks_of(w)) for w in placement.workers] == [2, 2, 1]
    assert [p.local_rank for p in placement.places] == [0, 1, 2, 3, 4]
    assert [p.slot for p in placement.places] == [0, 1, 0, 1, 0]


@given(
    hosts=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    ranks_per_worker=st.integers(1, 3),
    data=st.data(),
)
def test_every_placement_is_whole(
    hosts: list[int], ranks_per_worker: int, data: st.DataObject
) -> None:
    """Ranks are 0 to n-1, contiguous on each host, with local ranks from 0, and the order of
    workers given doesn't matter."""
    workers = [
        worker(f"tcp://h{h}:{w}", f"h{h}") for h, count in enumerate(hosts) for w in range(count)
    ]
    world_size = data.draw(st.integers(1, len(workers) * ranks_per_worker))
    shuffled = data.draw(st.permutations(workers))
    needed = num_workers_needed(world_size, ranks_per_worker)
    placement = place(choose(shuffled, needed), world_size, ranks_per_worker)
    assert placement == place(choose(workers, needed), world_size, ranks_per_worker)
    assert [p.rank for p in placement.places] == list(range(world_size))
    nodes = [p.node_rank for p in placement.places]
    assert nodes == sorted(nodes)
    for node, size in enumerate(placement.shape.local_world_sizes):
        assert [p.local_rank for p in placement.places if p.node_rank == node] == list(range(size))
    assert sum(placement.shape.local_world_sizes) == world_size
