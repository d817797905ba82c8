"""The rendezvous socket of a gang's ranks; the agent of rank 0 opens it."""

import socket

from prefect_torch_ddp.errors import GangError
from prefect_torch_ddp.protocol.rank import ProcessGroupMode


class StoreSocket:
    """Listens at a free port of one address, IPv4 or IPv6, and at no other interface."""

    def __init__(self, host: str) -> None:
        """Open it; raises GangError where the address isn't this machine's."""
        try:
            infos = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
            self._socket = _bind(infos[0][0], infos[0][4])
            self._socket.listen(1024)
        except OSError as error:
            msg = (
                f"rank 0's worker can't listen at {host}, by which Dask knows it: {error}. Behind "
                "--contact-address or NAT name a network that all workers are on: "
                "run_gang(..., interface=...)"
            )
            raise GangError(msg) from error

    @property
    def address(self) -> tuple[str, int]:
        """Its address and port."""
        host, port, *_ = self._socket.getsockname()
        return str(host), int(port)

    def fd_for_rank_0(self, mode: ProcessGroupMode) -> int | None:
        """Return what rank 0 inherits; in the user mode it listens at the port itself."""
        if mode != "user":
            return self._socket.fileno()
        # A socket that is bound but doesn't listen keeps others from getting the port, and
        # SO_REUSEADDR on both sides lets rank 0 bind it all the same.
        address, family = self._socket.getsockname(), self._socket.family
        self._socket.close()
        self._socket = _bind(family, address)
        return None

    def close(self) -> None:
        """Close this process's copy."""
        self._socket.close()


def _bind(family: int, address: object) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)  # type: ignore[arg-type]
    except OSError:
        bound.close()
        raise
    return bound
