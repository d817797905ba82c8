"""A real browser: headless Chromium, by its own DevTools protocol."""

import base64
import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import pytest
from websockets.sync.client import connect

from tests.support.waiting import wait_until

WIDTH, HEIGHT = 1280, 1600
LOAD_S = 60
Scheme = Literal["light", "dark"]


class Page:
    """The one page of a browser."""

    def __init__(self, address: str) -> None:
        self._socket = connect(address, max_size=None, open_timeout=LOAD_S)
        self._number = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self._socket.close()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": params}))
        while True:
            said = json.loads(self._socket.recv(timeout=LOAD_S))
            if said.get("id") == self._number:
                assert "error" not in said, said
                result: dict[str, Any] = said["result"]
                return result

    def evaluate(self, expression: str) -> Any:
        """Return a JavaScript expression's value in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def open(self, url: str, scheme: Scheme, width: int = WIDTH, height: int = HEIGHT) -> None:
        """Load a URL as somebody does whose system is light or dark."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])
        size = {"width": width, "height": height, "deviceScaleFactor": 1}
        size["mobile"] = width < HEIGHT // 2
        self.call("Emulation.setDeviceMetricsOverride", **size)
        # The older UI asks its own memory instead.
        self.call("Page.enable")
        remember = f"localStorage.setItem('color-scheme', JSON.stringify('{scheme}'))"
        self.call("Page.addScriptToEvaluateOnNewDocument", source=remember)
        self.call("Page.navigate", url=url)

    def wait_for(self, condition: str) -> None:
        wait_until(lambda: bool(self.evaluate(condition)), timeout_s=LOAD_S, what=condition)

    def screenshot(self, path: Path, *, is_whole: bool = False) -> None:
        """Keep what is seen, or the whole page, as a PNG file."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=is_whole)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """Run a browser with its profile in a folder; skip the test if no browser is installed."""
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("needs Debian's chromium: apt-get install chromium")
    options = "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run"
    command = [program, *options.split(), f"--user-data-dir={folder}", "--remote-debugging-port=0"]
    process = subprocess.Popen(
        [*command, "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        port_file = folder / "DevToolsActivePort"
        wait_until(lambda: port_file.exists() and port_file.read_text().count("\n"), timeout_s=60)
        port = int(port_file.read_text().split()[0])
        with Page(_address_of_page(port)) as page:
            yield page
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _address_of_page(port: int) -> str:
    from urllib.request import urlopen

    def pages() -> list[dict[str, Any]]:
        with urlopen(f"http://127.0.0.1:{port}/json/list", timeout=10) as answer:
            return [each for each in json.load(answer) if each["type"] == "page"]

    wait_until(pages)
    return str(pages()[0]["webSocketDebuggerUrl"])
