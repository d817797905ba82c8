"""Photos, the servers that they are read from, and the proxy in front of these that lets each
request wait."""

import io
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.storage.protocol import ListedObject, Readable
from tests.support.ceph_server import run_ceph
from tests.support.ports import free_port

HERE = Path(__file__).parent
SECRETS_OF_NOBODY = ("key", "secret")
"""For a server that doesn't look at signatures."""


@dataclass(frozen=True)
class Server:
    """The server of the images, without the proxy."""

    name: str
    port: int
    key: str
    secret: str
    listed: Callable[[str], Readable]
    """Gives what lists a folder of its bucket, as this server reports its objects."""


class Listed(Readable):
    """Tells the index what a server that can't list would tell: names, sizes and ETags of the
    local files."""

    uri = ""

    def __init__(self, folder: Path, uri: str) -> None:
        self.folder, self.uri = folder, uri

    def read_many(self, _parts: Any) -> Any:
        raise NotImplementedError

    def list_objects(self, prefix: str) -> Iterator[ListedObject]:
        for item in DirectoryStorage(self.folder).list_objects(prefix):
            yield ListedObject(item.key, item.num_bytes, nginx_etag(self.folder / item.key))


class Served(Listed):
    """Lists like `Listed`, and reads from the server."""

    def __init__(self, folder: Path, storage: Readable) -> None:
        super().__init__(folder, storage.uri)
        self.storage = storage

    def read_many(self, parts: Any) -> Any:
        return self.storage.read_many(parts)


def nginx_etag(path: Path) -> str:
    """Return the ETag that nginx gives a file."""
    found = path.stat()
    return f"{int(found.st_mtime):x}-{found.st_size:x}"


@contextmanager
def run_nginx(bucket: Path, home: Path) -> Iterator[Server]:
    """Serve a folder as files; it looks at no signature, and lists nothing."""
    if not shutil.which("nginx"):
        pytest.skip("nginx is not installed: apt-get install nginx, or make system-packages")
    port = free_port()
    (home / "nginx.conf").write_text(
        f"daemon off; worker_processes 1; pid {home}/pid; "
        f"error_log {home}/error.log; user {os.environ.get('USER', 'root')};\n"
        "events { worker_connections 1024; }\n"
        "http { access_log off; sendfile on; tcp_nopush off; keepalive_requests 1000000;\n"
        f"client_body_temp_path {home}/body;\n"
        f"proxy_temp_path {home}/proxy; fastcgi_temp_path {home}/f; uwsgi_temp_path "
        f"{home}/u; scgi_temp_path {home}/s;\n"
        f"server {{ listen 127.0.0.1:{port}; root {bucket.parent}; }} }}\n"
    )
    process = subprocess.Popen(
        [shutil.which("nginx") or "nginx", "-e", f"{home}/error.log", "-c", f"{home}/nginx.conf"]
    )
    try:
        deadline = time.monotonic() + 30
        while not _answers(port) and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.05)

        def listed(folder: str) -> Readable:
            return Listed(bucket / folder, f"s3://{bucket.name}/{folder}")

        yield Server("nginx", port, *SECRETS_OF_NOBODY, listed)
    finally:
        process.terminate()
        process.wait()


def _answers(port: int) -> bool:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


@contextmanager
def run_filled_ceph(bucket: Path, home: Path) -> Iterator[Server]:
    """Put all files of a folder into Ceph."""
    with run_ceph(home) as running:
        key, secret = running.keys["owner"]
        storage = running.storage("")
        paths = sorted(path for path in bucket.rglob("*") if path.is_file())
        with ThreadPoolExecutor(4) as pool:
            list(
                pool.map(
                    lambda path: storage.write(str(path.relative_to(bucket)), path.read_bytes()),
                    paths,
                )
            )
        yield Server(
            "Ceph", int(running.endpoint_url.rpartition(":")[2]), key, secret, running.storage
        )


@contextmanager
def proxy(port: int, delay_s: float) -> Iterator[str]:
    """Put a proxy in front of a server; give its URL."""
    command = [sys.executable, str(HERE / "delay_proxy.py"), "127.0.0.1", str(port), str(delay_s)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        process.kill()


def photo(generator: np.random.Generator) -> bytes:
    """Draw one of 500 times 375, as JPEG of some 35 kB."""
    coarse = generator.integers(0, 256, (25, 33, 3), dtype=np.uint8)
    image = np.asarray(
        Image.fromarray(coarse).resize((500, 375), Image.Resampling.BICUBIC), dtype=np.int16
    )
    grainy = (image + generator.integers(-12, 13, image.shape)).clip(0, 255).astype(np.uint8)
    Image.fromarray(grainy).save(file := io.BytesIO(), "JPEG", quality=72)
    return file.getvalue()


def write_photos(folder: Path, num: int) -> None:
    """Write some, in a folder for each of ten classes."""
    generator = np.random.default_rng(0)
    for number in range(num):
        path = folder / f"class{number % 10}" / f"{number:06}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(photo(generator))
