"""Nothing lost, nothing twice: wherever a training is killed, it ends as if it had not been.

The same bits in everything tracked, each sample once an epoch, every record, and nothing left of what was broken off. The kill
points are drawn from a seed. A failure shows it in the test's name; `PTD_KILL_SEED=<seed> make chaos ARGS="-k <name>"` runs that
point again.
"""

from pathlib import Path

import pytest
from distributed import Client

from tests import kill_points
from tests.integration.s3_server import S3Server, open_s3_server  # noqa: F401 - a fixture
from tests.kill_points import KillPoint, ids
from tests.kill_strike import strike

POINTS = kill_points.every_kill_point(kill_points.seed_from_environment())
ON_A_DIRECTORY = [point for point in POINTS if point.backend == "directory"]
ON_S3 = [point for point in POINTS if point.backend == "s3"]

pytestmark = pytest.mark.timeout(180)


def test_there_are_as_many_as_promised() -> None:
    """At least fifty, on both storages, and no two of one name."""
    assert len(POINTS) >= 50
    assert min(len(ON_A_DIRECTORY), len(ON_S3)) >= 25
    assert len(set(ids(POINTS))) == len(POINTS)


@pytest.mark.parametrize("point", ON_A_DIRECTORY, ids=ids(ON_A_DIRECTORY))
def test_on_a_directory(dask_client: Client, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, point: KillPoint) -> None:
    """Real files; also within a system call, and with a file half written."""
    strike(dask_client, point, None, tmp_path, lambda: tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.parametrize("point", ON_S3, ids=ids(ON_S3))
def test_on_s3(
    dask_client: Client,
    open_s3_server: S3Server,  # noqa: F811
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    point: KillPoint,
) -> None:
    """A real server; also in the midst of a request and of an upload in parts, and before the answer is heard."""
    strike(dask_client, point, open_s3_server, tmp_path, lambda: tmp_path_factory.mktemp("undisturbed"))
