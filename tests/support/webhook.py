"""A web server that keeps what is posted to it, as Slack or Mattermost would get it."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any


@contextmanager
def kept_posts() -> Iterator[tuple[str, list[Any]]]:
    """Run the server; give its URL and the bodies that came, which are JSON."""
    kept: list[Any] = []

    class Keeper(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            kept.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Keeper)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/hook", kept
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
