"""Owns the decision by which address the ranks of a Dask worker are reached. Pure."""

import ipaddress
from collections.abc import Sequence

from prefect_torch_ddp.errors import GangError, InvalidParamsError
from prefect_torch_ddp.gang.orders import WorkerIdentity

_WAY_OUT = "start the worker with --host or --interface, or name a network that all workers are on: run_gang(..., interface=...)"


def rank_addresses(workers: Sequence[WorkerIdentity], interface: str | None) -> dict[str, str]:
    """Return for each worker, by its Dask address, the address at which its ranks are reached.

    Args:
        workers: those the gang sits on.
        interface: an interface's name or a network (`10.1.0.0/16`); None: the address by which Dask knows the worker.

    Raises:
        InvalidParamsError: a worker has no address there; says which it has.
        GangError: the workers are on several machines, and one is known by an address that means something on its own
            machine alone.
    """
    addresses = {worker.address: _address(worker, interface) for worker in workers}
    if len({worker.machine for worker in workers}) > 1:
        for worker, address in addresses.items():
            if scope := _local_scope(address):
                msg = f"worker {worker} is known by the {scope} address {address}, which other machines can't reach: {_WAY_OUT}"
                raise GangError(msg)
    return addresses


def is_network(interface: str) -> bool:
    """Whether the text is a network in CIDR notation, and not an interface's name: no name has a slash."""
    return "/" in interface


def _address(worker: WorkerIdentity, interface: str | None) -> str:
    if interface is None:
        return worker.host
    found = [address for name, address in worker.addresses if _matches(name, address, interface)]
    if not found:
        has = ", ".join(f"{name} {address}" for name, address in worker.addresses) or "none"
        kind = "address in the network" if is_network(interface) else "interface"
        msg = f"worker {worker.address} has no {kind} {interface!r}; it has: {has}"
        raise InvalidParamsError(msg)
    if worker.host in found:
        return worker.host
    # Dask's own family first: the one that is known to be routed here.
    return min(found, key=lambda address: (_local_scope(address) == "link-local", (":" in address) != (":" in worker.host)))


def _matches(name: str, address: str, interface: str) -> bool:
    if not is_network(interface):
        return name == interface
    network, ip = ipaddress.ip_network(interface, strict=False), ipaddress.ip_address(address)
    # "0.0.0.0/0" and "::/0" choose a family; nobody means loopback or link-local by that.
    return ip in network and (network.prefixlen > 0 or _local_scope(address) is None)


def _local_scope(address: str) -> str | None:
    """Return why an address means something on its own machine alone; None for one that others may reach, and for a name."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return None
    if ip.is_loopback:
        return "loopback"
    return "link-local" if ip.version == 6 and ip.is_link_local else None  # noqa: PLR2004 - IPv6
