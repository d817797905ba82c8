"""Gangs are placed on real Dask processes: imitated hosts, IPv6, resources."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from distributed import Client, Event, Nanny, Scheduler, SpecCluster

from prefect_torch_ddp import NotEnoughWorkersError, run_gang
from prefect_torch_ddp.protocol.events import GangEvent, LogLine
from tests.support.waiting import HANG_S, wait_until
from tests.workloads import plain
from tests.workloads.plain import whereabouts

GPUS = {"GPU": 1}
CUDA = "CUDA_VISIBLE_DEVICES"
WORKERS = {
    # Two threads where there is a GPU: a task that holds the GPU leaves one free.
    "a-gpu": {"host": "127.0.0.1", "nthreads": 2, "resources": {"v4": 1, **GPUS}},
    "a": {"host": "127.0.0.1", "nthreads": 1, "resources": {"v4": 1}},
    "b": {"host": "127.0.0.2", "nthreads": 1, "resources": {"v4": 1}},
    "b-gpu": {"host": "127.0.0.2", "nthreads": 2, "resources": {"v4": 1, **GPUS}},
    "six-0": {"host": "[::1]", "nthreads": 1, "resources": {"v6": 1}},
    "six-1": {"host": "[::1]", "nthreads": 1, "resources": {"v6": 1}},
}


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    """Run workers on 127.0.0.1, 127.0.0.2 and ::1 of one machine."""
    workers = {
        name: {"cls": Nanny, "options": {"dashboard_address": None, **options}}
        for name, options in WORKERS.items()
    }
    scheduler = {
        "cls": Scheduler,
        "options": {"host": "127.0.0.1", "port": 0, "dashboard_address": "127.0.0.1:0"},
    }
    with SpecCluster(workers, scheduler) as cluster, Client(cluster) as client:
        client.wait_for_workers(len(WORKERS), timeout=HANG_S)
        yield client


@pytest.mark.extended
def test_two_hosts_imitated_by_two_loopback_addresses(client: Client) -> None:
    """127.0.0.1 and 127.0.0.2 count as two hosts, with the local ranks 0, 1, 0, 1."""
    ranks = run_gang(client, whereabouts, world_size=4, resources={"v4": 1})
    assert [rank["env"]["LOCAL_RANK"] for rank in ranks] == ["0", "1", "0", "1"]
    assert [rank["env"]["GROUP_RANK"] for rank in ranks] == ["0", "0", "1", "1"]
    assert {rank["env"]["LOCAL_WORLD_SIZE"] for rank in ranks} == {"2"}
    assert [rank["sum"] for rank in ranks] == [16.0] * 4


def test_an_uneven_tail(client: Client) -> None:
    """5 ranks with 2 on each worker are contiguous on hosts with 4 and 1."""
    call = {"resources": {"v4": 1}}
    two = run_gang(client, plain.environment, world_size=2, **call)
    assert [rank["WORLD_SIZE"] for rank in two] == ["2", "2"]
    ranks = run_gang(client, plain.environment, world_size=5, ranks_per_worker=2, **call)
    assert [rank["LOCAL_RANK"] for rank in ranks] == ["0", "1", "2", "3", "0"]
    assert [rank["LOCAL_WORLD_SIZE"] for rank in ranks] == ["4"] * 4 + ["1"]
    assert [rank["GROUP_WORLD_SIZE"] for rank in ranks] == ["2"] * 5


def test_workers_on_ipv6(client: Client) -> None:
    """The ranks of workers at tcp://[::1] meet there in both modes of the process group."""
    ranks = run_gang(client, whereabouts, world_size=2, resources={"v6": 1})
    assert [rank["env"]["MASTER_ADDR"] for rank in ranks] == ["::1", "::1"]
    assert [rank["sum"] for rank in ranks] == [4.0, 4.0]
    call = {"world_size": 2, "resources": {"v6": 1}, "process_group": "user"}
    assert run_gang(client, plain.torchrun_style, **call) == [2.0, 2.0]


