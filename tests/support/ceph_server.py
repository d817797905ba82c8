"""A real Ceph RADOS Gateway for tests: a monitor, one OSD and the gateway, all files and
ports private, gone at the end."""

import base64
import json
import os
import shutil
import socket
import struct
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from prefect_torch_ddp.storage.s3.client import client_of
from tests.support.s3_server import S3Server
from tests.support.waiting import becomes_true

COMMANDS = (
    *("ceph", "ceph-mon", "ceph-osd", "monmaptool"),
    *("radosgw", "radosgw-admin", "openssl", "setpriv"),
)
PACKAGES = "ceph-mon ceph-osd radosgw ceph-common openssl"
READY_S = 120.0
NUM_TRIES = 3
USERS = ("owner", "reader")

CAPABILITIES = {
    "mon.": ("mon 'allow *'",),
    "client.admin": ("mon 'allow *'", "osd 'allow *'"),
    "client.rgw": ("mon 'allow rwx'", "osd 'allow rwx'"),
    "osd.0": ("mon 'allow profile osd'", "osd 'allow *'"),
}

# Ceph waits a second before each change of its maps, of which a new cluster makes dozens: hence
# paxos. Without tcp_nodelay a GET takes 40 ms more. What is deleted takes room until it is
# collected, an hour by default.
CONFIG = """
[global]
fsid = {fsid}
mon host = [v2:127.0.0.1:{mon_port}]
mon initial members = a
auth allow insecure global id reclaim = true
ms bind msgr1 = false
public addr = 127.0.0.1
cluster addr = 127.0.0.1
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 1
osd pool default pgp num = 1
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
mon data avail crit = 1
mon data avail warn = 1
mon max pg per osd = 2000
paxos propose interval = 0.02
paxos min wait = 0.01
keyring = {home}/keyring
run dir = {home}/run
log file = {home}/log/$name.log
crash dir = {home}/log
admin socket = {home}/run/$name.asok
pid file = {home}/run/$name.pid
[mon]
mon data = {home}/mon
[osd]
osd data = {home}/osd
osd objectstore = memstore
osd crush initial weight = 1
memstore device bytes = {room_bytes}
[client.rgw]
rgw data = {home}/rgw
rgw frontends = beast endpoint=127.0.0.1:{port} {tls} tcp_nodelay=1
rgw thread pool size = 64
rgw gc obj min wait = 20
rgw gc processor period = 20
rgw gc processor max time = 20
"""


def skip_without_ceph() -> None:
    """Skip the test, with what to install, on a machine that lacks Ceph."""
    if missing := ", ".join(name for name in COMMANDS if not shutil.which(name)):
        way_out = f"apt-get install {PACKAGES}, or make system-packages"
        pytest.skip(f"Ceph is not installed ({missing} not found): {way_out}")


@dataclass(frozen=True)
class CephServer(S3Server):
    """A running gateway: user `owner` may do all, user `reader` reads."""

    tls_endpoint_url: str = ""
    home: Path = Path()

    @property
    def ca_path(self) -> str:
        """The certificate that the TLS port shows, which signs itself."""
        return str(self.home / "tls.crt")

    def ceph(self, *command: str) -> str:
        """Give the cluster an order; return its answer."""
        return _run("ceph", "--conf", f"{self.home}/ceph.conf", *command)


@contextmanager
def run_ceph(home: Path, room_bytes: int = 4 * 2**30) -> Iterator[CephServer]:
    """Start a cluster of its own in an empty folder, wait until it answers, and kill it at the
    end. It keeps the objects in memory, and starts in two seconds.

    Args:
        home: its folder. Paths of sockets are limited to 107 bytes, so it should be short.
        room_bytes: how much it can hold.
    """
    skip_without_ceph()
    with ExitStack() as stack:
        for remaining in reversed(range(NUM_TRIES)):  # another process may take a port all the same
            try:
                server = stack.enter_context(_started(home / str(remaining), room_bytes))
                break
            except (_NotUpError, subprocess.SubprocessError) as error:
                if not remaining:
                    pytest.fail(f"Ceph did not start: {error}\n{_logs(home)}")
        yield server


class _NotUpError(Exception):
    pass


@contextmanager
def _started(home: Path, room_bytes: int) -> Iterator[CephServer]:
    for folder in ("mon", "osd", "rgw", "run", "log"):
        (home / folder).mkdir(parents=True)
    with ExitStack() as stack:
        mon_port, port, tls_port = (
            stack.enter_context(_held_port()).getsockname()[1] for _ in range(3)
        )
        fsid = str(uuid.uuid4())
        values = {"mon_port": mon_port, "port": port, "room_bytes": room_bytes}
        tls = f"ssl_endpoint=127.0.0.1:{tls_port} ssl_certificate={home}/tls.pem"
        (home / "ceph.conf").write_text(CONFIG.format(home=home, fsid=fsid, tls=tls, **values))
        (home / "keyring").write_text(_new_keyring())
        _new_certificate(home)
        daemons = _start_cluster(stack, home, fsid, mon_port)
        daemons.append(_daemon(stack, home, "radosgw", "-n", "client.rgw"))
        _wait_until_it_answers(daemons, port)
        keys = {name: _new_user(home, name) for name in USERS}
        url, tls_url = f"http://127.0.0.1:{port}", f"https://127.0.0.1:{tls_port}"
        server = CephServer(url, keys, tls_endpoint_url=tls_url, home=home)
        _make_bucket(server)
        yield server


