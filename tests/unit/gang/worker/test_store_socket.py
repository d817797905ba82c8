"""The socket at which ranks meet listens at one address and nowhere else."""

import contextlib
import socket

import pytest

from prefect_torch_ddp.errors import GangError
from prefect_torch_ddp.gang.worker.rank_io import StoreSocket


@pytest.mark.parametrize(
    ("host", "elsewhere"),
    [("127.0.0.1", "127.0.0.2"), ("127.0.0.2", "127.0.0.1"), ("localhost", None)],
)
def test_it_listens_at_one_address_alone(host: str, elsewhere: str | None) -> None:
    """A connection to the same port at another address of this machine is refused."""
    with contextlib.closing(StoreSocket(host)) as store:
        socket.create_connection(store.address).close()
        if elsewhere is not None:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((elsewhere, store.address[1]))


def test_in_the_user_mode_its_port_is_kept_for_rank_0() -> None:
    """Nobody listens there until rank 0 does, and nobody else gets the number meanwhile."""
    with contextlib.closing(StoreSocket("127.0.0.1")) as store, socket.socket() as rank_0:
        address = store.address
        assert store.fd_for_rank_0("user") is None
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(address)
        rank_0.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        rank_0.bind(address)
        rank_0.listen()


def test_an_address_of_nobody_is_refused_with_the_way_out() -> None:
    """A worker announced by an address that it lacks (--contact-address, NAT) is told so."""
    with pytest.raises(GangError, match=r"can't listen at 203\.0\.113\.9, .*interface="):
        StoreSocket("203.0.113.9")
