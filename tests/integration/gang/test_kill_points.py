"""A sample of the kill points of tests/chaos: in an epoch, a save, a commit and a clean-up, on
a directory and on S3."""

import pytest

from tests.integration.s3_server import open_s3_server  # noqa: F401 - a fixture
from tests.support import kill_points
from tests.support.kill_points import KillPoint, ids
from tests.support.kill_strike import StrikeAt, strike_at  # noqa: F401 - a fixture

POINTS = kill_points.every_kill_point(kill_points.seed_from_environment())
ON_A_DIRECTORY = kill_points.sample(
    POINTS, ("mid-save-torn-on-1", "mid-commit-within", "restart-sweeps-after", "sizes-4-2-1-4")
)
ON_S3 = kill_points.sample(POINTS, ("wire-manifest-after", "wire-upload-part-within"))

pytestmark = pytest.mark.timeout(180)


@pytest.mark.parametrize("point", ON_A_DIRECTORY, ids=ids(ON_A_DIRECTORY))
def test_on_a_directory(strike_at: StrikeAt, point: KillPoint) -> None:
    """C4 and B6: it ends as if it had not been killed."""
    strike_at(point)


@pytest.mark.usefixtures("open_s3_server")
@pytest.mark.parametrize("point", ON_S3, ids=ids(ON_S3))
def test_on_s3(strike_at: StrikeAt, point: KillPoint) -> None:
    """C4 and B6: also in the midst of an upload in parts, and where the commit is done and its
    answer never heard."""
    strike_at(point)
