"""The interface by which a rank talks to its peers is a pure choice among the machine's
addresses."""

from prefect_torch_ddp.rank.distributed.network import Interface, _on_the_way_to, choose, settings

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


def test_the_interface_that_has_the_address() -> None:
    """Neither loopback nor another network's interface, but the one that has the address by
    which peers know the rank."""
    assert choose(["10.77.0.1"], ADDRESSES) == Interface("data", "10.77.0.1", is_first=True)
    assert choose(["192.168.7.1"], ADDRESSES) == Interface("mgmt", "192.168.7.1", is_first=True)


def test_another_address_than_gloos_choice_is_told() -> None:
    """A second address of an interface, or an IPv6 one beside an IPv4 one, is not the one that
    gloo takes there by itself."""
    assert choose(["10.78.0.1"], ADDRESSES) == Interface("data", "10.78.0.1", is_first=False)
    assert choose(["fd77::1"], ADDRESSES) == Interface("data", "fd77::1", is_first=False)
    assert choose(["fd99::1"], ADDRESSES) == Interface("v6only", "fd99::1", is_first=True)


def test_all_of_127_is_loopback() -> None:
    """127.0.0.2 is no interface's own address, and yet loopback's."""
    assert choose(["127.0.0.2"], ADDRESSES) == Interface("lo", "127.0.0.1", is_first=True)


def test_the_best_wanted_address_wins() -> None:
    """On one host loopback comes first, IPv6's where there is no IPv4's."""
    assert choose(["127.0.0.1", "::1", "10.77.0.1"], ADDRESSES) == Interface(
        "lo", "127.0.0.1", is_first=True
    )
    no_v4 = [pair for pair in ADDRESSES if pair[1] != "127.0.0.1"]
    assert choose(["127.0.0.1", "::1", "10.77.0.1"], no_v4) == Interface("lo", "::1", is_first=True)


def test_an_address_that_nobody_has() -> None:
    """An address behind NAT is no interface's."""
    assert choose(["203.0.113.9"], ADDRESSES) is None


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


def test_our_address_on_the_way_to_a_host() -> None:
    """Behind NAT nobody has the address that Dask names; the kernel knows by which of ours it
    reaches rank 0."""
    assert _on_the_way_to("127.0.0.1") == ["127.0.0.1"]
    assert _on_the_way_to("no.such.host.invalid") == []
