"""The Prefect server of a run: the local one that is started, and how long Prefect's own may take.

`python -m prefect_torch_ddp.server` finds or starts a server, and prints the URL of its API.
"""

import fcntl
import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

from prefect_torch_ddp.errors import PrefectTorchDdpError

LEASES_IN = "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE"
LEASES_IN_FILES = "prefect.server.concurrency.lease_storage.filesystem"
LEASES_IN_MEMORY = "prefect.server.concurrency.lease_storage.memory"
START_S = 300
"""Prefect's own 20 s are too few for a first start on a cold or loaded machine."""
OTHER_PORT = "`export PREFECT_SERVER_API_PORT=4201`, and run the command again: it starts one there"
LISTENS = "0A"
"""The state of a socket that listens, in the kernel's tables."""
REACHED = {"0100007F", "0" * 8, "0" * 32, "0" * 16 + "FFFF00000100007F"}
"""Addresses there that 127.0.0.1 reaches: itself and all, of IPv4 and IPv6."""
PROBE_BYTES = 2**16
"""A quota that is used up may still allow an empty file."""


class ServerError(PrefectTorchDdpError):
    """There is no Prefect server to use; says why, and what to do."""


def use_server() -> None:
    """Have this process, and those that it starts, use the server of `find_or_start_server`."""
    from prefect.context import refresh_global_settings_context  # noqa: PLC0415

    os.environ["PREFECT_API_URL"] = find_or_start_server()
    refresh_global_settings_context()


def local_api() -> str:
    """Return where the local Prefect server is, or will be: at the port of Prefect's settings."""
    from prefect.settings import PREFECT_SERVER_API_PORT  # noqa: PLC0415 - it takes a second

    return f"http://127.0.0.1:{PREFECT_SERVER_API_PORT.value()}/api"


def find_or_start_server() -> str:
    """Return the API of the configured Prefect server, or of a local one, started if need be.

    Raises:
        ServerError: the configured server doesn't answer, or none can be started.
    """
    from prefect.settings import PREFECT_API_URL, PREFECT_HOME  # noqa: PLC0415 - it takes a second

    configured: str | None = PREFECT_API_URL.value()
    if configured:
        if urlsplit(configured).scheme not in {"http", "https"}:
            msg = f"PREFECT_API_URL is {configured}: write it as http://host:4200/api"
            raise ServerError(msg)
        # Only Prefect has the certificates and keys that https may need.
        if urlsplit(configured).scheme == "http" and not is_prefect(configured):
            raise ServerError(none_at(configured))
        return configured
    api = local_api()
    if not is_prefect(api):
        _start_server(api, PREFECT_HOME.value())
    refuse_strangers_server(urlsplit(api).port)
    return api


def none_at(api: str) -> str:
    """Say that no Prefect server answers at the configured address, and what to do."""
    return (
        f"PREFECT_API_URL is {api}, but no Prefect server answers there: start it, correct the "
        "address, which ends in /api, or unset PREFECT_API_URL"
    )


def refuse_strangers_server(
    port: int | None, tables: Sequence[str] = ("/proc/net/tcp", "/proc/net/tcp6")
) -> None:
    """Refuse a local server that another user has started, as on a login node.

    Args:
        port: of the server.
        tables: of the kernel's sockets. One that isn't there is passed over.

    Raises:
        ServerError: neither this user nor root, as whom a container's proxy may run, listens there.
    """
    for table in map(Path, tables):
        for line in table.read_text(encoding="utf-8").splitlines()[1:] if table.exists() else ():
            _, local, _, state, *rest = line.split()
            owner = int(rest[3])
            address, _, number = local.rpartition(":")
            if state == LISTENS and int(number, 16) == port and address in REACHED:
                if owner in (0, os.getuid()):
                    return
                msg = (
                    f"the Prefect server at 127.0.0.1:{port} is that of user {owner}: set "
                    "PREFECT_API_URL to its API if you may use it, or have your own at another "
                    f"port: {OTHER_PORT}"
                )
                raise ServerError(msg)


@contextmanager
def flow_server() -> Iterator[None]:
    """Have the tasks that a flow submits in the context use its server, also a temporary one.

    Without a configured server each Dask worker would start one, all of them on one database.
    """
    from prefect.client.orchestration import get_client  # noqa: PLC0415 - it takes a second
    from prefect.settings import (  # noqa: PLC0415
        PREFECT_API_URL,
        PREFECT_UI_URL,
        temporary_settings,
    )

    api_url = str(get_client(sync_client=True).api_url).rstrip("/")
    is_configured = (PREFECT_API_URL.value() or "").rstrip("/") == api_url
    # A temporary server has no UI, which Prefect would make links to.
    temporary = {PREFECT_API_URL: api_url, PREFECT_UI_URL: ""}
    with nullcontext() if is_configured else temporary_settings(temporary):
        yield


def server_environment() -> dict[str, str]:
    """Return the environment for a Prefect server, with what it needs to survive a restart.

    A deployment's concurrency limit is a lease. By default the server keeps leases in memory: 225 s
    into a run the renewal gets `410 Gone` from a server that was restarted, and Prefect ends the
    flow run as Crashed.
    """
    return {LEASES_IN: LEASES_IN_FILES, **os.environ}


