"""A proxy that delays every request: a separate process that costs little CPU.

Prints its port, ends with its stdin.
"""

import asyncio
import sys
from typing import cast


class Upstream(asyncio.Protocol):
    """Hands on what the server answers, at once."""

    def __init__(self, client: asyncio.Transport) -> None:
        self.client = client

    def data_received(self, data: bytes) -> None:
        self.client.write(data)

    def connection_lost(self, _error: Exception | None) -> None:
        self.client.close()


class Client(asyncio.Protocol):
    """Hands on what a client sends, later: a GET comes in one piece, so every request waits
    once."""

    def __init__(self, host: str, port: int, delay_s: float) -> None:
        self.host, self.port, self.delay_s = host, port, delay_s
        self.server: asyncio.Transport | None = None
        self.early: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.client = cast("asyncio.Transport", transport)
        self.connecting = asyncio.ensure_future(self.connect())

    async def connect(self) -> None:
        """Hand on what came meanwhile."""
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_connection(
            lambda: Upstream(self.client), self.host, self.port
        )
        self.server = transport
        for data in self.early:
            self.server.write(data)

    def data_received(self, data: bytes) -> None:
        if self.delay_s:
            asyncio.get_running_loop().call_later(self.delay_s, self.send, data)
        else:
            self.send(data)

    def send(self, data: bytes) -> None:
        if self.server is None:
            self.early.append(data)
        elif not self.server.is_closing():
            self.server.write(data)

    def connection_lost(self, _error: Exception | None) -> None:
        if self.server is not None:
            self.server.close()


async def serve(host: str, port: int, delay_s: float) -> None:
    """Serve until stdin ends."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: Client(host, port, delay_s), "127.0.0.1", 0, backlog=1000
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
