"""Owns the connections to an S3 endpoint: through the environment's proxy, with certificates
checked, kept from GET to GET.
"""

import http.client
import ssl
from base64 import b64encode
from pathlib import Path
from urllib.parse import unquote, urlsplit

from prefect_torch_ddp.storage.s3.lean.target import Target
from prefect_torch_ddp.storage.s3.lean.wire import Answer, ask


class Route:
    """Makes connections to a target, through the proxy that the environment names for it."""

    def __init__(self, target: Target, connect_timeout_s: float) -> None:
        from botocore.utils import get_environ_proxies  # noqa: PLC0415

        parts = urlsplit(target.url)
        self._host, self._port = parts.hostname or "", parts.port
        self._is_tls = parts.scheme == "https"
        self._timeout_s = connect_timeout_s
        self._proxy = get_environ_proxies(target.url).get(parts.scheme)
        self._context = _tls_context(target.ca_bundle) if self._is_tls else None
        self.sends_whole_url = bool(self._proxy) and not self._is_tls
        """A proxy for plain HTTP is told the whole URL."""
        self.headers = _proxy_headers(self._proxy) if self.sends_whole_url else {}

    def open(self) -> http.client.HTTPConnection:
        """Describe a connection; it is made with its first request."""
        host, port = self._host, self._port
        if self._proxy:
            proxy = urlsplit(self._proxy if "://" in self._proxy else f"http://{self._proxy}")
            host, port = proxy.hostname or "", proxy.port or 80
        if self._context is None:
            return http.client.HTTPConnection(host, port, timeout=self._timeout_s)
        connection = http.client.HTTPSConnection(
            host, port, timeout=self._timeout_s, context=self._context
        )
        if self._proxy:
            connection.set_tunnel(self._host, self._port or 443, _proxy_headers(self._proxy))
        return connection


def _tls_context(ca_bundle: str | None) -> ssl.SSLContext:
    if ca_bundle is None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return context
    is_folder = Path(ca_bundle).is_dir()
    return ssl.create_default_context(
        cafile=None if is_folder else ca_bundle, capath=ca_bundle if is_folder else None
    )


def _proxy_headers(proxy: str | None) -> dict[str, str]:
    parts = urlsplit(proxy or "")
    if parts.username is None:
        return {}
    user = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return {"Proxy-Authorization": "Basic " + b64encode(user.encode()).decode()}


class Connection:
    """A thread's connection, opened anew when it broke."""

    def __init__(self, route: Route, read_timeout_s: float) -> None:
        self._route = route
        self._read_timeout_s = read_timeout_s
        self._connection: http.client.HTTPConnection | None = None

    def ask(self, request: bytes) -> Answer:
        """Send a GET and read the answer whole."""
        was_idle = self._connection is not None
        try:
            return self._ask(request)
        except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
            if not was_idle:
                raise
        # The server had closed the kept connection meanwhile, as servers do: that is no fault
        # yet.
        return self._ask(request)

    def _ask(self, request: bytes) -> Answer:
        connection, self._connection = self._connection, None
        if connection is None:
            connection = self._route.open()
            connection.connect()
            connection.sock.settimeout(self._read_timeout_s)
        try:
            answer = ask(connection.sock, request)
        except BaseException:
            connection.close()
            raise
        if answer.will_close:
            connection.close()
        else:
            self._connection = connection
        return answer

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
