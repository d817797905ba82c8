"""Ports for servers that can't choose one themselves."""

import random
import socket
from contextlib import ExitStack, suppress
from pathlib import Path

FIRST = 10_000


def free_port() -> int:
    """Find a port of the loopback address; see free_ports."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Find ports that nobody has, and that the kernel hands to nobody, if it leaves any.

    Of those it hands out, a connection of a concurrent test could take one before the server.
    """
    handed_out = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()
    left = range(FIRST, int(handed_out.split()[0])) or [0]  # 0: any that the kernel has
    choice = random.SystemRandom()  # not the generator that concurrent tests seed the same way
    found: list[int] = []
    with ExitStack() as stack:
        while len(found) < count:
            probe = stack.enter_context(socket.socket())
            with suppress(OSError):  # somebody has it
                probe.bind(("127.0.0.1", choice.choice(left)))
                found.append(probe.getsockname()[1])
    return found
