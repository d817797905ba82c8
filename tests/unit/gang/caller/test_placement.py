"""Placement is a pure decision: which rank runs where, on which device, at which address."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_torch_ddp import InvalidParamsError
from prefect_torch_ddp.errors import GangError
from prefect_torch_ddp.gang.caller.placement import (
    GangSize,
    choose,
    num_workers_needed,
    place_ranks,
    rank_addresses,
    share_out,
    visible_names,
)
from prefect_torch_ddp.gang.worker.child import rank_environment
from prefect_torch_ddp.protocol.messages import WorkerIdentity
from tests.support.launches import launch_of


def worker(
    host: str, port: int = 1, devices: str | None = None, occupant: str | None = None, **fields: Any
) -> WorkerIdentity:
    """Make a worker that Dask knows by this host."""
    address = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
    return WorkerIdentity(address, address, host, devices, occupant, **fields)


@given(
    hosts=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    ranks_per_worker=st.integers(1, 3),
    data=st.data(),
)
def test_every_placement_is_whole(
    hosts: list[int], ranks_per_worker: int, data: st.DataObject
) -> None:
    """Ranks count from 0, also on each host, whatever the order in which workers are given."""
    workers = [worker(f"h{h}", port) for h, count in enumerate(hosts) for port in range(count)]
    world_size = data.draw(st.integers(1, len(workers) * ranks_per_worker))
    shuffled = data.draw(st.permutations(workers))
    needed = num_workers_needed(world_size, ranks_per_worker)
    placement = place_ranks(choose(shuffled, needed), world_size, ranks_per_worker)
    assert placement == place_ranks(choose(workers, needed), world_size, ranks_per_worker)
    assert [p.rank for p in placement.places] == list(range(world_size))
    nodes = [p.node_rank for p in placement.places]
    assert nodes == sorted(nodes)
    for node, size in enumerate(placement.shape.local_world_sizes):
        assert [p.local_rank for p in placement.places if p.node_rank == node] == list(range(size))
    assert sum(placement.shape.local_world_sizes) == world_size


def test_free_workers_come_first() -> None:
    """A held slot, or a held GPU that the gang needs, makes a worker one to wait for."""
    workers = [worker("a", 1, occupant="gang 'x'"), worker("a", 2), worker("a", 3)]
    assert [w.address for w in choose(workers, 2)] == ["tcp://a:2", "tcp://a:3"]
    held, free = (worker("a", n, free_resources={"GPU": n}) for n in (0, 1))
    assert choose([held, free], 1, {"GPU": 1}) == (free,)
    assert choose([held, free], 1) == (held,)


@given(st.integers(1, 24), st.data())
def test_enough_workers_hold_a_size_between_the_fewest_and_the_most(
    divides: int, data: st.DataObject
) -> None:
    """From the fewest workers on every size is a divisor within bounds; more hold no fewer."""
    most = data.draw(st.sampled_from([n for n in range(1, divides + 1) if divides % n == 0]))
    fewest = data.draw(st.integers(1, most))
    size = GangSize(most, fewest, data.draw(st.integers(1, 4)), divides)
    assert size.workers_for_fewest <= size.workers_for_all
    sizes = [size.on(n) for n in range(size.workers_for_fewest, size.workers_for_all + 3)]
    assert all(fewest <= n <= most and divides % n == 0 for n in sizes)
    assert sizes == sorted(sizes)
    assert sizes[-1] == most


def test_a_gang_that_may_grow_takes_more_only_where_workers_are_free() -> None:
    """A growing gang waits for busy workers up to the number wanted, and takes more only if
    they are free."""
    of_8 = GangSize(2, None, 1, divides=8, grown=9)
    counts = (2, 0), (9, 1), (2, 3), (9, 4), (9, 9)
    assert [of_8.on(*each) for each in counts] == [2, 2, 2, 4, 8]
    assert [GangSize(None, None, 1, grown=3).on(num_workers) for num_workers in (2, 9)] == [2, 3]
    growing = GangSize(3, 1, 1, grown=4, is_growing=True)
    assert [growing.on(5, num_free) for num_free in (0, 1, 2, 4)] == [3, 1, 2, 4]


@pytest.mark.parametrize(
    ("lists", "devices"),
    [
        (["0,1", "1,0"], ["0", "1"]),  # dask-cuda: each worker its own first
        (["0,1", "1,0", "0,1", "1,0"], ["0", "1", "0", "1"]),  # two such workers a GPU
        (["0,1"] * 2 + ["1,0"] * 2, ["0", "1", "1", "0"]),  # two ranks on each of them
        (["0,1,2,3"] * 4, ["0", "1", "2", "3"]),  # a rank per GPU, or workers that see all
        (["0", "1"], ["0", "1"]),  # a scheduler gives each worker one
        (["0,1"] * 2 + ["2,3"] * 2, ["0", "1", "2", "3"]),  # and here two
        (["GPU-a", "GPU-b"], ["GPU-a", "GPU-b"]),
        (["MIG-a,MIG-b"] * 2, ["MIG-a", "MIG-b"]),
        (["0,1"] * 3, ["0", "1", "0"]),  # more ranks than devices
        (["1,0", None, "0"], ["1", None, "0"]),
        (["0,1", "", "-1", "NoDevFiles"], ["0", None, None, None]),
        ([" 1 , 0 ", "0,-1,1", "0"], ["1", "0", "0"]),  # CUDA stops at -1
    ],
)
def test_devices_of_a_hosts_ranks(lists: list[str | None], devices: list[str | None]) -> None:
    """The device of each rank, for every way of sharing GPUs that is known, and to say none."""
    visible = [visible_names(text) for text in lists]
    assert list(share_out(visible)) == devices


CUDA = "CUDA_VISIBLE_DEVICES"


def environments(seen: list[tuple[str, str | None]], ranks_per_worker: int) -> list[dict[str, str]]:
    """Return the environments of ranks on workers of these hosts with these visible devices."""
    workers = [worker(host, port, devices) for port, (host, devices) in enumerate(seen)]
    world_size = len(workers) * ranks_per_worker
    placement = place_ranks(workers, world_size, ranks_per_worker)
    own = {each.address: each.visible_devices for each in workers}
    return [
        rank_environment(
            {} if (devices := own[rank_place.worker]) is None else {CUDA: devices},
            replace(launch_of(0, world_size), place=rank_place, shape=placement.shape),
        )
        for rank_place in placement.places
    ]


@pytest.mark.parametrize(
    ("lists", "ranks_per_worker", "expected"),
    [
        # dask-cuda: each worker's own device at its rank's number
        (["0,1,2", "1,2,0", "2,0,1"], 1, ["0 0,1,2", "1 0,1,2", "2 0,1,2"]),
        (["GPU-a,GPU-b", "GPU-b,GPU-a"], 1, ["0 GPU-a,GPU-b", "1 GPU-a,GPU-b"]),
        (["0,1,2,3"], 4, ["0 0,1,2,3", "1 0,1,2,3", "2 0,1,2,3", "3 0,1,2,3"]),
        # two ranks on each of dask-cuda's workers share
        (["0,1", "1,0"], 2, ["0 0,1", "1 0,1", "2 1,0", "3 1,0"]),
        (["0,1"] * 3, 1, ["0 0,1", "1 0,1", "2 0,1"]),
        # separate devices: counted within the worker
        (["0", "1"], 1, ["0 0", "0 1"]),
        (["0,1", "3,2"], 2, ["0 0,1", "1 0,1", "0 3,2", "1 3,2"]),
        (["0", ""], 1, ["0 0", "0 "]),
        (["0,1", "2,3"], 1, ["0 0,1", "1 3,2"]),  # lists that are long enough
        # CUDA shows a process only the first MIG instance
        (["MIG-a,MIG-b"], 2, ["0 MIG-a,MIG-b", "1 MIG-b,MIG-a"]),
        (["MIG-a,MIG-b", "MIG-b,MIG-a"], 1, ["0 MIG-a,MIG-b", "1 MIG-b,MIG-a"]),
        ([None, None], 1, ["0 None", "1 None"]),
        (["", ""], 2, ["0 ", "1 ", "2 ", "3 "]),
        (["0", None], 1, ["0 0", "1 None"]),
    ],
)
def test_a_ranks_own_device_stands_at_its_local_rank(
    lists: list[str | None], ranks_per_worker: int, expected: list[str]
) -> None:
    """Local rank and CUDA_VISIBLE_DEVICES of each rank, for every way of sharing GPUs."""
    made = environments([("a", devices) for devices in lists], ranks_per_worker)
    assert [f"{each['LOCAL_RANK']} {each.get(CUDA)}" for each in made] == expected


def test_a_worker_with_separate_devices_counts_as_a_node() -> None:
    """Only on the host that needs it; the numbers agree as those of torchrun's agents do."""
    made = environments([("a", "0"), ("a", "1"), ("b", "0,1"), ("b", "1,0")], 1)
    names = ("GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", CUDA)
    assert [" ".join(each[name] for name in names) for each in made] == [
        "0 0 1 3 0",
        "1 0 1 3 1",
        "2 0 2 3 0,1",
        "2 1 2 3 0,1",
    ]


