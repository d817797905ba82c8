"""A web server with a certificate of its own, which answers as it is told."""

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass
class Answers:
    """How the server answers."""

    content: bytes = b"content"
    headers: dict[str, str] = field(default_factory=lambda: {"ETag": '"1"'})
    serves_ranges: bool = True
    says_length: bool = True
    bytes_per_answer: int | None = None
    """After so many the connection breaks."""
    statuses: list[int] = field(default_factory=list)
    """Of the next answers; 302: with `headers`, and no content. 0: no status of HTTP."""
    asked: list[tuple[int, int]] = field(default_factory=list)
    """The ranges that were asked for."""


def certificate(folder: Path) -> Path:
    """Write a certificate of 127.0.0.1 with its key, and return the file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False
        )
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    plain = serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    file = folder / "server.pem"
    file.write_bytes(made.public_bytes(pem) + key.private_bytes(pem, *plain))
    return file


@contextmanager
def https_server(answers: Answers, pem: Path) -> Iterator[str]:
    """Serve `answers` at every path; give the address without a path."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
            answers.asked.append((first, last))
            status = answers.statuses.pop(0) if answers.statuses else 200
            body, headers = answers.content, dict(answers.headers)
            if status != 200:
                body = b""
            elif answers.serves_ranges:
                status, body = 206, body[first : last + 1]
                headers["Content-Range"] = f"bytes {first}-{last}/{len(answers.content)}"
            if answers.says_length:
                headers["Content-Length"] = str(len(body))
            elif answers.serves_ranges and status == 206:
                headers["Content-Range"] = f"bytes {first}-{last}/*"
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body[: answers.bytes_per_answer])

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"https://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
