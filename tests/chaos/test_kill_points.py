"""A training ends as if it had not been killed, wherever the kill strikes.

It has the same bits in everything tracked, each sample once an epoch and every record, and no
remains of what was interrupted. The kill points are drawn from a seed. A failure shows it in
the test's name; `make chaos SEED=<seed> ARGS="-k <name>"` runs that point again.
"""

from collections.abc import Callable
from operator import attrgetter

import pytest

from tests.support.kill_points import POINTS, KillPoint, sample

ON_A_DIRECTORY = [point for point in POINTS if point.backend == "directory"]
ON_S3 = [point for point in POINTS if point.backend == "s3"]
KINDS = "mid-save-after-on-1 mid-commit-after retention-2 restart-restores three-restarts "
KINDS += "sizes-4-2-1-4 wire-object-on-0-within wire-manifest-after wire-upload-part-after "
KINDS += "wire-upload-ends-after"
ON_CEPH = sample(KINDS, ON_S3)
"""Of each kind one, on a store that people run: it is durable, and answers some requests in
other ways."""


def test_there_are_as_many_as_promised() -> None:
    """Both storages have at least fifty kill points with different names."""
    assert len(POINTS) >= 50
    assert min(len(ON_A_DIRECTORY), len(ON_S3)) >= 25
    assert len({point.name for point in POINTS}) == len(POINTS)


@pytest.mark.parametrize("point", ON_A_DIRECTORY, ids=attrgetter("name"))
def test_on_a_directory(strike_at: Callable[[KillPoint], None], point: KillPoint) -> None:
    """Kills also strike within a system call, and while a file is half written."""
    strike_at(point)


@pytest.mark.usefixtures("open_s3_server")
@pytest.mark.parametrize("point", ON_S3, ids=attrgetter("name"))
def test_on_s3(strike_at: Callable[[KillPoint], None], point: KillPoint) -> None:
    """Kills also strike within a request, within an upload by parts, and before an answer."""
    strike_at(point)


@pytest.mark.usefixtures("ceph_server")
@pytest.mark.parametrize("point", ON_CEPH, ids=attrgetter("name"))
def test_on_ceph(strike_at: Callable[[KillPoint], None], point: KillPoint) -> None:
    """The same kills strike on a Ceph RADOS Gateway."""
    strike_at(point)
