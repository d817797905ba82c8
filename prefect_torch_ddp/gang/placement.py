"""Owns the decision which rank runs where. Pure."""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prefect_torch_ddp.gang.devices import share_out, visible_names
from prefect_torch_ddp.gang.network import rank_addresses
from prefect_torch_ddp.gang.orders import WorkerIdentity
from prefect_torch_ddp.messages import GangShape, RankPlace


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
    return tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", text) if part)


def num_workers_needed(world_size: int, ranks_per_worker: int) -> int:
    """Return how many workers a gang sits on."""
    return -(-world_size // ranks_per_worker)


def choose(
    workers: Sequence[WorkerIdentity], num_needed: int, resources: Mapping[str, float] | None = None
) -> tuple[WorkerIdentity, ...]:
    """Choose the workers to sit on: free ones first, then in a fixed order, ranks of a host side by side.

    Args:
        workers: those that have the resources, held by others or not.
        num_needed: how many of them.
        resources: what a seat takes; a worker that has less of it left now isn't free.
    """
    ordered = sorted(workers, key=lambda w: (not is_free(w, resources or {}), natural_order(w.host), natural_order(w.address)))
    return tuple(sorted(ordered[:num_needed], key=lambda w: (natural_order(w.host), natural_order(w.address))))


def is_free(worker: WorkerIdentity, resources: Mapping[str, float]) -> bool:
    """Whether nobody holds the worker's slot, its threads or the resources that a seat takes."""
    return worker.occupant is None and all(worker.free_resources.get(name, 0) >= amount for name, amount in resources.items())


def place(workers: Sequence[WorkerIdentity], world_size: int, ranks_per_worker: int, interface: str | None = None) -> Placement:
    """Place ranks on the chosen workers, in their order, so that the ranks of a host are contiguous.

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
    return Placement(tuple(places), GangShape(world_size, len(hosts), tuple(used[host] for host in hosts)))


def _devices(workers: Sequence[WorkerIdentity], world_size: int, ranks_per_worker: int) -> tuple[int | None, ...]:
    """Return for each rank the position of its device among those that its worker sees."""
    of_ranks = [worker for worker in workers for _ in range(ranks_per_worker)][:world_size]
    by_host = itertools.groupby(of_ranks, key=lambda worker: worker.host)
    shares = (share_out([visible_names(worker.visible_devices) for worker in group]) for _, group in by_host)
    return tuple(itertools.chain.from_iterable(shares))
