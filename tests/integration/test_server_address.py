"""An address at which something else than a Prefect server answers is named."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from prefect_torch_ddp.server import ServerError, find_or_start_server, is_prefect
from tests.support.waiting import HANG_S


@contextmanager
def ssh_server(num_calls: int) -> Iterator[str]:
    """Greet so many callers as an SSH server does; give the URL that they use."""

    def greet() -> None:
        for _ in range(num_calls):
            caller, _ = listening.accept()
            with caller:
                caller.sendall(b"SSH-2.0-x\r\n")
                while caller.recv(1024):
                    pass

    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(HANG_S)
        thread = threading.Thread(target=greet)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/api"
        thread.join()


def test_what_speaks_no_http_is_no_prefect_server() -> None:
    """An SSH tunnel, for example; the command ended with a traceback."""
    with ssh_server(2) as api:
        assert not is_prefect(api)
        says = f"PREFECT_API_URL is {api}, but no Prefect server answers there"
        with temporary_settings({PREFECT_API_URL: api}), pytest.raises(ServerError, match=says):
            find_or_start_server()


def test_at_a_port_that_is_no_number_is_no_prefect_server() -> None:
    """The command ended with a traceback."""
    assert not is_prefect("http://127.0.0.1:42oo/api")
