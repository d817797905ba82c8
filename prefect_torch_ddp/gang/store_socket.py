"""Owns the socket that the ranks of a gang meet at."""

import socket

from prefect_torch_ddp.errors import GangError


def listen(host: str) -> socket.socket:
    """Listen at a free port of one address, IPv4 or IPv6, and at no other interface.

    Raises:
        GangError: the address isn't this machine's, or can't be resolved.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _refusal(host, error) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise _refusal(host, error) from error
    return listener


def _refusal(host: str, error: OSError) -> GangError:
    msg = (
        f"rank 0's worker can't listen at {host}, by which Dask knows it: {error}. Behind --contact-address or NAT name a "
        f"network that all workers are on: run_gang(..., interface=...)"
    )
    return GangError(msg)
