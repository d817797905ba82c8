"""The interface by which a rank talks to its peers is a pure choice among the machine's."""

from collections.abc import Sequence

import pytest

from prefect_torch_ddp.rank.distributed.network import Interface, choose, route_to, settings

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
    """Where there is no IPv4."""
    no_v4 = [pair for pair in ADDRESSES if pair[1] != "127.0.0.1"]
    assert choose(["127.0.0.1", "::1", "10.77.0.1"], no_v4) == Interface("lo", "::1", is_first=True)


def test_what_gloo_and_nccl_are_told() -> None:
    """NCCL is told on several hosts only, by the exact name, and of IPv6."""
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
