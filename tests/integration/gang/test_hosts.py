"""Several hosts for real: network namespaces, Dask processes in them, a gang across them.

alpha, beta: mgmt 192.168.71.x, without a way to each other; data 10.71.0.x, 10.72.0.x, fd71::x
head: on both networks; the scheduler and the caller are there
"""

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from distributed import Client

from prefect_torch_ddp import run_gang
from prefect_torch_ddp.params import CheckpointParams
from prefect_torch_ddp.protocol.events import FailureRecord, GangEvent
from prefect_torch_ddp.rank.config import RankConfig
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.tracking.attempt_log import RunAttemptLog
from tests.integration.gang import namespaces
from tests.integration.gang.namespaces import Host, Switch
from tests.support.gangs import RUN_WITH_CONTEXT, attempts_in, begun
from tests.support.waiting import HANG_S
from tests.workloads import hanging, plain
from tests.workloads.plain import whereabouts

pytestmark = pytest.mark.extended


WORKERS = {
    # resource that tells the workers apart: (host, address by which Dask knows it), ...
    "data": (
        ("alpha", "10.71.0.1"),
        ("alpha", "10.71.0.1"),
        ("beta", "10.71.0.2"),
        ("beta", "10.71.0.2"),
    ),
    "mgmt": (("alpha", "192.168.71.1"), ("beta", "192.168.71.2")),
}


@pytest.fixture(scope="module")
def hosts() -> Iterator[dict[str, Host]]:
    """Make three hosts and their networks."""
    if (reason := namespaces.why_none()) is not None:
        pytest.skip(reason)
    with contextlib.ExitStack() as stack:
        made = {name: stack.enter_context(Host(name)) for name in ("head", "alpha", "beta")}
        mgmt, data = (Switch(stack.enter_context(Host(f"switch {n}"))) for n in ("mgmt", "data"))
        for number, name in enumerate(("alpha", "beta"), 1):
            mgmt.plug(made[name], "mgmt", f"192.168.71.{number}/24", isolated=True)
            data.plug(
                made[name],
                "data",
                f"10.71.0.{number}/24",
                f"10.72.0.{number}/24",
                f"fd71::{number}/64",
            )
        mgmt.plug(made["head"], "mgmt", "192.168.71.100/24")
        data.plug(made["head"], "data", "10.71.0.100/24", "10.72.0.100/24")
        yield made


