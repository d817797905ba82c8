"""What a bad network or a bad proxy does to answers, and a connection that does it now and then,
by a seed."""

import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler

from tests.support.s3_server import (
    Exchange,
    Fault,
    Wire,
    answer,
    cut_in_the_body,
    lose_the_answer,
    send,
)

NUM_DRIPS = 20
DRIP_PAUSE_S = 0.02


def reset_in_the_body(handler: BaseHTTPRequestHandler, exchange: Exchange) -> None:
    """Break the connection by a RST after half of the content."""
    send(handler, exchange, exchange.answer[: len(exchange.answer) // 2])
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.connection.close()


def truncate(handler: BaseHTTPRequestHandler, exchange: Exchange) -> None:
    """Send half of the content as if it were the whole: the length announced is that of the
    half."""
    half = exchange.answer[: len(exchange.answer) // 2]
    send(
        handler,
        _with_header(replace(exchange, answer=half), "Content-Length", str(len(half))),
        half,
    )


def change_a_byte(handler: BaseHTTPRequestHandler, exchange: Exchange) -> None:
    """Send other content of the same length, in an object: XML, which has no digest, is left to
    TCP's and TLS's checks."""
    changed = bytearray(exchange.answer)
    if changed and not any("xml" in value for _, value in exchange.answer_headers):
        changed[len(changed) // 2] ^= 0xFF
    send(handler, exchange, bytes(changed))


def change_the_etag(handler: BaseHTTPRequestHandler, exchange: Exchange) -> None:
    """Tell the ETag of another content."""
    send(handler, _with_header(exchange, "ETag", f'"{"0" * 32}"'), exchange.answer)


def drip(handler: BaseHTTPRequestHandler, exchange: Exchange) -> None:
    """Send the content slowly."""
    step = max(1, len(exchange.answer) // NUM_DRIPS)
    send(handler, exchange, b"")
    for start in range(0, len(exchange.answer), step):
        time.sleep(DRIP_PAUSE_S)
        handler.wfile.write(exchange.answer[start : start + step])


def never_answer(handler: BaseHTTPRequestHandler, exchange: Exchange) -> None:
    """Hold the connection open and silent until the client leaves."""
    handler.connection.settimeout(60)
    handler.connection.recv(1)


def _with_header(exchange: Exchange, name: str, value: str) -> Exchange:
    others = tuple(
        header for header in exchange.answer_headers if header[0].lower() != name.lower()
    )
    return replace(exchange, answer_headers=(*others, (name, value)))


FAULTS: Mapping[str, Fault] = {
    "503": answer(503, "SlowDown"),
    "500": answer(500, "InternalError"),
    "cut": cut_in_the_body,
    "lost answer": lose_the_answer,
    "reset": reset_in_the_body,
    "truncated": truncate,
    "changed byte": change_a_byte,
    "wrong ETag": change_the_etag,
    "slow": drip,
    "hangs": never_answer,
}


class FaultyWire(Wire):
    """A wire on which each answer may meet with one of some faults, by chance."""

    def __init__(self, endpoint_url: str, kinds: Sequence[str], *, rate: float, seed: int) -> None:
        """Open it.

        Args:
            endpoint_url: of the server.
            kinds: names of FAULTS.
            rate: the share of answers that are hit.
            seed: of the draws; their order is that of the requests.
        """
        super().__init__(endpoint_url)
        self.hits: Counter[str] = Counter()
        self._kinds = kinds
        self._rate = rate
        self._chance = random.Random(seed)
        self._drawing = threading.Lock()

    def fault_for(self, method: str) -> Fault | None:
        with self._drawing:
            if self._chance.random() >= self._rate:
                return None
            kind = self._chance.choice(self._kinds)
            self.hits[kind] += 1
        return FAULTS[kind]