def _start_cluster(
    stack: ExitStack, home: Path, fsid: str, mon_port: int
) -> list[subprocess.Popen[bytes]]:
    conf, monmap = ("--conf", f"{home}/ceph.conf"), f"{home}/monmap"
    address = ("--addv", "a", f"[v2:127.0.0.1:{mon_port}]")
    _run("monmaptool", "--create", "--fsid", fsid, *address, monmap)
    _run("ceph-mon", *conf, "-i", "a", "--mkfs", "--monmap", monmap, "--keyring", f"{home}/keyring")
    monitor = _daemon(stack, home, "ceph-mon", "-i", "a")
    osd_id = str(uuid.uuid4())
    _run("ceph", *conf, "osd", "new", osd_id)
    _run("ceph-osd", *conf, "-i", "0", "--mkfs", "--osd-uuid", osd_id)
    return [monitor, _daemon(stack, home, "ceph-osd", "-i", "0")]


def _daemon(stack: ExitStack, home: Path, *command: str) -> subprocess.Popen[bytes]:
    """Start one in the foreground; it is killed with this process too, however that ends."""
    with (home / "log" / "output").open("ab") as log:
        line = ["setpriv", "--pdeathsig", "KILL", *command, "--conf", f"{home}/ceph.conf", "-f"]
        process = subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process


def _run(*command: str) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=READY_S)
    if done.returncode:
        msg = f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()[-2000:]}"
        raise _NotUpError(msg)
    return done.stdout


@contextmanager
def _held_port() -> Iterator[socket.socket]:
    """Keep a port from others: a server that sets SO_REUSEADDR, too, may listen at it, since
    this socket doesn't."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder


def _new_keyring() -> str:
    lines = []
    for name, capabilities in CAPABILITIES.items():
        # Ceph's own form of a secret: its kind, the time, and 16 bytes with their number.
        secret = struct.pack("<hIIh", 1, int(time.time()), 0, 16) + os.urandom(16)
        lines += [f"[{name}]", f"\tkey = {base64.b64encode(secret).decode()}"]
        whose = (capability.replace("'", '"').split(" ", 1) for capability in capabilities)
        lines += [f"\tcaps {service} = {caps}" for service, caps in whose]
    return "\n".join(lines) + "\n"


def _new_certificate(home: Path) -> None:
    files = ("-keyout", f"{home}/tls.key", "-out", f"{home}/tls.crt")
    names = ("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost")
    _run("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *names, *files)
    (home / "tls.pem").write_text((home / "tls.crt").read_text() + (home / "tls.key").read_text())


def _wait_until_it_answers(daemons: list[subprocess.Popen[bytes]], port: int) -> None:
    def ended() -> list[Any]:
        return [process.args for process in daemons if process.poll() is not None]

    becomes_true(lambda: ended() or _answers(daemons[-1].pid, port))
    if ended() or not _answers(daemons[-1].pid, port):
        msg = f"the gateway does not answer; ended by themselves: {ended()}"
        raise _NotUpError(msg)


def _answers(pid: int, port: int) -> bool:
    """Tell whether our own gateway answers, not somebody else's server at that port."""
    try:
        ports = {
            found.laddr.port
            for found in psutil.Process(pid).net_connections("tcp")
            if found.status == psutil.CONN_LISTEN
        }
        if port not in ports:
            return False
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5) as response:
            return bool(response.status == 200)
    except urllib.error.HTTPError as error:
        error.close()
        return False
    except (OSError, psutil.Error):
        return False


def _new_user(home: Path, name: str) -> tuple[str, str]:
    command = ("radosgw-admin", "--conf", f"{home}/ceph.conf", "-n", "client.rgw", "user", "create")
    made: Any = json.loads(_run(*command, f"--uid={name}", f"--display-name={name}"))
    return made["keys"][0]["access_key"], made["keys"][0]["secret_key"]


def _make_bucket(server: CephServer) -> None:
    client = client_of(server.storage(""))
    client.create_bucket(Bucket=server.bucket)
    arn = f"arn:aws:s3:::{server.bucket}"
    statement = {
        "Effect": "Allow",
        "Principal": {"AWS": ["arn:aws:iam:::user/reader"]},
        "Action": ["s3:GetObject", "s3:ListBucket"],
        "Resource": [arn, f"{arn}/*"],
    }
    client.put_bucket_policy(
        Bucket=server.bucket, Policy=json.dumps({"Version": "2012-10-17", "Statement": [statement]})
    )


def _logs(home: Path) -> str:
    return "\n".join(
        f"{path.name}: {path.read_text(errors='replace')[-1500:]}"
        for path in sorted(home.glob("0/log/*"))
    )
