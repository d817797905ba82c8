"""Functions for ranks that tell where they are on the network."""

import os
from typing import Any

import psutil

NAMES = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR")
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_SOCKET_FAMILY")


def whereabouts() -> dict[str, Any]:
    """All-reduce over the default group and one of our own; tell the sum, the environment and
    the addresses in use."""
    import torch
    import torch.distributed as dist

    total = torch.ones(1)
    dist.all_reduce(total)
    dist.all_reduce(total, group=dist.new_group(backend="gloo"))
    connections = psutil.Process().net_connections("tcp")
    found = {
        "sum": float(total),
        "env": {name: os.environ.get(name) for name in (*NAMES, *INTERFACES)},
        "listens_at": sorted(
            {_plain(c.laddr.ip) for c in connections if c.status == psutil.CONN_LISTEN}
        ),
        "talks_from": sorted(
            {_plain(c.laddr.ip) for c in connections if c.status == psutil.CONN_ESTABLISHED}
        ),
    }
    dist.barrier()  # peers look at their connections to us too
    return found


def interface_settings() -> dict[str, str | None]:
    """Tell which interfaces gloo and NCCL were told, without a process group."""
    return {name: os.environ.get(name) for name in INTERFACES}


def _plain(address: str) -> str:
    """Return an IPv4 address that is written as an IPv6 one as what it is."""
    return address.removeprefix("::ffff:")
