"""Samples of tests/chaos: kill points, seeded faults, and no remains."""

from collections.abc import Callable
from operator import attrgetter
from pathlib import Path

import pytest
from distributed import Client

from tests.support import seeded_faults
from tests.support.kill_points import KillPoint, sample
from tests.support.many_gangs import MIX, assert_nothing_is_left
from tests.support.struck import Fault

pytestmark = pytest.mark.extended

KINDS = "mid-save-torn-on-1 mid-commit-within restart-sweeps-after sizes-4-2-1-4 "
KINDS += "own-loop-mid-save own-loop-twice"
OVER_THE_WIRE = "wire-manifest-after wire-upload-part-within"


@pytest.mark.parametrize("point", sample(KINDS), ids=attrgetter("name"))
def test_killed_on_a_directory(strike_at: Callable[[KillPoint], None], point: KillPoint) -> None:
    """A training killed in an epoch, a save, a commit or a clean-up ends as if it weren't."""
    strike_at(point)


@pytest.mark.usefixtures("open_s3_server")
@pytest.mark.parametrize("point", sample(OVER_THE_WIRE), ids=attrgetter("name"))
def test_killed_on_s3(strike_at: Callable[[KillPoint], None], point: KillPoint) -> None:
    """A training may also be killed in an upload by parts, or before it hears a commit's answer."""
    strike_at(point)


@pytest.mark.parametrize("fault", seeded_faults.sample(), ids=attrgetter("name"))
def test_the_root_cause_is_named(dask_client: Client, tmp_path: Path, fault: Fault) -> None:
    """Rank, kind, cause, signal and exit code are right, and no rank is left."""
    seeded_faults.strike(dask_client, fault, tmp_path)


@pytest.mark.long
def test_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However gangs end, no process, port, file descriptor, thread or temporary file remains."""
    assert_nothing_is_left(tmp_path, monkeypatch, len(MIX))
