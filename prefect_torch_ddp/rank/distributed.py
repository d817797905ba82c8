"""What connects a rank to its peers: process group, backend, CUDA device, network interface.

Choices are pure functions.
"""

import contextlib
import json
import logging
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from prefect_torch_ddp.protocol.rank import RankLaunch

logger = logging.getLogger(__name__)

BOTH = "cpu:gloo,cuda:nccl"
_device = torch.device("cpu")
_store: dist.Store | None = None
"""Kept to the process's end: rank 0 serves it, and its peers may make new groups after rank 0's
function has returned."""


def join_process_group(launch: RankLaunch) -> None:
    """Bring the process group up, as the mode says; it lasts to the process's end."""
    use_interface(launch)
    if launch.process_group != "default":
        return
    tcp = dist.TCPStore(
        launch.master_addr,
        launch.master_port,
        launch.shape.world_size,
        is_master=launch.place.rank == 0,
        timeout=timedelta(seconds=launch.rendezvous_timeout_s),
        wait_for_workers=False,
        master_listen_fd=launch.store_fd,
    )
    global _store  # noqa: PLW0603 - one process is one rank
    _store = tcp
    store = dist.PrefixStore(f"attempt-{launch.attempt}", tcp)
    backend = agree_on_backend(launch, dist.PrefixStore(f"attempt-{launch.attempt}-backend", tcp))
    limit_s = launch.collective_timeout_s
    dist.init_process_group(
        backend,
        store=store,
        rank=launch.place.rank,
        world_size=launch.shape.world_size,
        timeout=None if limit_s is None else timedelta(seconds=limit_s),
    )


def close_connections() -> None:
    """Close this rank's connections, so that a peer waiting in a collective fails at once."""
    # Not for NCCL: its teardown waits for the peers.
    if not dist.is_initialized() or dist.get_backend() != "gloo":
        return
    # Nothing public lists the groups.
    for group in list(dist.distributed_c10d._world.pg_names):  # noqa: SLF001
        with contextlib.suppress(RuntimeError):  # a backend without it
            # Else the next line waits forever for a collective that peers never joined.
            group.abort()
    dist.destroy_process_group()


@dataclass(frozen=True)
class Claim:
    """What a rank sends to the others before they agree on a backend."""

    rank: int
    host: str
    device: str | None
    """Equal for two ranks on one GPU; None for the CPU."""
    sees: str
    """How many devices it sees, for people."""


def agree_on_backend(launch: RankLaunch, store: dist.Store) -> str:
    """Return the backend that all ranks of the gang take; each has to call this.

    `auto` is gloo for all if NCCL can't work: a rank without CUDA, or several on one device.
    Then `nccl` is a RuntimeError that names the ranks, their host and its devices.
    """
    own = own_backend(launch.backend)
    if launch.backend == "gloo":
        return own
    claims = _exchange(launch, store, device_name(current_device()) if own != "gloo" else None)
    reason = why_not_nccl(claims)
    if reason is None:
        return own
    if launch.backend == "nccl":
        msg = (
            f"backend 'nccl' can't be used: {reason}; start no more ranks than there are devices, "
            "or use backend='gloo'"
        )
        raise RuntimeError(msg)
    if launch.place.rank == 0 and any(claim.device for claim in claims):
        logger.warning("the ranks communicate by gloo instead of NCCL: %s", reason)
    return "gloo"


def own_backend(backend: str) -> str:
    """Turn `auto` into what this machine can do, or say what the backend asked for lacks here."""
    has_cuda, has_nccl = torch.cuda.is_available(), dist.is_nccl_available()
    if backend == "auto":
        return BOTH if has_cuda and has_nccl else "gloo"
    if backend == "nccl" and not (has_cuda and has_nccl):
        missing = "torch sees no CUDA device" if has_nccl else "this build of torch has no NCCL"
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "unset")
        msg = (
            f"backend 'nccl' can't be used on {socket.gethostname()}: {missing} (torch "
            f"{torch.__version__}, CUDA_VISIBLE_DEVICES {visible}); use backend='auto' or 'gloo'"
        )
        raise RuntimeError(msg)
    return backend


