"""A killed flow leaves no temporary Prefect server."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.gangs import all_gone
from tests.support.waiting import wait_until

FLOW = """
from uuid import UUID
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.runtime import flow_run
from prefect.server.api.server import SubprocessASGIServer
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect_torch_ddp.tasks.watch.flow_watch import closed_if_killed

@flow
def run():
    url = str(get_client(sync_client=True).api_url)
    with temporary_settings({PREFECT_API_URL: url}), closed_if_killed(UUID(flow_run.id), 0.0):
        (server,) = SubprocessASGIServer._instances.values()
        print(server.server_process.pid, flush=True)
        input()

run()
"""


@pytest.mark.long
def test_a_killed_flow_leaves_no_temporary_server(tmp_path: Path) -> None:
    """The watch that closes the run also ends the server that the flow had started."""
    own = ("PREFECT_API_URL", "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE")
    environment = {name: value for name, value in os.environ.items() if name not in own}
    environment |= {"PREFECT_HOME": str(tmp_path), "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "true"}
    environment["PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"] = "120"
    command, pipe = [sys.executable, "-c", FLOW], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as process:
        assert process.stdout is not None
        server = psutil.Process(int(process.stdout.readline()))
        process.kill()
    wait_until(lambda: all_gone([server]))
