"""What `make train` runs: the digits workload, on a Prefect server that is started if none is configured."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from urllib.parse import urlsplit

LOCAL_API = "http://127.0.0.1:4200/api"
READY_S = 90


def main() -> None:
    """Train and say where to look."""
    api = find_or_start_server()
    os.environ["PREFECT_API_URL"] = api  # before prefect is imported: it reads its settings then

    from prefect_torch_ddp import TrainParams, train_flow  # noqa: PLC0415

    report = train_flow(TrainParams(workload="flows.digits"))
    accuracy = report.evaluation.accuracy or 0.0
    print(f"""
Trained on {report.training.world_size} ranks, evaluated on {report.evaluation.num_samples} images that training never saw: \
{accuracy:.1%} right.

See the run, its curves and tables:
    {report.flow_run_url}

Load the model with plain torch:
    import torch; from flows.digits import DigitNet
    net = DigitNet()
    net.load_state_dict(torch.load("{report.model_uri}", weights_only=True))

Stop the Prefect server with: make stop""")


def find_or_start_server() -> str:
    """Return the API of the configured Prefect server, else of a local one, started in the background if need be."""
    configured = configured_api()
    if configured:
        if not is_prefect(configured):
            sys.exit(f"PREFECT_API_URL is {configured}, but no Prefect server answers there: start it, or unset PREFECT_API_URL")
        return configured
    if is_prefect(LOCAL_API):
        return LOCAL_API
    address = urlsplit(LOCAL_API)
    with socket.socket() as probe:
        if probe.connect_ex((address.hostname, address.port)) == 0:
            sys.exit(f"port {address.port} is taken by something that is no Prefect server: stop it, or set PREFECT_API_URL")
    print("Starting a local Prefect server ...", flush=True)
    command = [sys.executable, "-m", "prefect", "server", "start", "--background", "--host", address.hostname or ""]
    if subprocess.run(command, check=False).returncode != 0:  # noqa: S603 - Prefect's own command, by this Python
        sys.exit("the Prefect server did not start; see the lines above")
    deadline = time.monotonic() + READY_S  # the command above returns before the server answers
    while not is_prefect(LOCAL_API):
        if time.monotonic() > deadline:
            sys.exit(f"the Prefect server did not answer at {LOCAL_API} within {READY_S} s; try: prefect server start")
        time.sleep(0.2)
    return LOCAL_API


def configured_api() -> str | None:
    """Return what the environment or the Prefect profile names, without importing prefect into this process."""
    command = [sys.executable, "-c", "import json, prefect.settings as s; print(json.dumps(s.PREFECT_API_URL.value()))"]
    url: str | None = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)  # noqa: S603
    return url


def is_prefect(api: str) -> bool:
    """Tell whether a Prefect server answers."""
    try:
        with urllib.request.urlopen(f"{api}/health", timeout=5) as answer:  # noqa: S310 - http, from LOCAL_API or the settings
            return bool(json.load(answer) is True)
    except (OSError, ValueError, urllib.error.URLError):
        return False


if __name__ == "__main__":
    main()
