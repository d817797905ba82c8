"""An address at which something else than a Prefect server answers is named, by commands and the
doctor."""

import io
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.parse import urlsplit

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings
from rich.console import Console

from prefect_torch_ddp.doctor.command import Doctor
from prefect_torch_ddp.server import ServerError, find_or_start_server, is_prefect
from tests.support.waiting import HANG_S

NONE_THERE = (
    "but no Prefect server answers there: start it, correct the address, which ends in /api, or "
    "unset PREFECT_API_URL"
)


@contextmanager
def web_server(status: int) -> Iterator[str]:
    """Run a server that answers all with a status and a page; give its URL."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(b"<html>it works</html>")

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


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


def problems_of(api: str) -> list[str]:
    """Return what the doctor finds wrong with a server, and what it couldn't try."""
    doctor = Doctor(Console(file=io.StringIO()), None, HANG_S)
    with temporary_settings({PREFECT_API_URL: api}):
        doctor.server()
    return doctor.problems + doctor.untried


def test_what_speaks_no_http_is_no_prefect_server() -> None:
    """An SSH tunnel, for example; the command ended with a traceback."""
    with ssh_server(2) as api:
        assert not is_prefect(api)
        says = f"PREFECT_API_URL is {api}, but no Prefect server answers there"
        with temporary_settings({PREFECT_API_URL: api}), pytest.raises(ServerError, match=says):
            find_or_start_server()


def test_at_a_port_that_is_no_number_is_no_prefect_server() -> None:
    """The command ended with a traceback, and the doctor too."""
    api = "http://127.0.0.1:42oo/api"
    assert not is_prefect(api)
    assert problems_of(api) == [f"PREFECT_API_URL is {api}, {NONE_THERE}"]


@pytest.mark.parametrize("status", [200, 404])
def test_the_doctor_names_a_server_that_is_no_prefect_server(status: int) -> None:
    """It said that nothing is wrong, or failed by the page that it couldn't read."""
    with web_server(status) as url:
        assert problems_of(f"{url}/api") == [f"PREFECT_API_URL is {url}/api, {NONE_THERE}"]


@pytest.mark.extended
def test_the_doctor_names_an_address_without_api(prefect_server: str) -> None:
    """There a Prefect server has its pages, or nothing."""
    parts = urlsplit(prefect_server)
    url = f"{parts.scheme}://{parts.netloc}"
    assert problems_of(url) == [f"PREFECT_API_URL is {url}, {NONE_THERE}"]
    assert problems_of(prefect_server) == []