@pytest.fixture(scope="module")
def cluster(hosts: dict[str, Host], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run a scheduler and the workers; give the scheduler's address."""
    folder = tmp_path_factory.mktemp("dask")
    with contextlib.ExitStack() as stack:
        command = ["scheduler", "--port", "8786", "--no-dashboard"]
        stack.enter_context(dask(hosts["head"], command, folder))
        for resource, workers in WORKERS.items():
            contact = f"tcp://{'192.168.71.100' if resource == 'mgmt' else '10.71.0.100'}:8786"
            for number, (host, address) in enumerate(workers):
                options = f"--host {address} --name {resource}-{number} --resources {resource}=1"
                options += " --nthreads 1 --no-nanny --no-dashboard --death-timeout 120"
                command = ["worker", contact, *options.split(), "--local-directory", str(folder)]
                stack.enter_context(dask(hosts[host], command, folder))
        address = "tcp://127.0.0.1:8786"
        with hosts["head"].inside(), Client(address, timeout=HANG_S) as client:
            try:
                client.wait_for_workers(sum(map(len, WORKERS.values())), timeout=HANG_S)
            except TimeoutError:
                logs = "\n".join(
                    f"{log.name}:\n{log.read_text()[-2000:]}" for log in folder.glob("*.log")
                )
                pytest.fail(f"not all workers came:\n{logs}")
        yield address


@contextlib.contextmanager
def dask(host: Host, command: list[str], folder: os.PathLike[str]) -> Iterator[None]:
    """Run one of Dask's processes on a host."""
    with host.inside(), open(os.path.join(folder, f"{host.name}.log"), "ab") as log:  # noqa: PTH118, PTH123
        process = subprocess.Popen(
            [sys.executable, "-m", "dask", *command], stdout=log, stderr=log, cwd=folder
        )
    try:
        yield
    finally:
        process.kill()
        process.wait()


def cluster_of(stack: contextlib.ExitStack, hosts: dict[str, Host], folder: Path) -> Client:
    """Run a scheduler on the first host, by address, and a worker on each of the others; be on the
    first one, connected."""
    (address, head), *workers = hosts.items()
    stack.enter_context(dask(head, ["scheduler", "--port", "8786", "--no-dashboard"], folder))
    for own, host in workers:
        options = f"--host {own} --nthreads 1 --no-nanny --no-dashboard"
        command = ["worker", f"tcp://{address}:8786", *options.split()]
        stack.enter_context(dask(host, command, folder))
    stack.enter_context(head.inside())
    client = stack.enter_context(Client(f"tcp://{address}:8786", timeout=HANG_S))
    client.wait_for_workers(len(workers), timeout=HANG_S)
    return client


@pytest.fixture
def client(hosts: dict[str, Host], cluster: str) -> Iterator[Client]:
    """Be on the scheduler's host, connected, with all workers there."""
    with hosts["head"].inside(), Client(cluster, timeout=HANG_S) as client:
        yield client


@pytest.mark.long
def test_ranks_of_a_host_are_contiguous_and_talk_by_dasks_network(client: Client) -> None:
    """Two hosts with two workers each use no connection on loopback or mgmt."""
    ranks = run_gang(client, whereabouts, world_size=4, resources={"data": 1})
    assert [rank["sum"] for rank in ranks] == [16.0] * 4
    for number, rank in enumerate(ranks):
        host, address = divmod(number, 2)[0], f"10.71.0.{number // 2 + 1}"
        assert rank["env"] == {
            "RANK": str(number),
            "LOCAL_RANK": str(number % 2),
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": str(host),
            "GROUP_WORLD_SIZE": "2",
            "MASTER_ADDR": "10.71.0.1",
            "GLOO_SOCKET_IFNAME": "data",
            "NCCL_SOCKET_IFNAME": "=data",
            "NCCL_SOCKET_FAMILY": None,
        }
        assert rank["talks_from"] == [address]
        assert rank["listens_at"] == [address], (
            "the store on rank 0 and gloo, at this address alone"
        )


@pytest.mark.parametrize(
    ("interface", "expected"),
    [
        ("data", ["10.71.0.1", "10.71.0.2"]),
        (
            "10.72.0.0/16",
            ["10.72.0.1", "10.72.0.2"],
        ),  # the interface's second address, which gloo wouldn't take by itself
        ("fd71::/64", ["fd71::1", "fd71::2"]),
    ],
)
def test_the_callers_network_where_dasks_wont_do(
    client: Client, interface: str, expected: list[str]
) -> None:
    """Workers that can't reach each other on Dask's network train on the named network."""
    ranks = run_gang(client, whereabouts, world_size=2, resources={"mgmt": 1}, interface=interface)
    assert [rank["sum"] for rank in ranks] == [4.0, 4.0]
    assert [rank["env"]["MASTER_ADDR"] for rank in ranks] == [expected[0]] * 2
    assert [rank["talks_from"] for rank in ranks] == [[address] for address in expected]
    assert [rank["listens_at"] for rank in ranks] == [[address] for address in expected]


def test_hosts_with_ipv6_alone(tmp_path: Path) -> None:
    """Store and gloo work between hosts, and within a host, that have only IPv6."""
    if (reason := namespaces.why_none()) is not None:
        pytest.skip(reason)
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(Host(name)) for name in ("head", "gamma", "delta", "switch")]
        head, *workers, switch = made
        net = Switch(switch)
        net.plug(head, "v6", "fd72::100/64")
        for number, host in enumerate(workers, 1):
            net.plug(host, "only6", f"fd72::{number}/64")
            with host.inside():
                subprocess.run(["ip", "addr", "del", "127.0.0.1/8", "dev", "lo"], check=True)
        addresses = ["[fd72::100]", "[fd72::1]", "[fd72::2]"]
        client = cluster_of(stack, dict(zip(addresses, [head, *workers], strict=True)), tmp_path)
        user = {"world_size": 2, "process_group": "user"}
        assert run_gang(client, plain.torchrun_style, **user) == [2.0, 2.0]
        one, two = run_gang(client, whereabouts, world_size=2, ranks_per_worker=2)
        ranks = run_gang(client, whereabouts, world_size=2)
    assert one["sum"] == two["sum"] == 4.0
    assert one["talks_from"] == two["talks_from"] == ["::1", "fd72::1"], "gloo and the store"
    assert [rank["sum"] for rank in ranks] == [4.0, 4.0]
    assert [rank["talks_from"] for rank in ranks] == [["fd72::1"], ["fd72::2"]]
    assert [rank["env"]["NCCL_SOCKET_FAMILY"] for rank in ranks] == ["AF_INET6"] * 2


@pytest.mark.long
@pytest.mark.usefixtures("short_liveness")
def test_a_host_that_is_cut_off(tmp_path: Path) -> None:
    """After a host's link went down, the error names its silence and the others continue."""
    if (reason := namespaces.why_none()) is not None:
        pytest.skip(reason)
    marks, events = tmp_path / "marks", list[GangEvent]()
    marks.mkdir()
    storage = DirectoryStorage(tmp_path / "store")
    saves = CheckpointParams(every_s=None, every_steps=5)
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(Host(name)) for name in ("head", "alpha", "beta", "switch")]
        head, *workers, switch = made
        net = Switch(switch)
        hosts = {f"10.73.0.{number}": host for number, host in enumerate((head, *workers), 1)}
        for address, host in hosts.items():
            net.plug(host, "data", f"{address}/24")
        client = cluster_of(stack, hosts, tmp_path)
        watcher = stack.enter_context(ThreadPoolExecutor(1))

        def cut() -> None:
            begun(marks, 1, 1)
            with switch.inside():
                subprocess.run(["ip", "link", "set", "port2", "down"], check=True)
            begun(marks, 2, 0)
            (marks / "enough").touch()

        cutting = watcher.submit(cut)
        run_gang(
            client,
            RUN_WITH_CONTEXT,
            args=lambda attempt: (
                RankConfig("run", attempt, "task", storage, checkpoint=saves),
                hanging.train_until_enough,
                (str(marks),),
            ),
            world_size=2,
            min_world_size=1,
            max_restarts=1,
            attempt_log=RunAttemptLog(storage, "run", knows_steps=True),
            on_event=events.append,
        )
        cutting.result()
    assert attempts_in(events) == [(1, 2), (2, 1)]
    (failure,) = [event for event in events if isinstance(event, FailureRecord)]
    says = r"worker tcp://10\.73\.0\.3:\d+ was silent for 12 s; it held rank 1"
    assert re.match(says, failure.summary), failure.summary
