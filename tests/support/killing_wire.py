"""A wire to an S3 server on which a client is killed in the midst of a request, or before
it hears the answer."""

import os
import re
import signal
import threading
from collections import Counter
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Literal

import psutil

from tests.support.killing_storage import leave_mark
from tests.support.s3_server import Wire, _Handler


@dataclass(frozen=True)
class WireKill:
    """One SIGKILL of the client whose nth request matches."""

    attempt: int
    method: str
    path: str
    """A regular expression; the path comes with its query."""
    moment: Literal["within", "after"]
    """Within: half of the body was sent, and the server gets none of it.

    After: it is done, and nobody hears of it.
    """
    nth: int = 1


class KillingWire(Wire):
    """A proxy in front of a server that kills its clients as told."""

    def __init__(self, endpoint_url: str, kills: tuple[WireKill, ...], folder: Path) -> None:
        super().__init__(endpoint_url)
        self._kills = kills
        self._folder = str(folder)
        self._num_seen: Counter[WireKill] = Counter()
        self._counting = threading.Lock()

    def due(self, handler: BaseHTTPRequestHandler) -> WireKill | None:
        """Count a request; return the kill whose turn it is."""
        for kill in self._kills:
            if handler.command == kill.method and re.search(kill.path, handler.path):
                with self._counting:
                    self._num_seen[kill] += 1
                    if self._num_seen[kill] == kill.nth:
                        return kill
        return None

    def carry_out(self, kill: WireKill, client: tuple[str, int]) -> None:
        """Kill the process at the other end of a connection."""
        for process in psutil.process_iter(["name"]):
            if (process.info["name"] or "").startswith("ddp-rank-") and client in _local_ends(
                process
            ):
                leave_mark(self._folder, kill.attempt)
                os.kill(process.pid, signal.SIGKILL)
                return
        msg = f"nobody is at the other end of {client}"
        raise AssertionError(msg)

    def _handler(self) -> type[_Handler]:
        return _KillingHandler


def _local_ends(process: psutil.Process) -> set[tuple[str, int]]:
    try:
        return {tuple(found.laddr) for found in process.net_connections("tcp")}
    except psutil.Error:
        return set()


class _KillingHandler(_Handler):
    wire: KillingWire

    def do_request_or_kill(self) -> None:
        kill = self.wire.due(self)
        if kill is None:
            self.do_request()
            return
        num_bytes = int(self.headers.get("Content-Length", 0))
        if kill.moment == "within":
            self.rfile.read(num_bytes // 2)
        else:
            self._forward(self.rfile.read(num_bytes))
        self.wire.carry_out(kill, self.client_address)
        self.close_connection = True

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = do_request_or_kill  # noqa: N815 - http.server's names
