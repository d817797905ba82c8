"""Device, backend and interface of a rank are pure choices, on which all ranks agree."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from prefect_torch_ddp.rank import distributed as group
from prefect_torch_ddp.rank.distributed import Interface, choose, route_to, settings
from tests.support.launches import launch_of


@pytest.mark.parametrize(
    ("devices", "reason"),
    [
        # The same number on different machines is another device.
        (["gpu1 01:00", "gpu1 02:00", "gpu2 01:00"], None),
        (
            ["gpu1 01:00", "gpu1 02:00", "gpu1 01:00", "gpu1 01:00"],
            "ranks 0, 2 and 3 on gpu1 share one device (1 seen), which NCCL refuses",
        ),
        (["gpu1 01:00", None], "rank 1 on gpu1 can't use it"),
    ],
)
def test_nccl_needs_a_device_for_each_rank(devices: list[str | None], reason: str | None) -> None:
    """The reason names the ranks, the host and its devices."""
    claims = [
        group.Claim(rank, (device or "gpu1").split()[0], device, "1 seen")
        for rank, device in enumerate(devices)
    ]
    assert group.why_not_nccl(claims) == reason


def agreed(devices: list[str | None], backend: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have ranks with these devices agree over a store; return what each got, or is refused by."""
    mine = threading.local()

    def own_backend(asked: str) -> str:
        if asked == "nccl":
            return asked
        return group.BOTH if mine.device and asked == "auto" else "gloo"

    monkeypatch.setattr(group, "device_name", lambda _device: mine.device)
    monkeypatch.setattr(group, "num_devices_seen", lambda: "1 seen")
    monkeypatch.setattr(group, "own_backend", own_backend)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def run(rank: int) -> str:
        mine.device = devices[rank]
        store = dist.TCPStore("127.0.0.1", server.port, wait_for_workers=False)
        order = launch_of(rank, len(devices), backend=backend)
        try:
            return group.agree_on_backend(order, store)
        except RuntimeError as error:
            return str(error).partition(";")[0]

    with ThreadPoolExecutor(len(devices)) as pool:
        return list(pool.map(run, range(len(devices))))


SHARED = "ranks 0 and 1 on a share one device (1 seen), which NCCL refuses"


@pytest.mark.parametrize(
    ("devices", "backend", "expected"),
    [
        (["x", "y"], "auto", "cpu:gloo,cuda:nccl"),
        (["x", "x"], "auto", "gloo"),  # two ranks on one GPU still train
        (["x", None], "auto", "gloo"),  # one host of the gang has no GPU
        ([None, None], "auto", "gloo"),
        (["x", "y"], "nccl", "nccl"),
        (["x", "x"], "nccl", f"backend 'nccl' can't be used: {SHARED}"),
    ],
)
def test_all_ranks_take_the_same_backend_or_are_refused(
    devices: list[str | None], backend: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks take nccl if each has its own device, else gloo; explicit nccl is refused then."""
    assert agreed(devices, backend, monkeypatch) == [expected] * len(devices)


ADDRESSES = (
    ("lo", "127.0.0.1"),
    ("mgmt", "192.168.7.1"),
    ("data", "10.77.0.1"),
    ("data", "10.78.0.1"),
    ("lo", "::1"),
    ("data", "fd77::1"),
    ("v6only", "fd99::1"),
    ("v6only", "fe80::1%v6only"),
)


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        # Neither loopback nor another network's interface, but the one with this address.
        (["10.77.0.1"], ("data", "10.77.0.1", True)),
        (["192.168.7.1"], ("mgmt", "192.168.7.1", True)),
        # Not the address that gloo takes there by itself: a second one, or IPv6 beside IPv4.
        (["10.78.0.1"], ("data", "10.78.0.1", False)),
        (["fd77::1"], ("data", "fd77::1", False)),
        (["fd99::1"], ("v6only", "fd99::1", True)),
        # 127.0.0.2 is no interface's own address, and yet loopback's.
        (["127.0.0.2"], ("lo", "127.0.0.1", True)),
        (["127.0.0.1", "::1", "10.77.0.1"], ("lo", "127.0.0.1", True)),
        # Behind NAT nobody has the address.
        (["203.0.113.9"], None),
    ],
)
def test_the_interface_that_has_the_best_address(
    wanted: Sequence[str], expected: tuple[str, str, bool] | None
) -> None:
    """By the first address wanted that any interface has."""
    found = choose(wanted, ADDRESSES)
    assert found == (None if expected is None else Interface(*expected[:2], is_first=expected[2]))


def test_on_one_host_ipv6_loopback_will_do() -> None:
    """A host without IPv4 uses IPv6 loopback."""
    no_v4 = [pair for pair in ADDRESSES if pair[1] != "127.0.0.1"]
    assert choose(["127.0.0.1", "::1", "10.77.0.1"], no_v4) == Interface("lo", "::1", is_first=True)


def test_what_gloo_and_nccl_are_told() -> None:
    """NCCL gets the exact name of the interface, and IPv6, only on several hosts."""
    data = Interface("data", "10.77.0.1", is_first=True)
    assert settings(data, several_hosts=False) == {"GLOO_SOCKET_IFNAME": "data"}
    assert settings(data, several_hosts=True) == {
        "GLOO_SOCKET_IFNAME": "data",
        "NCCL_SOCKET_IFNAME": "=data",
    }
    v6 = Interface("data", "fd77::1", is_first=False)
    assert settings(v6, several_hosts=True)["NCCL_SOCKET_FAMILY"] == "AF_INET6"


def test_our_address_on_the_route_to_a_host() -> None:
    """The kernel knows by which of our addresses it reaches rank 0."""
    assert route_to("127.0.0.1") == ["127.0.0.1"]
    assert route_to("no.such.host.invalid") == []
