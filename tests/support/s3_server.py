"""A real S3 server for tests, with users and refusals, and a connection between client and
server that can be cut."""

import http.client
import itertools
import json
import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import pytest

from prefect_torch_ddp.storage.s3.storage import S3Storage
from tests.support.ports import free_port
from tests.support.waiting import HANG_S, becomes_true

ALLOW = {
    "owner": ["s3:*"],
    "reader": ["s3:GetObject", "s3:ListBucket"],
    # What docs/storage.md asks for, without the two rights about unfinished uploads.
    "writer": ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:ListBucket"],
}
NUM_SETUP_ACTIONS = 3 * len(ALLOW)


@dataclass(frozen=True)
class S3Server:
    """A running server."""

    endpoint_url: str
    keys: dict[str, tuple[str, str]]
    """Access key and secret of each user; empty if the server lets everyone in."""
    bucket: str = "bucket"
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def storage(self, prefix: str | None = None, user: str = "owner", **changes: Any) -> S3Storage:
        """Describe a storage, by default under a new prefix."""
        key, secret = self.keys.get(user, ("anyone", "anything"))
        keys = {"access_key_id": key, "secret_access_key": secret}
        options = {"endpoint_url": self.endpoint_url} | keys | changes
        return S3Storage(
            options.pop("bucket", self.bucket),
            f"test/{next(self._numbers)}" if prefix is None else prefix,
            **options,
        )

    def environment(self) -> dict[str, str]:
        """Return the variables by which AWS's tools find it, as its owner."""
        key, secret = self.keys["owner"]
        keys = {"AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret}
        return keys | {"AWS_ENDPOINT_URL": self.endpoint_url, "AWS_DEFAULT_REGION": "us-east-1"}


@contextmanager
def run_server(log_path: Path, *, checks_rights: bool) -> Iterator[S3Server]:
    """Start moto in a separate process, wait until it answers, and kill it at the end."""
    env = dict(os.environ)
    if checks_rights:
        env["INITIAL_NO_AUTH_ACTION_COUNT"] = str(NUM_SETUP_ACTIONS)
    with log_path.open("wb") as log:
        process, endpoint_url = _start(env, log.fileno(), log_path)
        try:
            server = S3Server(endpoint_url, _make_users(endpoint_url) if checks_rights else {})
            keys = server.keys.get("owner", ("anyone", "anything"))
            _boto3_client("s3", endpoint_url, *keys).create_bucket(Bucket=server.bucket)
            yield server
        finally:
            process.kill()
            process.wait()


def _start(env: dict[str, str], log: int, log_path: Path) -> tuple[subprocess.Popen[bytes], str]:
    moto = [sys.executable, str(Path(__file__).with_name("moto_process.py")), "-H", "127.0.0.1"]
    for _ in range(3):  # another process may take the free port before the server does
        port = free_port()
        process = subprocess.Popen([*moto, "-p", str(port)], stdout=log, stderr=log, env=env)
        url = f"http://127.0.0.1:{port}"
        becomes_true(partial(_has_settled, process, url))
        if process.poll() is None and _answers(url):
            return process, url
        process.kill()
        process.wait()
    pytest.fail("the S3 server did not start:\n" + log_path.read_text()[-4000:])


def _has_settled(process: subprocess.Popen[bytes], url: str) -> bool:
    return process.poll() is not None or _answers(url)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/moto-api/data.json", timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def _boto3_client(service: str, endpoint_url: str, key: str, secret: str) -> Any:
    from boto3.session import Session

    session = Session(aws_access_key_id=key, aws_secret_access_key=secret, region_name="us-east-1")
    return session.client(service, endpoint_url=endpoint_url)


def _make_users(endpoint_url: str) -> dict[str, tuple[str, str]]:
    iam = _boto3_client("iam", endpoint_url, "setup", "setup")
    keys = {}
    for name, actions in ALLOW.items():
        iam.create_user(UserName=name)
        statement = {"Effect": "Allow", "Action": actions, "Resource": "*"}
        policy = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
        iam.put_user_policy(UserName=name, PolicyName="may", PolicyDocument=policy)
        made = iam.create_access_key(UserName=name)["AccessKey"]
        keys[name] = made["AccessKeyId"], made["SecretAccessKey"]
    iam.close()
    return keys


@dataclass(frozen=True)
class Exchange:
    """A request that went over the wire, with the server's answer to it."""

    method: str
    headers: dict[str, str]
    status: int
    answer_headers: tuple[tuple[str, str], ...]
    answer: bytes


Fault = Callable[[BaseHTTPRequestHandler, Exchange], None]


class Wire:
    """A proxy in front of a server.

    Each queued fault takes the place of one answer to a request of its method.
    """

    def __init__(
        self,
        endpoint_url: str,
        without_header: str | None = None,
        outage: "Callable[[], Fault | None]" = lambda: None,
    ) -> None:
        """Open it.

        Args:
            endpoint_url: of the server.
            without_header: is taken out of every request.
            outage: gives the fault that answers in place of the server, while there is one.
        """
        self.exchanges: list[Exchange] = []
        self.faults: list[tuple[str, Fault]] = []
        upstream = endpoint_url.removeprefix("http://")
        handler = type("Handler", (self._handler(),), {"wire": self, "upstream": upstream})
        self.without_header = without_header
        self.outage = outage
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        # A client that gave up, or was killed, leaves broken pipes.
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self.endpoint_url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _handler(self) -> type["_Handler"]:
        return _Handler

    def fault_for(self, method: str) -> "Fault | None":
        """Take the next fault of a method from the queue, if there is one."""
        for number, (queued, fault) in enumerate(self.faults):
            if queued == method:
                del self.faults[number]
                return fault
        return None

    def count(self, method: str) -> int:
        """Count the requests of a method that were seen."""
        return sum(exchange.method == method for exchange in self.exchanges)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wire: Wire
    upstream: str

    def do_request(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if (outage := self.wire.outage()) is not None:
            self.close_connection = True
            outage(self, Exchange(self.command, dict(self.headers.items()), 0, (), b""))
            return
        exchange = self._forward(body)
        self.wire.exchanges.append(exchange)
        fault = self.wire.fault_for(self.command)
        if fault is None:
            send(self, exchange, exchange.answer)
        else:
            fault(self, exchange)
            self.close_connection = True

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = do_PATCH = do_request  # noqa: N815 - http.server's names

    def _forward(self, body: bytes) -> Exchange:
        headers = dict(self.headers.items())
        with closing(http.client.HTTPConnection(self.upstream, timeout=HANG_S)) as connection:
            connection.putrequest(
                self.command, self.path, skip_host=True, skip_accept_encoding=True
            )
            for name, value in headers.items():
                if name.lower() not in {"expect", self.wire.without_header}:
                    connection.putheader(name, value)
            connection.endheaders(body)
            response = connection.getresponse()
            answered = tuple(response.getheaders()), response.read()
        return Exchange(self.command, headers, response.status, *answered)

    def log_message(self, *_: object) -> None:
        """Stay silent."""


def send(handler: BaseHTTPRequestHandler, exchange: Exchange, part: bytes) -> None:
    """Send the answer's head as it came, and a part of its content."""
    handler.send_response_only(exchange.status)
    for name, value in exchange.answer_headers:
        if name.lower() not in {"connection", "transfer-encoding"}:
            handler.send_header(name, value)
    if not any(name.lower() == "content-length" for name, _ in exchange.answer_headers):
        handler.send_header("Content-Length", str(len(exchange.answer)))
    handler.end_headers()
    handler.wfile.write(part)


def cut_in_the_body(handler: BaseHTTPRequestHandler, exchange: Exchange) -> None:
    """Close the connection after half of the content."""
    send(handler, exchange, exchange.answer[: len(exchange.answer) // 2])


def lose_the_answer(handler: BaseHTTPRequestHandler, exchange: Exchange) -> None:
    """Close the connection when the server has done what was asked, before anyone hears of
    it."""


def answer(status: int, code: str, more: str = "") -> Fault:
    """Make a fault that answers with an error of S3's own form; `more` is XML within it."""

    def fault(handler: BaseHTTPRequestHandler, exchange: Exchange) -> None:
        says = f"<Code>{code}</Code><Message>made by the test</Message>{more}"
        body = f"<Error>{says}</Error>".encode()
        xml = (("Content-Type", "application/xml"),)
        send(handler, Exchange(exchange.method, {}, status, xml, body), body)

    fault.__name__ = code  # a parametrised case shows it
    return fault