LO = ("lo", "127.0.0.1")
OF_A = (LO, ("mgmt", "192.168.7.1"), ("data", "10.1.0.1"), ("data", "fd00::1"))
OF_B = (LO, ("eth0", "192.168.7.2"), ("ib0", "10.1.0.2"), ("ib0", "fd00::2"))
TWO_NETWORKS = [
    worker("192.168.7.1", machine="a", addresses=OF_A),
    worker("192.168.7.2", machine="b", addresses=OF_B),
]


@pytest.mark.parametrize(
    ("interface", "expected"),
    [
        (None, ["192.168.7.1", "192.168.7.2"]),  # by which Dask knows the worker
        ("10.1.0.0/16", ["10.1.0.1", "10.1.0.2"]),  # whatever the interfaces are called
        ("fd00::/64", ["fd00::1", "fd00::2"]),
        ("::/0", ["fd00::1", "fd00::2"]),  # IPv6, never loopback
        ("0.0.0.0/0", ["192.168.7.1", "192.168.7.2"]),  # IPv4: Dask's own address first
    ],
)
def test_a_network_by_cidr(interface: str | None, expected: list[str]) -> None:
    """A network, or a family, is found on every host by its addresses."""
    assert list(rank_addresses(TWO_NETWORKS, interface).values()) == expected


