"""By which address ranks are reached is a pure decision."""

import pytest

from prefect_torch_ddp import InvalidParamsError
from prefect_torch_ddp.errors import GangError
from prefect_torch_ddp.gang.caller.placement import rank_addresses
from prefect_torch_ddp.gang.options import checked
from prefect_torch_ddp.params import GangParams
from prefect_torch_ddp.protocol.agent import WorkerIdentity


def worker(host: str, machine: str, *addresses: tuple[str, str]) -> WorkerIdentity:
    """Make a worker that Dask knows by `host`."""
    address = f"tcp://[{host}]:1" if ":" in host else f"tcp://{host}:1"
    return WorkerIdentity(
        address, "id", host, None, None, machine=machine, addresses=addresses or (("eth0", host),)
    )


TWO_NETWORKS = [
    worker(
        "192.168.7.1",
        "a",
        ("lo", "127.0.0.1"),
        ("mgmt", "192.168.7.1"),
        ("data", "10.1.0.1"),
        ("data", "fd00::1"),
    ),
    worker(
        "192.168.7.2",
        "b",
        ("lo", "127.0.0.1"),
        ("eth0", "192.168.7.2"),
        ("ib0", "10.1.0.2"),
        ("ib0", "fd00::2"),
    ),
]


def test_dasks_own_address_is_the_default() -> None:
    """Nothing said: the address by which Dask knows the worker."""
    assert list(rank_addresses(TWO_NETWORKS, None).values()) == ["192.168.7.1", "192.168.7.2"]


@pytest.mark.parametrize(
    ("interface", "expected"),
    [
        ("10.1.0.0/16", ["10.1.0.1", "10.1.0.2"]),  # whatever the interfaces are called
        ("fd00::/64", ["fd00::1", "fd00::2"]),
        ("::/0", ["fd00::1", "fd00::2"]),  # IPv6, never loopback
        ("0.0.0.0/0", ["192.168.7.1", "192.168.7.2"]),  # IPv4: Dask's own address first
    ],
)
def test_a_network_by_cidr(interface: str, expected: list[str]) -> None:
    """A network, or a family, is found on every host by its addresses."""
    assert list(rank_addresses(TWO_NETWORKS, interface).values()) == expected


def test_an_interface_by_name_prefers_dasks_family() -> None:
    """An interface with both families gives an address of the family that Dask uses, and
    link-local last."""
    first = worker(
        "192.168.7.1",
        "a",
        ("ib0", "fe80::1%ib0"),
        ("ib0", "fd00::1"),
        ("ib0", "10.1.0.1"),
        ("mgmt", "192.168.7.1"),
    )
    assert list(rank_addresses([first], "ib0").values()) == ["10.1.0.1"]
    second = worker(
        "fd07::1",
        "a",
        ("ib0", "10.1.0.1"),
        ("ib0", "fe80::1%ib0"),
        ("ib0", "fd00::1"),
        ("mgmt", "fd07::1"),
    )
    assert list(rank_addresses([second], "ib0").values()) == ["fd00::1"]


def test_a_worker_without_the_interface_is_named() -> None:
    """The error names the worker and what it has."""
    with pytest.raises(
        InvalidParamsError,
        match=r"tcp://192\.168\.7\.1:1 has no interface 'ib0'; it has: .*data 10\.1\.0\.1",
    ):
        rank_addresses(TWO_NETWORKS, "ib0")
    with pytest.raises(InvalidParamsError, match=r"has no address in the network '10\.9\.0\.0/16'"):
        rank_addresses(TWO_NETWORKS, "10.9.0.0/16")


@pytest.mark.parametrize(
    ("host", "scope"),
    [("127.0.0.1", "loopback"), ("::1", "loopback"), ("fe80::1%eth0", "link-local")],
)
def test_an_address_of_one_machine_alone_is_refused_on_several(host: str, scope: str) -> None:
    """Loopback and link-local addresses can't be reached from another machine; on one machine
    they may be used."""
    workers = [worker(host, "a"), worker("10.0.0.2", "b")]
    with pytest.raises(
        GangError, match=rf"{scope} address {host}, which other machines can't reach: .*--interface"
    ):
        rank_addresses(workers, None)
    assert len(rank_addresses([worker(host, "a"), worker("127.0.0.2", "a")], None)) == 2


@pytest.mark.parametrize("interface", ["", 7, "10.1.0.0/33", "eth0/1"])
def test_what_is_no_interface_is_refused(interface: object) -> None:
    """A wrong value is named before anything starts."""
    with pytest.raises(InvalidParamsError, match="interface is"):
        checked(GangParams, {"interface": interface})
