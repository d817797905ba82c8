"""Owns what a Dask worker tells about its machine: which one it is, and the addresses that it has."""

import os
import socket
from pathlib import Path

import psutil


def machine_id() -> str:
    """Return what tells this machine from others; two containers with networks of their own are two machines."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"  # noqa: PTH116 - the link's target is what counts
    except OSError:
        return socket.gethostname()


def interface_addresses() -> tuple[tuple[str, str], ...]:
    """Return this machine's internet addresses as (interface, address), in the system's order."""
    return tuple(
        (name, entry.address)
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    )
