"""Without a configured Prefect server the Dask workers of a flow use its temporary one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.timeout(240), pytest.mark.long]

SCRIPT = """
import os
import psutil
from prefect import flow, get_client
from prefect.settings import PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS as LIMIT
from prefect_dask import DaskTaskRunner
from prefect_torch_ddp import RankContext, ddp_task
from tests.support.waiting import wait_until

@ddp_task(world_size=1)
def fit(ctx: RankContext, seed: int) -> int:
    return os.getpid()

@flow(task_runner=DaskTaskRunner(cluster_kwargs={"n_workers": 2, "threads_per_worker": 1}))
def both():
    first, *others = fit.map([1, 2]), fit.submit(3)
    ranks = {each.result() for each in [*first, *others]}
    with get_client(sync_client=True) as client:
        def states():
            return sorted(str(run.state_type.value) for run in client.read_task_runs())
        # They reach the server as events, some moments after the results.
        wait_until(lambda: not {"PENDING", "RUNNING"} & set(states()))
        found = states()
    commands = [" ".join(each.cmdline()) for each in psutil.Process().children(recursive=True)]
    servers = sum("prefect.server.api.server:create_app" in each for each in commands)
    return len(ranks), servers, found, LIMIT.value()

if __name__ == "__main__":
    print(both())
"""


def test_level_2_starts_one_server(tmp_path: Path) -> None:
    """A worker's own would have its task runs on record, and lock the database.

    It gets 300 s to start, which importing the package sets.
    """
    script = tmp_path / "two_tasks.py"
    script.write_text(SCRIPT, encoding="utf-8")
    of_tests = "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"
    own = ("PREFECT_API_URL", "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE", of_tests)
    environment = {name: value for name, value in os.environ.items() if name not in own}
    environment |= {"PREFECT_HOME": str(tmp_path), "HOME": str(tmp_path)}
    environment |= {"PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "true", "PYTHONPATH": str(Path.cwd())}
    done = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        timeout=200,
    )
    told = done.stdout.splitlines()[-1:]
    assert told == ["(3, 1, ['COMPLETED', 'COMPLETED', 'COMPLETED'], 300)"], (
        done.stdout + done.stderr
    )
