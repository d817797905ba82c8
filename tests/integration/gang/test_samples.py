"""Samples of what tests/chaos does at length: kill points, seeded faults, and nothing left."""

from collections.abc import Callable
from pathlib import Path

import pytest
from distributed import Client

from tests.support import kill_points, seeded_faults
from tests.support.kill_points import KillPoint
from tests.support.many_gangs import MIX, assert_nothing_is_left
from tests.support.struck import Fault

pytestmark = pytest.mark.extended

POINTS = kill_points.every_kill_point(kill_points.seed_from_environment())
KINDS = "mid-save-torn-on-1 mid-commit-within restart-sweeps-after sizes-4-2-1-4 "
KINDS += "own-loop-in-a-round own-loop-mid-save own-loop-within-the-commit own-loop-twice"
ON_A_DIRECTORY = kill_points.sample(POINTS, KINDS.split())
OVER_THE_WIRE = "wire-manifest-after", "wire-upload-part-within", "own-loop-unheard-commit"
ON_S3 = kill_points.sample(POINTS, OVER_THE_WIRE)
SEED = seeded_faults.seed_from_environment()
FAULTS = seeded_faults.sample(seeded_faults.every_fault(SEED), 12, SEED)


@pytest.mark.parametrize("point", ON_A_DIRECTORY, ids=kill_points.ids(ON_A_DIRECTORY))
def test_killed_on_a_directory(strike_at: Callable[[KillPoint], None], point: KillPoint) -> None:
    """Killed in an epoch, a save, a commit or a clean-up, it ends as if it were not."""
    strike_at(point)


@pytest.mark.usefixtures("open_s3_server")
@pytest.mark.parametrize("point", ON_S3, ids=kill_points.ids(ON_S3))
def test_killed_on_s3(strike_at: Callable[[KillPoint], None], point: KillPoint) -> None:
    """Also within an upload in parts, and where the commit's answer is never heard."""
    strike_at(point)


@pytest.mark.parametrize("fault", FAULTS, ids=seeded_faults.ids(FAULTS))
def test_the_root_cause_is_named(dask_client: Client, tmp_path: Path, fault: Fault) -> None:
    """Rank, kind, cause, signal and exit code are right, and no rank is left."""
    seeded_faults.strike(dask_client, fault, tmp_path)


def test_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However gangs end, no process, port, file descriptor, thread or temporary file is left."""
    assert_nothing_is_left(tmp_path, monkeypatch, len(MIX))
