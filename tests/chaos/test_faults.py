"""The caller learns the root cause, whatever strikes a rank and wherever its peers are.

The faults are drawn from a seed. A failure shows it in the test's name; `make chaos SEED=<seed>
ARGS="-k <name>"` runs that fault again.
"""

from operator import attrgetter
from pathlib import Path

import pytest
from distributed import Client

from tests.support import seeded_faults
from tests.support.struck import Fault


@pytest.mark.parametrize("fault", seeded_faults.FAULTS, ids=attrgetter("name"))
def test_the_root_cause_is_named(dask_client: Client, tmp_path: Path, fault: Fault) -> None:
    """Rank, kind, cause, signal and exit code are right, and no rank remains."""
    seeded_faults.strike(dask_client, fault, tmp_path)
