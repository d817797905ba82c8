"""Placement is a pure decision: which rank runs where."""

from hypothesis import given
from hypothesis import strategies as st

from prefect_torch_ddp.gang.orders import WorkerIdentity
from prefect_torch_ddp.gang.placement import choose, num_workers_needed, place


def worker(address: str, host: str, devices: str | None = None, occupant: str | None = None) -> WorkerIdentity:
    """Make a worker."""
    return WorkerIdentity(address, process_id=address, host=host, visible_devices=devices, occupant=occupant)


def test_two_hosts_have_local_ranks_of_their_own() -> None:
    """A6: two hosts imitated by 127.0.0.1 and 127.0.0.2: local ranks 0, 1, 0, 1; ranks of a host side by side."""
    workers = [worker(f"tcp://{host}:{port}", host) for port in (9, 10) for host in ("127.0.0.2", "127.0.0.1")]
    placement = place(choose(workers, 4), 4, 1)
    assert [p.host for p in placement.places] == ["127.0.0.1", "127.0.0.1", "127.0.0.2", "127.0.0.2"]
    assert [p.local_rank for p in placement.places] == [0, 1, 0, 1]
    assert [p.node_rank for p in placement.places] == [0, 0, 1, 1]
    assert placement.shape.local_world_sizes == (2, 2)
    assert placement.workers[0] == "tcp://127.0.0.1:9"


def test_free_workers_come_first() -> None:
    """A gang that doesn't need all workers sits where nobody is."""
    workers = [worker("tcp://a:1", "a", occupant="gang 'x'"), worker("tcp://a:2", "a"), worker("tcp://a:3", "a")]
    assert [w.address for w in choose(workers, 2)] == ["tcp://a:2", "tcp://a:3"]


def test_rotated_devices_are_recognised() -> None:
    """A8: dask-cuda shows each worker of a host another GPU first; a host whose workers all see the same isn't rotated."""
    rotated = [
        worker("tcp://a:1", "a", "0,1"),
        worker("tcp://a:2", "a", "1,0"),
        worker("tcp://b:1", "b", "0,1"),
        worker("tcp://b:2", "b", "0,1"),
    ]
    assert place(rotated, 4, 1).rotated_hosts == {"a"}


@given(
    hosts=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    ranks_per_worker=st.integers(1, 3),
    data=st.data(),
)
def test_every_placement_is_whole(hosts: list[int], ranks_per_worker: int, data: st.DataObject) -> None:
    """Ranks are 0 to n-1, contiguous on each host, with local ranks from 0, and the order of workers given doesn't matter."""
    workers = [worker(f"tcp://h{h}:{w}", f"h{h}") for h, count in enumerate(hosts) for w in range(count)]
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
