"""The placement: which rank runs where, on which device, and at which address. Pure."""

import ipaddress
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prefect_torch_ddp.errors import GangError, InvalidParamsError
from prefect_torch_ddp.protocol.messages import WorkerIdentity
from prefect_torch_ddp.protocol.rank import GangShape, RankPlace


@dataclass(frozen=True)
class Placement:
    """A gang's ranks on their workers."""

    places: tuple[RankPlace, ...]
    """In rank order."""
    shape: GangShape

    def ranks_of(self, worker: str) -> tuple[RankPlace, ...]:
        """Return the places on one worker."""
        return tuple(place for place in self.places if place.worker == worker)


@dataclass(frozen=True)
class GangSize:
    """How many ranks a gang may have."""

    most: int | None
    """None: as many as there is room for."""
    fewest: int | None
    """None: no fewer than the most."""
    ranks_per_worker: int
    divides: int | None = None
    """A number that every size divides; None: any size will do."""
    grown: int | None = None
    """How many it may have if workers are free; None: no more than the most."""
    is_growing: bool = False
    """Whether it paused in order to grow; it then starts with the workers that are free now."""

    def on(self, num_workers: int, num_free: int = 0) -> int:
        """Return the size that so many workers give, of which so many are free."""
        if self.is_growing and num_free >= self.workers_for_fewest:
            num_workers = num_free
        room = num_workers * self.ranks_per_worker
        size = min(room, self.most or self.grown or room)
        if self.grown is not None:
            size = max(size, min(self.grown, num_free * self.ranks_per_worker))
        while self.divides is not None and self.divides % size:
            size -= 1
        return size

    @property
    def workers_for_all(self) -> int:
        """How many workers hold all ranks; at least one if that number is open."""
        return num_workers_needed(self.most or self.fewest or 1, self.ranks_per_worker)

    @property
    def workers_for_fewest(self) -> int:
        """How many workers hold the fewest ranks."""
        fewest = self.fewest or self.most or 1
        while self.divides is not None and self.divides % fewest:
            fewest += 1
        return num_workers_needed(fewest, self.ranks_per_worker)