def why_not_nccl(claims: Sequence[Claim]) -> str | None:
    """Say what keeps these ranks, in rank order, from using NCCL; None when nothing does."""
    lacking = [claim for claim in claims if claim.device is None]
    if lacking:
        return f"{_ranks(lacking)} on {lacking[0].host} can't use it"
    by_device: dict[str, list[Claim]] = {}
    for claim in claims:
        by_device.setdefault(str(claim.device), []).append(claim)
    for sharing in by_device.values():
        if len(sharing) > 1:
            where = f"{_ranks(sharing)} on {sharing[0].host}"
            return f"{where} share one device ({sharing[0].sees}), which NCCL refuses"
    return None


def _exchange(launch: RankLaunch, store: dist.Store, device: str | None) -> list[Claim]:
    place = launch.place
    claim = Claim(place.rank, place.host, device, num_devices_seen() if device else "")
    store.set(f"claim/{place.rank}", json.dumps(asdict(claim)))
    keys = [f"claim/{rank}" for rank in range(launch.shape.world_size)]
    return [Claim(**json.loads(text)) for text in store.multi_get(keys)]


def _ranks(claims: Sequence[Claim]) -> str:
    *others, last = [str(claim.rank) for claim in claims]
    return f"ranks {', '.join(others)} and {last}" if others else f"rank {last}"


def choose_device(launch: RankLaunch) -> None:
    """Make the rank's CUDA device the current one, whatever the backend; without CUDA the CPU.

    It is the one at the rank's local rank. If more ranks than devices share them, the count starts
    again; of several MIG instances torch sees one device.
    """
    global _device  # noqa: PLW0603 - one process is one rank
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_devices == 0:
        return
    index = launch.place.local_rank % num_devices
    torch.cuda.set_device(index)
    _device = torch.device("cuda", index)


def current_device() -> torch.device:
    """Return the device chosen for this rank; the CPU if none was chosen."""
    return _device


def device_name(device: torch.device) -> str | None:
    """Return machine and bus, by which NCCL tells GPUs apart; None for the CPU."""
    if device.type != "cuda":
        return None
    properties: Any = torch.cuda.get_device_properties(device)  # torch's stubs lack what is used
    numbers = properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id
    machine = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{machine} {numbers[0]:04x}:{numbers[1]:02x}:{numbers[2]:02x}"


def num_devices_seen() -> str:
    """Say how many CUDA devices this process sees, and by which setting."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "unset")
    count = torch.cuda.device_count()
    return f"{count} CUDA devices are visible there, CUDA_VISIBLE_DEVICES {visible}"


@dataclass(frozen=True)
class Interface:
    """A network interface and the address to use there."""

    name: str
    address: str
    is_first: bool
    """Whether it is the interface's first address, which gloo takes if given only the name."""


def use_interface(launch: RankLaunch) -> None:
    """Have gloo and NCCL use the interface by which the peers know this rank.

    Variables that the user set stay. By default gloo takes the interface that the host's own
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
    network, or an IPv4 one if the ranks are known by IPv6.
    """
    plain = dist.ProcessGroupGloo

    class GlooAtOneAddress(plain):  # type: ignore[misc, valid-type]
        def __init__(self, *group: Any, timeout: timedelta | None = None, **_: Any) -> None:
            # As torch's own tests do.
            options = plain._Options()  # type: ignore[attr-defined]  # noqa: SLF001
            options._devices = [plain.create_device(hostname=address)]  # noqa: SLF001
            options._threads = 2  # noqa: SLF001 - torch's own number for one device
            if timeout is not None:
                options._timeout = timeout  # noqa: SLF001
            super().__init__(*group, options)

    dist.distributed_c10d.ProcessGroupGloo = GlooAtOneAddress  # type: ignore[misc]
