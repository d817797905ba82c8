"""A real MLflow server, in an environment of its own.

Its pin (pyarrow<26) doesn't allow what this package is tested with.
"""

import fcntl
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.ports import free_port
from tests.support.waiting import becomes_true

ROOT = Path(__file__).parents[2]
REQUIREMENTS = ["mlflow==3.17.2", "sqlalchemy<2.1", "fastapi<0.151"]
FOLDER = ROOT / "build" / "mlflow-3.17.2"
INSTALL_S, READY_S, STOP_S = 900.0, 300.0, 30.0


@dataclass(frozen=True)
class MlflowServer:
    """Where it is, and the Python that has MLflow beside this package."""

    url: str
    python: Path
    environment: dict[str, str] = field(repr=False)
    """For processes that talk to it."""

    def run(self, *given: str, status: int = 0) -> str:
        """Run this Python and return what it prints; on another status, what else it says."""
        command = [str(self.python), *given]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=INSTALL_S,
            check=False,
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stderr if status else done.stdout


@contextmanager
def mlflow_in(folder: Path) -> Iterator[MlflowServer]:
    """Run a server with its database in a folder."""
    python = mlflow_python()
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    store = f"sqlite:///{folder / 'mlflow.db'}"
    command = [str(python), "-m", "mlflow", "server", "--workers", "1", "--port", str(port)]
    command += ["--backend-store-uri", store, "--artifacts-destination", str(folder / "artifacts")]
    environment = {
        **os.environ,
        "MLFLOW_TRACKING_URI": url,
        "MLFLOW_DISABLE_TELEMETRY": "true",
        # Seven processes for what no test needs.
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    }
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(
            command, stdout=log, stderr=log, cwd=folder, env=environment, start_new_session=True
        )
        try:
            is_up = becomes_true(lambda: server.poll() is not None or answers(url), READY_S)
            if not is_up or server.poll() is not None:
                pytest.fail("MLflow did not start:\n" + (folder / "server.log").read_text()[-4000:])
            yield MlflowServer(url, python, environment)
        finally:
            with_children(server)


def with_children(server: "subprocess.Popen[bytes]") -> None:
    """Stop the server and the processes that it has."""
    with suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait(STOP_S)


def answers(url: str) -> bool:
    """Tell whether a server answers there."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def mlflow_python() -> Path:
    """Return the Python of the environment, which is made once for a checkout: it takes minutes."""
    python = FOLDER / "bin" / "python"
    FOLDER.parent.mkdir(exist_ok=True)
    with FOLDER.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = FOLDER / "installed"
        if not done.exists():
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(FOLDER)], check=True)
            install = ["-m", "pip", "install", "--quiet", *REQUIREMENTS]
            subprocess.run([str(python), *install], check=True, timeout=INSTALL_S)
            site = next((FOLDER / "lib").glob("python3*/site-packages"))
            # After its own packages come those that are installed here.
            ours = [each for each in sys.path if each.endswith("site-packages")]
            (site / "zz_ours.pth").write_text("\n".join([str(ROOT), *ours, ""]))
            done.touch()
    return python