def see(devices: str | None) -> None:
    """Set this worker's visible devices."""
    os.environ.pop(CUDA, None)
    os.environ.update({} if devices is None else {CUDA: devices})


@pytest.mark.parametrize(
    ("lists", "expected"),
    [
        (["0,1", "1,0"], ["0 0 2 0,1", "0 1 2 0,1"]),  # as dask-cuda makes them
        (["0", "1"], ["0 0 1 0", "1 0 1 1"]),  # two jobs with one GPU each
    ],
)
def test_a_ranks_own_gpu_is_the_one_at_its_local_rank(
    client: Client, lists: list[str], expected: list[str]
) -> None:
    """Two workers of a host with other visible devices: the rank's variables agree."""
    addresses = sorted(each for each in client.scheduler_info(-1)["workers"] if "::1" in each)
    try:
        for address, devices in zip(addresses, lists, strict=True):
            client.run(see, devices, workers=[address])
        ranks = run_gang(client, plain.environment, world_size=2, resources={"v6": 1})
    finally:
        client.run(see, None, workers=addresses)
    names = ("GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", CUDA)
    assert [" ".join(rank[name] for name in names) for rank in ranks] == expected


def test_only_workers_with_the_resources_are_chosen(client: Client) -> None:
    """`resources={"GPU": 1}` takes the two workers that have one, also for `world_size=None`."""
    for world_size in (2, None):
        ranks = run_gang(client, plain.environment, world_size=world_size, resources=GPUS)
        assert [(rank["LOCAL_RANK"], rank["GROUP_RANK"]) for rank in ranks] == [
            ("0", "0"),
            ("0", "1"),
        ]


@pytest.mark.parametrize(
    ("world_size", "num_gpus", "says"),
    [
        (3, 1, "too few workers with GPU>=1 after 0.5 s: have 2, need 3; 6 run in all"),
        (None, 2, "too few workers with GPU>=2 after 0.5 s: have 0, need 1; 6 run"),
    ],
)
def test_too_few_workers_with_the_resources_is_refused(
    client: Client, world_size: int | None, num_gpus: int, says: str
) -> None:
    """The gang is refused at the deadline, with both numbers."""
    call = {"resources": {"GPU": num_gpus}, "workers_timeout_s": 0.5}
    with pytest.raises(NotEnoughWorkersError, match=says):
        run_gang(client, plain.sum_of_ones, world_size=world_size, **call)


def hold(name: str) -> None:
    """Hold what this task was given until the event is set."""
    Event(f"{name}-held").set()
    Event(f"{name}-let-go").wait()


def test_a_held_resource_is_waited_for(client: Client) -> None:
    """A gang waits for a GPU that a task holds, says so, and runs once it is free."""
    workers = client.scheduler_info(-1)["workers"].items()
    gpus = [address for address, worker in workers if "GPU" in worker["resources"]]
    task = client.submit(hold, "gpu", resources=GPUS, workers=gpus[:1], pure=False)
    assert Event("gpu-held", client=client).wait(timeout=HANG_S)
    events: list[GangEvent] = []
    two = {"world_size": 2, "resources": GPUS}
    try:
        says = (
            r"gave up waiting for workers: 1 of 2 after .* task hold-.*, which holds GPU=1; needs"
        )
        with pytest.raises(NotEnoughWorkersError, match=says):
            run_gang(client, plain.sum_of_ones, queue_timeout_s=3.0, **two)
        one = run_gang(client, plain.sum_of_ones, world_size=1, resources=GPUS)
        assert one == [1.0], "the other one is free"
        with ThreadPoolExecutor(1) as pool:
            gang = pool.submit(run_gang, client, plain.sum_of_ones, on_event=events.append, **two)
            says = "needs the resources GPU=1"
            wait_until(lambda: any(isinstance(e, LogLine) and says in e.text for e in events))
            Event("gpu-let-go", client=client).set()
            assert gang.result(HANG_S) == [2.0, 2.0]
    finally:
        Event("gpu-let-go", client=client).set()
    task.result(timeout=HANG_S)
