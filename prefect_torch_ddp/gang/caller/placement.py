"""Owns the decision which rank runs where. Pure.

Owns the decision which of its worker's visible CUDA devices a rank takes. Pure.

Owns the decision by which address the ranks of a Dask worker are reached. Pure.
"""

import ipaddress
import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prefect_torch_ddp.errors import GangError, InvalidParamsError
from prefect_torch_ddp.protocol.agent import WorkerIdentity
from prefect_torch_ddp.protocol.rank import GangShape, RankPlace


@dataclass(frozen=True)
class Placement:
    """A gang's ranks on their workers."""

    places: tuple[RankPlace, ...]
    """In rank order."""
    shape: GangShape

    @property
    def workers(self) -> tuple[str, ...]:
        """The workers in the order of their first rank."""
        return tuple(dict.fromkeys(place.worker for place in self.places))

    def ranks_of(self, worker: str) -> tuple[RankPlace, ...]:
        """Return the places on one worker."""
        return tuple(place for place in self.places if place.worker == worker)


def natural_order(text: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key under which worker 10 comes after worker 9."""
    return tuple(
        (0, int(part), "") if part.isdigit() else (1, 0, part)
        for part in re.split(r"(\d+)", text)
        if part
    )


def num_workers_needed(world_size: int, ranks_per_worker: int) -> int:
    """Return how many workers a gang sits on."""
    return -(-world_size // ranks_per_worker)


def choose(
    workers: Sequence[WorkerIdentity], num_needed: int, resources: Mapping[str, float] | None = None
) -> tuple[WorkerIdentity, ...]:
    """Choose the workers to sit on: free ones first, then in a fixed order, ranks of a host
    side by side.

    Args:
        workers: those that have the resources, held by others or not.
        num_needed: how many of them.
        resources: what an agent takes; a worker that has less of it left now isn't free.
    """
    ordered = sorted(
        workers,
        key=lambda w: (
            not is_free(w, resources or {}),
            natural_order(w.host),
            natural_order(w.address),
        ),
    )
    return tuple(
        sorted(
            ordered[:num_needed], key=lambda w: (natural_order(w.host), natural_order(w.address))
        )
    )


def is_free(worker: WorkerIdentity, resources: Mapping[str, float]) -> bool:
    """Whether nobody holds the worker's slot, its threads or the resources that an agent
    takes.
    """
    return worker.occupant is None and all(
        worker.free_resources.get(name, 0) >= amount for name, amount in resources.items()
    )


def place(
    workers: Sequence[WorkerIdentity],
    world_size: int,
    ranks_per_worker: int,
    interface: str | None = None,
) -> Placement:
    """Place ranks on the chosen workers, in their order, so that the ranks of a host are
    contiguous.

    Args:
        workers: in the order of `choose`, no more than needed.
        world_size: number of ranks.
        ranks_per_worker: ranks on each worker; the last one may get fewer.
        interface: see `rank_addresses`, whose errors this raises.
    """
    addresses = rank_addresses(workers, interface)
    hosts = list(dict.fromkeys(worker.host for worker in workers))
    devices = _devices(workers, world_size, ranks_per_worker)
    used = dict.fromkeys(hosts, 0)
    places: list[RankPlace] = []
    for worker in workers:
        for slot in range(min(ranks_per_worker, world_size - len(places))):
            places.append(
                RankPlace(
                    rank=len(places),
                    local_rank=used[worker.host],
                    node_rank=hosts.index(worker.host),
                    slot=slot,
                    worker=worker.address,
                    host=worker.host,
                    address=addresses[worker.address],
                    device_position=devices[len(places)],
                )
            )
            used[worker.host] += 1
    return Placement(
        tuple(places), GangShape(world_size, len(hosts), tuple(used[host] for host in hosts))
    )


def _devices(
    workers: Sequence[WorkerIdentity], world_size: int, ranks_per_worker: int
) -> tuple[int | None, ...]:
    """Return for each rank the position of its device among those that its worker sees."""
    of_ranks = [worker for worker in workers for _ in range(ranks_per_worker)][:world_size]
    by_host = itertools.groupby(of_ranks, key=lambda worker: worker.host)
    shares = (
        share_out([visible_names(worker.visible_devices) for worker in group])
        for _, group in by_host
    )
    return tuple(itertools.chain.from_iterable(shares))


def visible_names(cuda_visible_devices: str | None) -> tuple[str, ...] | None:
    """Return the names in a CUDA_VISIBLE_DEVICES: numbers, or UUIDs of GPUs or MIG instances;
    None where it isn't set.

    CUDA itself stops reading at the first name that is no device.
    """
    if cuda_visible_devices is None:
        return None
    names: list[str] = []
    for part in cuda_visible_devices.split(","):
        name = part.strip()
        if not name or name.startswith("-") or name in ("NoDevFiles", "void", "none"):
            break
        names.append(name)
    return tuple(names)


def share_out(visible: Sequence[tuple[str, ...] | None]) -> tuple[int | None, ...]:
    """Give each rank of a host, in order, the device that the fewest ranks before it have; the
    first in its list of those.

    One rule for all ways of sharing GPUs out: lists that are rotated (dask-cuda), that are the
    same everywhere, or that each hold a worker's own devices.

    Args:
        visible: for each rank the names that its worker sees.

    Returns:
        For each rank the position in its list; None where the list isn't known or is empty.
    """
    used: Counter[str] = Counter()
    positions: list[int | None] = []
    for names in visible:
        if not names:
            positions.append(None)
            continue
        position = min(range(len(names)), key=lambda index: (used[names[index]], index))
        used[names[position]] += 1
        positions.append(position)
    return tuple(positions)


_WAY_OUT = "start the worker with --host or --interface, or name a network that all workers are on: run_gang(..., interface=...)"


def rank_addresses(workers: Sequence[WorkerIdentity], interface: str | None) -> dict[str, str]:
    """Return for each worker, by its Dask address, the address at which its ranks are reached.

    Args:
        workers: those the gang sits on.
        interface: an interface's name or a network (`10.1.0.0/16`); None: the address by which
            Dask knows the worker.

    Raises:
        InvalidParamsError: a worker has no address there; says which it has.
        GangError: the workers are on several machines, and one is known by an address that
            means something on its own machine alone.
    """
    addresses = {worker.address: _address(worker, interface) for worker in workers}
    if len({worker.machine for worker in workers}) > 1:
        for worker, address in addresses.items():
            if scope := _local_scope(address):
                msg = f"worker {worker} is known by the {scope} address {address}, which other machines can't reach: {_WAY_OUT}"
                raise GangError(msg)
    return addresses


def is_network(interface: str) -> bool:
    """Whether the text is a network in CIDR notation, and not an interface's name: no name has
    a slash.
    """
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
    return min(
        found,
        key=lambda address: (
            _local_scope(address) == "link-local",
            (":" in address) != (":" in worker.host),
        ),
    )


def _matches(name: str, address: str, interface: str) -> bool:
    if not is_network(interface):
        return name == interface
    network, ip = ipaddress.ip_network(interface, strict=False), ipaddress.ip_address(address)
    # "0.0.0.0/0" and "::/0" choose a family; nobody means loopback or link-local by that.
    return ip in network and (network.prefixlen > 0 or _local_scope(address) is None)


def _local_scope(address: str) -> str | None:
    """Return why an address means something on its own machine alone; None for one that others
    may reach, and for a name.
    """
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return None
    if ip.is_loopback:
        return "loopback"
    return "link-local" if ip.version == 6 and ip.is_link_local else None  # noqa: PLR2004 - IPv6
