"""What a rank prints becomes lines, however it is chunked; its store listens at one address."""

import contextlib
import socket

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from prefect_torch_ddp.errors import GangError
from prefect_torch_ddp.gang.worker.rank_io import MAX_LINE, LineCutter, StoreSocket


@given(text=st.text(alphabet="ab é\n", max_size=60), cuts=st.lists(st.integers(1, 7)))
def test_chunks_do_not_matter(text: str, cuts: list[int]) -> None:
    """A multi-byte character or a line cut in the middle comes out whole."""
    data, cutter, lines = text.encode(), LineCutter(), []
    for cut in cuts:
        lines += cutter.feed(data[:cut])
        data = data[cut:]
    lines += cutter.feed(data, final=True)
    assert lines == [line for line in text.split("\n") if line.strip()]


def test_progress_bars_and_endless_lines() -> None:
    """A bar is one line, as it was at its end; output without line ends is passed on in pieces."""
    cutter = LineCutter()
    assert cutter.feed(b"\r10%\r20%") == []
    assert cutter.feed(b"\r30%\r") == []
    assert cutter.feed(b"\n40%\r\nlost\r100%") == ["30%", "40%"]
    assert [len(piece) for piece in cutter.feed(b"x" * 2 * MAX_LINE)] == [MAX_LINE, MAX_LINE]
    assert cutter.feed(b"\r  \rend\r", final=True) == ["end"]
    assert cutter.tail[0] == "30%"


@pytest.mark.parametrize(
    ("host", "elsewhere"),
    [("127.0.0.1", "127.0.0.2"), ("127.0.0.2", "127.0.0.1"), ("localhost", None)],
)
def test_it_listens_at_one_address_alone(host: str, elsewhere: str | None) -> None:
    """A connection to the same port at another address of this machine is refused."""
    with contextlib.closing(StoreSocket(host)) as store:
        socket.create_connection((host, store.port)).close()
        if elsewhere is not None:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((elsewhere, store.port))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1"])
def test_in_the_user_mode_its_port_is_kept_for_rank_0(host: str) -> None:
    """Until torch listens, nobody listens there and nobody else gets the port at any address."""
    with contextlib.closing(StoreSocket(host)) as store:
        assert store.fd_for_rank_0("user") is None
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, store.port))
        for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
            with socket.socket(family) as other, pytest.raises(OSError, match="in use"):
                other.bind((address, store.port))
        rank_0 = dist.TCPStore(host, store.port, is_master=True, multi_tenant=True)
        rank_0.set("key", "value")
        assert rank_0.get("key") == b"value"


def test_an_address_of_nobody_is_refused_with_the_way_out() -> None:
    """The error names a worker that is announced by an address it lacks (--contact-address,
    NAT)."""
    with pytest.raises(GangError, match=r"can't listen at 203\.0\.113\.9, .*interface="):
        StoreSocket("203.0.113.9")
