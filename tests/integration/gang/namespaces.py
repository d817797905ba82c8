"""Hosts imitated by Linux network namespaces, each with its own interfaces and loopback.

They have no names: a namespace lives as long as a file descriptor or a process holds it, so
none outlives the tests, whatever ends them.
"""

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Self

CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


def why_none() -> str | None:
    """Say what keeps this machine from making hosts; None when nothing does."""
    if sys.platform != "linux":
        return f"network namespaces are Linux's, and this is {sys.platform}"
    if shutil.which("ip") is None:
        return "the command ip is missing (Debian's package iproute2)"
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    try:
        with Host("a") as a, Host("b") as b, a.inside():
            _ip(f"link add probe type veth peer name probe netns {b.path}")
        with Host("c") as c, c.inside():
            _ip("link add probe type bridge")
    except (OSError, subprocess.CalledProcessError) as error:
        return (
            f"this system doesn't let us make network namespaces, veth pairs and bridges: {error}"
        )
    return None


class Host:
    """A separate host; `with` makes it and takes it down with its interfaces."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._fd = -1

    def __enter__(self) -> Self:
        errors: list[OSError] = []

        def make() -> None:
            if _libc.unshare(CLONE_NEWNET) != 0:
                errors.append(OSError(ctypes.get_errno(), "unshare(CLONE_NEWNET)"))
            else:
                self._fd = _own_namespace()

        thread = threading.Thread(
            target=make
        )  # its own namespace ends with it, unless the file descriptor holds it
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        with self.inside():
            _ip("link set lo up")
        return self

    def __exit__(self, *_: object) -> None:
        """Let it go; the kernel takes it down when its last process is gone."""
        os.close(self._fd)

    @property
    def path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Be on this host with this thread, and with what it starts meanwhile."""
        home = _own_namespace()
        try:
            _enter(self._fd)
            try:
                yield
            finally:
                _enter(home)
        finally:
            os.close(home)


class Switch:
    """A network on its own bridge: hosts that are plugged in reach each other."""

    def __init__(self, host: Host) -> None:
        """Put the bridge on a host where nothing else is."""
        self._host = host
        self._num_ports = 0
        with host.inside():
            _ip("link add bridge type bridge")
            _ip("link set bridge up")

    def plug(self, host: Host, interface: str, *addresses: str, isolated: bool = False) -> None:
        """Give a host an interface on this network.

        Args:
            host: who gets it.
            interface: its name there.
            *addresses: with prefix lengths.
            isolated: whether it reaches only those that aren't isolated, as on a management
                network.
        """
        port = f"port{self._num_ports}"
        self._num_ports += 1
        with host.inside():
            _ip(f"link add {interface} type veth peer name {port} netns {self._host.path}")
            Path(f"/proc/sys/net/ipv6/conf/{interface}/accept_dad").write_text(
                "0"
            )  # else an address is unusable for a second
            for address in addresses:
                _ip(f"addr add {address} dev {interface}")
            _ip(f"link set {interface} up")
        with self._host.inside():
            _ip(f"link set {port} master bridge")
            _ip(f"link set {port} type bridge_slave isolated {'on' if isolated else 'off'}")
            _ip(f"link set {port} up")


def _ip(command: str) -> None:
    subprocess.run(["ip", *command.split()], check=True, capture_output=True)


def _own_namespace() -> int:
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _enter(fd: int) -> None:
    if _libc.setns(fd, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")
