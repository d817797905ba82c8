"""Owns the decision which rank runs where. Pure."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from prefect_torch_ddp.gang.orders import WorkerIdentity
from prefect_torch_ddp.messages import GangShape, RankPlace


@dataclass(frozen=True)
class Placement:
    """A gang's ranks on their workers."""

    places: tuple[RankPlace, ...]
    """In rank order."""
    shape: GangShape
    rotated_hosts: frozenset[str]
    """Hosts whose workers each see another GPU first, as dask-cuda arranges it."""

    @property
    def workers(self) -> tuple[str, ...]:
        """The workers in the order of their first rank."""
        return tuple(dict.fromkeys(place.worker for place in self.places))

    def ranks_of(self, worker: str) -> tuple[RankPlace, ...]:
        """Return the places on one worker."""
        return tuple(place for place in self.places if place.worker == worker)


def natural_order(text: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key under which worker 10 comes after worker 9."""
    return tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", text) if part)


def num_workers_needed(world_size: int, ranks_per_worker: int) -> int:
    """Return how many workers a gang sits on."""
    return -(-world_size // ranks_per_worker)


def choose(workers: Sequence[WorkerIdentity], num_needed: int) -> tuple[WorkerIdentity, ...]:
    """Choose the workers to sit on: free ones first, then in a fixed order, ranks of a host side by side."""
    ordered = sorted(workers, key=lambda w: (w.occupant is not None, natural_order(w.host), natural_order(w.address)))
    chosen = ordered[:num_needed]
    return tuple(sorted(chosen, key=lambda w: (natural_order(w.host), natural_order(w.address))))


def place(workers: Sequence[WorkerIdentity], world_size: int, ranks_per_worker: int) -> Placement:
    """Place ranks on the chosen workers, in their order, so that the ranks of a host are contiguous."""
    hosts = list(dict.fromkeys(worker.host for worker in workers))
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
                )
            )
            used[worker.host] += 1
    shape = GangShape(world_size, len(hosts), tuple(used[host] for host in hosts))
    return Placement(tuple(places), shape, _rotated_hosts(workers))


def _rotated_hosts(workers: Sequence[WorkerIdentity]) -> frozenset[str]:
    first_devices: dict[str, list[str]] = {}
    for worker in workers:
        if worker.visible_devices:
            first_devices.setdefault(worker.host, []).append(worker.visible_devices.split(",")[0])
    return frozenset(host for host, first in first_devices.items() if len(first) > 1 and len(set(first)) == len(first))