def num_workers_needed(world_size: int, ranks_per_worker: int) -> int:
    """Return how many workers a gang needs."""
    return -(-world_size // ranks_per_worker)


def choose(
    workers: Sequence[WorkerIdentity], num_needed: int, resources: Mapping[str, float] | None = None
) -> tuple[WorkerIdentity, ...]:
    """Choose the workers of a gang: free ones first, then in a fixed order, hosts side by side."""
    ordered = sorted(workers, key=_by_host)
    free_first = sorted(ordered, key=lambda worker: not is_free(worker, resources or {}))
    return tuple(sorted(free_first[:num_needed], key=_by_host))


def _by_host(worker: WorkerIdentity) -> tuple[str, str]:
    return worker.host, worker.address


def is_free(worker: WorkerIdentity, resources: Mapping[str, float]) -> bool:
    """Whether nobody holds the worker's slot, its threads or the resources an agent takes."""
    return worker.occupant is None and all(
        worker.free_resources.get(name, 0) >= amount for name, amount in resources.items()
    )


def place_ranks(
    workers: Sequence[WorkerIdentity],
    world_size: int,
    ranks_per_worker: int,
    interface: str | None = None,
) -> Placement:
    """Place ranks on the chosen workers, in their order, with the ranks of a host contiguous."""
    addresses = rank_addresses(workers, interface)
    of_ranks = [worker for worker in workers for _ in range(ranks_per_worker)][:world_size]
    seats = _seats(of_ranks)
    nodes = list(dict.fromkeys(node for node, _, _ in seats))
    used = dict.fromkeys(nodes, 0)
    places: list[RankPlace] = []
    for worker, (node, names, device) in zip(of_ranks, seats, strict=True):
        rank_place = RankPlace(
            rank=len(places),
            local_rank=used[node],
            node_rank=nodes.index(node),
            worker=worker.address,
            host=worker.host,
            address=addresses[worker.address],
            visible_devices=",".join(turned(names, device, used[node])) if device else None,
        )
        places.append(rank_place)
        used[node] += 1
    return Placement(tuple(places), GangShape(world_size, len(nodes), tuple(used.values())))


def _seats(of_ranks: Sequence[WorkerIdentity]) -> list[tuple[str, tuple[str, ...], str | None]]:
    """Return for each rank its node, the names of the devices that it sees, and its own one."""
    seats: list[tuple[str, tuple[str, ...], str | None]] = []
    for host, group in itertools.groupby(of_ranks, key=lambda worker: worker.host):
        on_host = list(group)
        visible = [visible_names(worker.visible_devices) for worker in on_host]
        is_split = are_separate(visible)
        for worker, names, device in zip(on_host, visible, share_out(visible), strict=True):
            seats.append((worker.address if is_split else host, names or (), device))
    return seats


def visible_names(cuda_visible_devices: str | None) -> tuple[str, ...] | None:
    """Return the names in a CUDA_VISIBLE_DEVICES; None if it isn't set.

    They are numbers, or UUIDs of GPUs or MIG instances. CUDA itself stops reading at the first
    name that is no device.
    """
    if cuda_visible_devices is None:
        return None
    names = (part.strip() for part in cuda_visible_devices.split(","))
    no_device = ("", "NoDevFiles", "void", "none")
    return tuple(itertools.takewhile(lambda name: name not in no_device and name[0] != "-", names))


def share_out(visible: Sequence[tuple[str, ...] | None]) -> tuple[str | None, ...]:
    """Give each rank of a host, in order, the device that the fewest ranks before it have.

    One rule for all ways of sharing GPUs: lists that are rotated (dask-cuda), that are the same
    everywhere, or that each hold a worker's own devices. Ties go to the first in the list. A list
    that isn't known or is empty gives None.
    """
    used: Counter[str] = Counter()
    devices: list[str | None] = []
    for names in visible:
        least_used = min(names, key=lambda name: used[name]) if names else None
        devices.append(least_used)
        used.update([least_used] if least_used else [])
    return tuple(devices)


def are_separate(visible: Sequence[tuple[str, ...] | None]) -> bool:
    """Whether workers of a host see different devices, and one of them fewer than the host's ranks.

    Each worker then counts as a node, as an agent of torchrun would: otherwise a local rank could
    be larger than the number of devices that the rank sees. If all see the same devices, the ranks
    share them on purpose.
    """
    known = [frozenset(names) for names in visible if names is not None]
    if len(known) < len(visible):
        return False
    return len(set(known)) > 1 and any(len(names) < len(visible) for names in known)


def turned(names: tuple[str, ...], device: str, local_rank: int) -> tuple[str, ...]:
    """Turn a list of visible devices so that a rank's own device stands at its local rank.

    That is the index that scripts and libraries use. Of several MIG instances CUDA shows a process
    only the first one, so the rank's own one comes first.
    """
    wanted = 0 if device.startswith("MIG-") else local_rank
    start = (names.index(device) - wanted) % len(names)
    return names[start:] + names[:start]


_WAY_OUT = (
    "start the worker with --host or --interface, or name a network that all workers are on: "
    "run_gang(..., interface=...)"
)


def rank_addresses(workers: Sequence[WorkerIdentity], interface: str | None) -> dict[str, str]:
    """Return for each worker, by its Dask address, the address at which its ranks are reached.

    Raises InvalidParamsError if a worker has none there, GangError if other machines can't
    reach one.
    """
    addresses = {worker.address: _address(worker, interface) for worker in workers}
    if len({worker.machine for worker in workers}) > 1:
        for worker, address in addresses.items():
            if scope := _local_scope(address):
                msg = (
                    f"worker {worker} is known by the {scope} address {address}, which other "
                    f"machines can't reach: {_WAY_OUT}"
                )
                raise GangError(msg)
    return addresses


def _address(worker: WorkerIdentity, interface: str | None) -> str:
    if interface is None:
        return worker.host
    found = [address for name, address in worker.addresses if _matches(name, address, interface)]
    if not found:
        has = ", ".join(f"{name} {address}" for name, address in worker.addresses) or "none"
        kind = "address in the network" if "/" in interface else "interface"
        msg = f"worker {worker.address} has no {kind} {interface!r}; it has: {has}"
        raise InvalidParamsError(msg)
    if worker.host in found:
        return worker.host

    def rank_by_use(address: str) -> tuple[bool, bool]:
        # Dask's own family first: the one that is known to be routed here.
        is_other_family = (":" in address) != (":" in worker.host)
        return _local_scope(address) == "link-local", is_other_family

    return min(found, key=rank_by_use)


def _matches(name: str, address: str, interface: str) -> bool:
    if "/" not in interface:  # no interface's name has one; a network in CIDR notation has
        return name == interface
    network, ip = ipaddress.ip_network(interface, strict=False), ipaddress.ip_address(address)
    # "0.0.0.0/0" and "::/0" choose a family; nobody means loopback or link-local by that.
    return ip in network and (network.prefixlen > 0 or _local_scope(address) is None)


def _local_scope(address: str) -> str | None:
    """Return why an address is valid only on its own machine; None if it isn't."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return None  # a name
    if ip.is_loopback:
        return "loopback"
    return "link-local" if ip.version == 6 and ip.is_link_local else None  # noqa: PLR2004 - IPv6