def forgets_leases() -> bool:
    """Return whether the configured Prefect server says that it keeps leases in memory.

    Prefect Cloud says nothing of itself.

    Raises:
        httpx.HTTPError: the server doesn't answer.
        httpx.InvalidURL, ValueError: the address is none, or what answers there isn't Prefect.
    """
    from prefect.client.orchestration import get_client  # noqa: PLC0415 - it takes a second
    from prefect.exceptions import PrefectHTTPStatusError  # noqa: PLC0415
    from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings  # noqa: PLC0415

    with (
        temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}),
        get_client(sync_client=True) as client,
    ):
        try:
            told = client.request("GET", "/admin/settings").json()
        except PrefectHTTPStatusError:
            return False
    if not isinstance(told, dict):
        msg = "its settings are no JSON object"
        raise ValueError(msg)  # noqa: TRY004 - as if it were no JSON
    found = told.get("server", {}).get("concurrency", {}).get("lease_storage")
    return bool(found == LEASES_IN_MEMORY)


def is_prefect(api: str) -> bool:
    """Tell whether a Prefect server answers."""
    try:
        # Http, from local_api or the settings.
        with urllib.request.urlopen(f"{api.rstrip('/')}/health", timeout=5) as answer:  # noqa: S310
            return json.load(answer) is True
    # HTTPException: what answers doesn't speak HTTP, or the port is no number.
    except (OSError, ValueError, http.client.HTTPException):
        return False


def adjust_embedded_server() -> None:
    """Give the server that Prefect embeds 300 s to start, and turn its telemetry off.

    Its telemetry logs an error wherever there is no internet, and a hundred lines of `database is
    locked` if it comes while a slow first start still makes the database. What the user has set
    stays, and so does Prefect's own time if the server has nowhere to keep its database.

    Prefect reads these settings when it starts that server, so this may come after Prefect was
    imported; processes that get their settings from this one have them too.
    """
    from prefect.context import get_settings_context  # noqa: PLC0415 - it takes a second

    server = get_settings_context().settings.server
    if "startup_timeout_seconds" not in server.ephemeral.model_fields_set:
        with suppress(ServerError):
            check_embedded_server()  # else it fails again and again for so long
            server.ephemeral.startup_timeout_seconds = START_S
    if "analytics_enabled" not in server.model_fields_set:
        server.analytics_enabled = False


def check_embedded_server() -> None:
    """Refuse a PREFECT_HOME where the server that Prefect would embed can't keep its database.

    Prefect would start that server again and again, each time with 200 lines in the log.

    Raises:
        ServerError: nothing can be written there; names the folder and says what to do.
    """
    from prefect.settings import get_current_settings  # noqa: PLC0415 - it takes a second

    settings = get_current_settings()
    database = settings.server.database.connection_url
    is_there = database is not None and str(settings.home) in database.get_secret_value()
    if settings.server.ephemeral.enabled and not settings.api.url and is_there:
        _check_home(settings.home)


def _check_home(home: Path) -> None:
    try:
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=home) as probe:
            probe.write(bytes(PROBE_BYTES))
    except OSError as error:
        msg = (
            f"Prefect's server can't keep its data in {home}: {error.strerror or error}. Set "
            "PREFECT_HOME to a folder that this user can write to and that has space, or "
            "PREFECT_API_URL to a server that runs"
        )
        raise ServerError(msg) from None


def _start_server(api: str, home: Path) -> None:
    """Start a Prefect server that outlives this process, until `prefect server stop`.

    Not by `prefect server start --background`: that server's output goes to a pipe that nobody
    reads, and it dies at its first log line (prefect 3.9.1).

    Of several commands that come here at once, one starts it and the others use it.
    """
    _check_home(home)
    with (home / "server.lock").open("ab") as file:
        _lock(file, home)
        if not is_prefect(api):
            _start_server_alone(api, home)


def _lock(file: BinaryIO, home: Path) -> None:
    """Wait until no other process starts the server; the lock ends when the file is closed."""
    deadline = time.monotonic() + START_S
    # Not for longer than a start may take: the other process may be suspended.
    while time.monotonic() < deadline:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.2)
        except OSError as error:  # a home on a file system without locks, as some NFS
            words = (
                f"{home} can't be locked ({error.strerror}): commands that start a Prefect server "
                "at the same time may disturb each other, and its database may not work. Set "
                "PREFECT_HOME to a folder on a local disk, or PREFECT_API_URL to a server that runs"
            )
            print(words, file=sys.stderr, flush=True)  # noqa: T201 - no logging yet
            return
        else:
            return


def _start_server_alone(api: str, home: Path) -> None:
    address = urlsplit(api)
    with socket.socket() as probe:
        if probe.connect_ex((address.hostname, address.port)) == 0:
            msg = (
                f"port {address.port} is used by something that isn't a Prefect server: stop it, "
                f"or have a server at another port: {OTHER_PORT}"
            )
            raise ServerError(msg)
    log = home / "server.log"
    where = f"--host {address.hostname} --port {address.port}"
    command = [sys.executable, "-m", *f"prefect server start {where}".split()]
    words = (
        f"Starting a local Prefect server, which runs until `prefect server stop`; its log is {log}"
    )
    print(words, file=sys.stderr, flush=True)  # noqa: T201 - before Prefect configures logging
    with log.open("ab") as out:
        server = subprocess.Popen(  # noqa: S603
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=server_environment(),
            start_new_session=True,
        )
    # Where `prefect server stop` looks.
    (home / "server.pid").write_text(str(server.pid), encoding="utf-8")
    deadline = time.monotonic() + START_S
    while not is_prefect(api):
        if server.poll() is not None or time.monotonic() > deadline:
            server.kill()
            what = f"did not start within {START_S} s"
            if server.returncode is not None:
                what = f"ended with exit code {server.returncode} as it started"
            msg = f"the Prefect server {what}; its log is {log}"
            raise ServerError(msg)
        time.sleep(0.2)


if __name__ == "__main__":
    print(find_or_start_server())  # noqa: T201
