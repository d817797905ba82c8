"""A sample of the kill points of tests/chaos: in an epoch, a save, a commit and a clean-up, on a directory and on S3."""

from pathlib import Path

import pytest
from distributed import Client

from tests import kill_points
from tests.integration.s3_server import S3Server, open_s3_server  # noqa: F401 - a fixture
from tests.kill_points import KillPoint, ids
from tests.kill_strike import strike

POINTS = kill_points.every_kill_point(kill_points.seed_from_environment())
ON_A_DIRECTORY = kill_points.sample(POINTS, ("mid-save-torn-on-1", "mid-commit-within", "restart-sweeps-after", "sizes-4-2-1-4"))
ON_S3 = kill_points.sample(POINTS, ("wire-manifest-after", "wire-upload-part-within"))

pytestmark = pytest.mark.timeout(180)


@pytest.mark.parametrize("point", ON_A_DIRECTORY, ids=ids(ON_A_DIRECTORY))
def test_on_a_directory(dask_client: Client, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, point: KillPoint) -> None:
    """C4 and B6: it ends as if it had not been killed."""
    strike(dask_client, point, None, tmp_path, lambda: tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.parametrize("point", ON_S3, ids=ids(ON_S3))
def test_on_s3(
    dask_client: Client,
    open_s3_server: S3Server,  # noqa: F811
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    point: KillPoint,
) -> None:
    """C4 and B6: also in the midst of an upload in parts, and where the commit is done and its answer never heard."""
    strike(dask_client, point, open_s3_server, tmp_path, lambda: tmp_path_factory.mktemp("undisturbed"))
