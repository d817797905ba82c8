"""What `make train` runs: the digits, on a Prefect server that is started if none is configured.

With `server` as its argument it only starts the server, and prints its address.
"""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

LOCAL_API = "http://127.0.0.1:4200/api"
READY_S = 90


def main() -> None:
    """Train and say where to look."""
    api = find_or_start_server()
    if sys.argv[1:] == ["server"]:
        print(api)
        return
    os.environ["PREFECT_API_URL"] = api  # before prefect is imported: it reads its settings then

    from prefect_torch_ddp import TrainParams, train_flow  # noqa: PLC0415

    report = train_flow(TrainParams(workload="prefect_torch_ddp.examples.digits"))
    accuracy = report.evaluation.accuracy or 0.0
    print(f"""
Trained on {report.training.world_size} ranks, evaluated on {report.evaluation.num_samples} images \
that training never saw: {accuracy:.1%} right.

See the run, its curves and tables:
    {report.flow_run_url}

Load the model with plain torch:
    from safetensors.torch import load_file; from prefect_torch_ddp.examples.digits import DigitNet
    net = DigitNet()
    net.load_state_dict(load_file("{report.model_uri}"))

Stop the Prefect server with: make stop""")


def find_or_start_server() -> str:
    """Return the API of the configured Prefect server, else of a local one, which it starts."""
    configured, home = prefect_settings()
    if configured:
        if not is_prefect(configured):
            sys.exit(
                f"PREFECT_API_URL is {configured}, but no Prefect server answers there: "
                "start it, or unset PREFECT_API_URL"
            )
        return configured
    if not is_prefect(LOCAL_API):
        start_server(Path(home))
    return LOCAL_API


def server_environment() -> dict[str, str]:
    """Return the environment for a Prefect server, with what it needs to survive a restart.

    A deployment's concurrency limit is a lease. By default the server keeps leases in memory: 225 s
    into a run the renewal gets `410 Gone` from a server that was restarted, and Prefect ends the
    flow run as Crashed.
    """
    leases = "prefect.server.concurrency.lease_storage.filesystem"
    return {"PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": leases, **os.environ}


def start_server(home: Path) -> None:
    """Start a Prefect server that outlives this process, until `make stop`.

    Not by `prefect server start --background`: that server's output goes to a pipe that nobody
    reads, and it dies at its first log line (prefect 3.8.8).
    """
    address = urlsplit(LOCAL_API)
    with socket.socket() as probe:
        if probe.connect_ex((address.hostname, address.port)) == 0:
            sys.exit(
                f"port {address.port} is taken by something that is no Prefect server: "
                "stop it, or set PREFECT_API_URL"
            )
    home.mkdir(parents=True, exist_ok=True)
    log = home / "server.log"
    where = f"--host {address.hostname} --port {address.port}"
    command = [sys.executable, "-m", *f"prefect server start {where}".split()]
    print(f"Starting a local Prefect server; its log is {log}", file=sys.stderr, flush=True)
    with log.open("ab") as out:
        server = subprocess.Popen(  # noqa: S603
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=server_environment(),
            start_new_session=True,
        )
    (home / "server.pid").write_text(
        str(server.pid), encoding="utf-8"
    )  # where `prefect server stop` looks
    deadline = time.monotonic() + READY_S
    while not is_prefect(LOCAL_API):
        if server.poll() is not None or time.monotonic() > deadline:
            server.kill()
            sys.exit(f"the Prefect server did not start within {READY_S} s; its log is {log}")
        time.sleep(0.2)


def prefect_settings() -> tuple[str | None, str]:
    """Return the configured API's URL and Prefect's home, without importing prefect here."""
    code = (
        "import json, prefect.settings as s;"
        "print(json.dumps([s.PREFECT_API_URL.value(), str(s.PREFECT_HOME.value())]))"
    )
    url, home = json.loads(subprocess.check_output([sys.executable, "-c", code], text=True))  # noqa: S603
    return url, home


def is_prefect(api: str) -> bool:
    """Tell whether a Prefect server answers."""
    try:
        # Http, from LOCAL_API or the settings.
        with urllib.request.urlopen(f"{api}/health", timeout=5) as answer:  # noqa: S310
            return json.load(answer) is True
    except (OSError, ValueError, urllib.error.URLError):
        return False


if __name__ == "__main__":
    main()
