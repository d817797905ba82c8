"""A third storage, as CONTRIBUTING.md says to add one: objects in the memory of a process, over
HTTP. It answers only the six questions that have no answer by default.
"""

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import quote, unquote, urlsplit

from prefect_torch_ddp.errors import ObjectNotFoundError, StorageError
from prefect_torch_ddp.storage.names import check_key, check_prefix
from prefect_torch_ddp.storage.protocol import Storage, StoredObject

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class MemoryStorage(Storage):
    """Objects below a folder of a server's memory."""

    host: str
    port: int
    folder: str

    @classmethod
    def from_uri(cls, uri: str) -> "MemoryStorage":
        """Make it from `memory://host:port/folder`: what the entry point names."""
        parts = urlsplit(uri)
        return cls(parts.hostname or "", parts.port or 0, parts.path.strip("/"))

    @property
    def uri(self) -> str:
        return f"memory://{self.host}:{self.port}/{self.folder}"

    def read(self, key: str) -> bytes:
        status, data = self._ask("GET", check_key(key))
        if status == 404:
            msg = f"can't read {key} in {self.uri}: there is no such object"
            raise ObjectNotFoundError(msg)
        return data

    def write(self, key: str, data: bytes | memoryview) -> None:
        self._ask("PUT", check_key(key), bytes(data))

    def write_if_absent(self, key: str, data: bytes) -> bool:
        status, _ = self._ask("PUT", check_key(key), data, {"If-None-Match": "*"})
        return status != 412

    def list(self, prefix: str = "") -> Iterator[StoredObject]:
        _, data = self._ask("LIST", check_prefix(prefix))
        return (StoredObject(key, size) for key, size in json.loads(data))

    def delete(self, key: str) -> None:
        self._ask("DELETE", check_key(key))

    def _ask(
        self, method: str, key: str, data: bytes = b"", headers: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=TIMEOUT_S)
        path = f"/{quote(f'{self.folder}/{key}')}"
        try:
            connection.request(method, path, data, headers or {})
            answer = connection.getresponse()
            return answer.status, answer.read()
        except OSError as error:
            msg = f"can't reach {self.uri}: {error}; is its server running?"
            raise StorageError(msg) from error
        finally:
            connection.close()


class _Handler(BaseHTTPRequestHandler):
    server: "_Server"

    def do_GET(self) -> None:
        data = self.server.objects.get(self._key())
        self._answer(404 if data is None else 200, data or b"")

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        with self.server.writing:  # of racing callers one wins
            is_there = self._key() in self.server.objects
            loses = is_there and "If-None-Match" in self.headers
            if not loses:
                self.server.objects[self._key()] = data
        self._answer(412 if loses else 200)

    def do_DELETE(self) -> None:
        self.server.objects.pop(self._key(), None)
        self._answer(200)

    def do_LIST(self) -> None:
        whole = self._key()
        folder = whole.partition("/")[0] + "/"
        found = sorted((key, len(data)) for key, data in list(self.server.objects.items()))
        keys = [(key.removeprefix(folder), size) for key, size in found if key.startswith(whole)]
        self._answer(200, json.dumps(keys).encode())

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def _key(self) -> str:
        return unquote(self.path).removeprefix("/")

    def _answer(self, status: int, data: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class _Server(ThreadingHTTPServer):
    daemon_threads = False
    block_on_close = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, bytes] = {}
        self.writing = threading.Lock()


@contextmanager
def memory_server() -> Iterator[int]:
    """Serve objects at a free port, which is yielded."""
    server = _Server()
    thread = threading.Thread(target=server.serve_forever, name="memory-storage")
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
