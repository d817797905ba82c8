"""A program with its own checkpoints ends with the undisturbed bits, whoever is killed, and when.

It is one that uses Transformers, Lightning or Accelerate, or commits its own files. The points are
drawn from a seed; `make chaos SEED=<seed> ARGS="-k <name>"` runs that point again.
"""

from operator import attrgetter
from pathlib import Path

import pytest

from tests.support import program_strikes
from tests.support.program_strikes import NUM_STEPS, POINTS, PROGRAMS, Point
from tests.support.separate_cluster import SeparateCluster

pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("prefect_api")]


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, str]:
    """Hold what each program returns when nothing happens."""
    return {}


def test_there_are_as_many_as_promised() -> None:
    """Each program is struck at twenty points with different names."""
    assert len({point.name for point in POINTS}) == 20 * len(PROGRAMS)


@pytest.mark.parametrize("point", POINTS, ids=attrgetter("name"))
def test_a_struck_program_ends_as_if_nothing_had_happened(
    others: SeparateCluster, undisturbed: dict[str, str], tmp_path: Path, point: Point
) -> None:
    """With the same weights to the last bit, after the last step."""
    if point.program not in undisturbed:
        (tmp_path / "calm").mkdir()
        undisturbed[point.program] = program_strikes.nightly(
            others.address, point.program, tmp_path / "calm", None
        )
    expected = undisturbed[point.program]
    assert expected.startswith(f"{NUM_STEPS} ")
    (tmp_path / "struck").mkdir()
    assert program_strikes.run(others.address, point, tmp_path / "struck") == expected
    assert list((tmp_path / "struck").glob("struck-*")), "nobody was struck"
