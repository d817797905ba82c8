"""What every test relies on: a private, quiet environment, and markers that nobody has to remember.

Fixtures are in tests/support: servers and clusters, and the police that looks for what leaks.
"""

import multiprocessing
import os
import signal
import tempfile
import time
import uuid
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ["tests.support.case_ids", "tests.support.leaks", "tests.support.servers"]
pytest.register_assert_rewrite("tests.support")

# Hypothesis fails an example that takes 200 ms, and data that is slow to draw: on a loaded machine
# either can be any example.
settings.register_profile("loaded", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("loaded")

FOLDERS = ("unit", "integration", "chaos", "gpu", "wheel")
NEEDS_PACKAGES = {"ceph_server", "batch_system"}
"""Fixtures whose servers come from Debian packages: `make integration` installs them."""

_home = Path(tempfile.mkdtemp(prefix="ptd-tests-"))

# Before any test module is collected: prefect and distributed read these when they are
# imported.
os.environ.update(
    {
        # Every descendant inherits it, also one that got away from our process tree.
        "PTD_TEST_SESSION": uuid.uuid4().hex,
        "PTD_TEST_HOME": str(_home),
        "PREFECT_HOME": str(_home / "prefect"),
        "PREFECT_LOGGING_LEVEL": "WARNING",
        # Else the line above would keep the runs' own INFO records from the server too, and
        # tests read them there.
        "PREFECT_LOGGING_LOGGERS_PREFECT_FLOW_RUNS_LEVEL": "INFO",
        "PREFECT_LOGGING_LOGGERS_PREFECT_TASK_RUNS_LEVEL": "INFO",
        "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_CLI_PROMPT": "false",
        # Of the server that Prefect embeds if none is configured: 20 s are too few where two
        # processes test on two cores.
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "300",
        "DO_NOT_TRACK": "1",
        "DASK_LOGGING__DISTRIBUTED": "warning",
        # As train_flow has it (CLUSTER_CONFIG): with Dask's defaults each process's cluster takes
        # 0.08 of two cores for nothing.
        "DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED": "false",
        "DASK_DISTRIBUTED__ADMIN__TICK__INTERVAL": "2s",
        "DASK_DISTRIBUTED__WORKER__MEMORY__MONITOR_INTERVAL": "2s",
        "DASK_DISTRIBUTED__ADMIN__SYSTEM_MONITOR__INTERVAL": "5s",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
)
# A plain LocalCluster's nanny sets these in this process and leaves them there, unless they are
# set.
for _name, _value in (
    ("MALLOC_TRIM_THRESHOLD_", "65536"),
    *((f"{lib}_NUM_THREADS", "1") for lib in ("OMP", "MKL", "OPENBLAS")),
):
    os.environ.setdefault(_name, _value)
# The developer's own server, account and launcher are none of a test's business.
for _name in (
    "PREFECT_API_URL",
    "PREFECT_API_KEY",
    "PREFECT_PROFILE",
    "AWS_PROFILE",
    "RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
):
    os.environ.pop(_name, None)

# A script that starts pytest with `&` has it ignore Ctrl-C, and so would all that tests start: a
# Prefect worker, which turns SIGTERM into SIGINT, would never end.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Whoever starts the fork server first decides what its children need not import, for all tests.
multiprocessing.set_forkserver_preload(
    ["torch", "torchvision", "prefect_torch_ddp.rank.stages", "tests.workloads.healthy"]
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test by its folder and by what it needs."""
    for item in items:
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        if folder in FOLDERS[1:]:
            item.add_marker(folder)
        if NEEDS_PACKAGES & set(getattr(item, "fixturenames", ())):
            item.add_marker("extended")
    # What takes longest comes first, so that no process waits for another's last test.
    items.sort(key=lambda item: -_limit_s(item) if item.get_closest_marker("long") else 0)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave out a long test for which CI, see .ci/run, has no time; the summary names it."""
    until_s = os.environ.get("PTD_LONG_UNTIL")
    if until_s and item.get_closest_marker("long") and time.time() > float(until_s):
        pytest.skip(f"CI has no time left for {item.nodeid}; `make long` runs it")


def _limit_s(item: pytest.Item) -> float:
    limit = item.get_closest_marker("timeout")
    return limit.args[0] if limit else 0