@pytest.mark.parametrize(("host", "expected"), [("10.7.0.1", "10.1.0.1"), ("fd07::1", "fd00::1")])
def test_an_interface_by_name_prefers_dasks_family(host: str, expected: str) -> None:
    """Of an interface with both families the one that Dask uses, and link-local last."""
    addresses = ("ib0", "fe80::1%ib0"), ("ib0", "fd00::1"), ("ib0", "10.1.0.1"), ("mgmt", host)
    assert list(rank_addresses([worker(host, addresses=addresses)], "ib0").values()) == [expected]


def test_a_worker_without_the_interface_is_named() -> None:
    """The error names the worker and what it has."""
    says = r"tcp://192\.168\.7\.1:1 has no interface 'ib0'; it has: .*data 10\.1\.0\.1"
    with pytest.raises(InvalidParamsError, match=says):
        rank_addresses(TWO_NETWORKS, "ib0")
    with pytest.raises(InvalidParamsError, match=r"has no address in the network '10\.9\.0\.0/16'"):
        rank_addresses(TWO_NETWORKS, "10.9.0.0/16")


@pytest.mark.parametrize(
    ("host", "scope"),
    [("127.0.0.1", "loopback"), ("::1", "loopback"), ("fe80::1%eth0", "link-local")],
)
def test_an_address_of_one_machine_alone_is_refused_on_several(host: str, scope: str) -> None:
    """Other machines can't reach loopback and link-local addresses; on one machine they do."""
    says = rf"{scope} address {host}, which other machines can't reach: .*--interface"
    with pytest.raises(GangError, match=says):
        rank_addresses([worker(host, machine="a"), worker("10.0.0.2", machine="b")], None)
    assert len(rank_addresses([worker(host), worker("127.0.0.2")], None)) == 2
