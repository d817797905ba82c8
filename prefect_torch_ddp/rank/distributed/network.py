"""The network interface by which a rank talks to its peers."""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psutil
import torch.distributed as dist

from prefect_torch_ddp.protocol.rank import RankLaunch


@dataclass(frozen=True)
class Interface:
    """A network interface and the address to use there."""

    name: str
    address: str
    is_first: bool
    """Whether it is the interface's first address, which gloo takes if given the name alone."""


def use_interface(launch: RankLaunch) -> None:
    """Have gloo and NCCL use the interface by which the peers know this rank.

    Variables that the user set stay. Left alone, gloo takes the interface that the host's own
    name resolves to, which on Debian is loopback.
    """
    several_hosts = launch.shape.num_nodes > 1
    host = launch.place.address or launch.place.host
    wanted = [host, *(str(address[0]) for *_, address in _address_infos(host, socket.SOCK_STREAM))]
    if not several_hosts:
        wanted = ["127.0.0.1", "::1", *wanted]
    addresses = [
        (name, entry.address)
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    ]
    interface = choose(wanted, addresses) or choose(route_to(launch.master_addr), addresses)
    if interface is None:
        return
    user_chose = "GLOO_SOCKET_IFNAME" in os.environ
    for name, value in settings(interface, several_hosts=several_hosts).items():
        os.environ.setdefault(name, value)
    if not user_chose and not interface.is_first:
        _pin_gloo(interface.address)


def choose(wanted: Sequence[str], addresses: Sequence[tuple[str, str]]) -> Interface | None:
    """Choose the interface that has the first address wanted that any has.

    Args:
        wanted: addresses, the best one first; any of 127.0.0.0/8 is loopback's.
        addresses: the machine's (interface, address) pairs, in the system's order.
    """
    for address in wanted:
        plain = "127.0.0.1" if address.startswith("127.") else address
        for name, found in addresses:
            if found == plain:
                first = next(other for owner, other in addresses if owner == name)
                return Interface(name, plain, is_first=first == plain)
    return None


def settings(interface: Interface, *, several_hosts: bool) -> dict[str, str]:
    """Return the environment variables that name the interface to gloo and NCCL."""
    variables = {"GLOO_SOCKET_IFNAME": interface.name}
    if several_hosts:
        # Without the = NCCL takes eth10 for eth1 too.
        variables["NCCL_SOCKET_IFNAME"] = f"={interface.name}"
        if ":" in interface.address:
            variables["NCCL_SOCKET_FAMILY"] = "AF_INET6"
    return variables


def route_to(host: str) -> list[str]:
    """Return our address on the route to a host, if any, as the kernel chooses it.

    Behind NAT no interface has the address that Dask knows.
    """
    for family, kind, protocol, _, address in _address_infos(host, socket.SOCK_DGRAM):
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)  # a datagram socket: nothing is sent
                return [str(probe.getsockname()[0])]
        except OSError:
            continue
    return []


def _address_infos(host: str, kind: socket.SocketKind) -> list[Any]:
    try:
        return list(socket.getaddrinfo(host, 9, type=kind))
    except OSError:
        return []


def _pin_gloo(address: str) -> None:
    """Have every gloo group of this process use one address of an interface that has several.

    GLOO_SOCKET_IFNAME can't: gloo takes the first address there, which may be of another
    network, or an IPv4 one where the ranks are known by IPv6.
    """
    plain = dist.ProcessGroupGloo

    class GlooAtOneAddress(plain):  # type: ignore[misc, valid-type]
        def __init__(self, *group: Any, timeout: timedelta | None = None, **_: Any) -> None:
            options = plain._Options()  # type: ignore[attr-defined]  # noqa: SLF001 - how torch's own tests make one
            options._devices = [plain.create_device(hostname=address)]  # noqa: SLF001
            options._threads = 2  # noqa: SLF001 - torch's own number for one device
            if timeout is not None:
                options._timeout = timeout  # noqa: SLF001
            super().__init__(*group, options)

    dist.distributed_c10d.ProcessGroupGloo = GlooAtOneAddress  # type: ignore[misc]
