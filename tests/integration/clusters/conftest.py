"""The batch systems that these tests run on."""

from collections.abc import Iterator

import pytest

from tests.integration.clusters.sites import Site, running_pbs
from tests.integration.clusters.slurm import running_slurm, skip_without_slurm


@pytest.fixture(scope="session", params=["slurm", pytest.param("pbs", marks=pytest.mark.more)])
def batch_system(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    """Run Slurm's own daemons, then put stand-ins for PBS's commands in place."""
    if request.param == "slurm":
        skip_without_slurm()
    running = {"slurm": running_slurm, "pbs": running_pbs}[request.param]
    with running(tmp_path_factory.mktemp(request.param)) as found:
        yield found


@pytest.fixture
def site(batch_system: Site, monkeypatch: pytest.MonkeyPatch) -> Site:
    """Make the batch system the one whose commands this process finds."""
    for name, value in batch_system.environment.items():
        monkeypatch.setenv(name, value)
    return batch_system
