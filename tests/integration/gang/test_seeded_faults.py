"""A sample of the seeded faults of tests/chaos: every way to fail and every state of the
failing rank and of its peers."""

from pathlib import Path

import pytest
from distributed import Client

from tests.support import seeded_faults
from tests.workloads.struck import Fault

SEED = seeded_faults.seed_from_environment()
FAULTS = seeded_faults.sample(seeded_faults.every_fault(SEED), 24, SEED)

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("fault", FAULTS, ids=seeded_faults.ids(FAULTS))
def test_the_root_cause_is_named(dask_client: Client, tmp_path: Path, fault: Fault) -> None:
    """E4: rank, kind, cause, signal and exit code are right, no consequence is blamed, and no
    rank is left."""
    seeded_faults.strike(dask_client, fault, tmp_path)
