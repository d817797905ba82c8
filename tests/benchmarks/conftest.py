"""What benchmarks share."""

import signal
from collections.abc import Iterator

import pytest
from distributed import Client

from prefect_torch_ddp import run_gang
from prefect_torch_ddp.tasks.clusters.local_cluster import local_cluster
from tests.workloads import plain


@pytest.fixture(scope="session", autouse=True)
def _ends_what_it_started() -> Iterator[None]:
    """End by SIGTERM as by Ctrl-C, or trainers in sessions of their own would be left."""

    def leave(number: int, _frame: object) -> None:
        pytest.exit("ended by SIGTERM", returncode=128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="module")
def on_cpus() -> Iterator[None]:
    """Hide the machine's GPUs: what is compared with has its tensors on the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        yield


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    """Connect to a cluster as train_flow makes it, two workers, that ran a gang before."""
    with local_cluster(n_workers=2) as cluster, Client(cluster) as client:
        run_gang(client, plain.sum_of_ones, world_size=2)
        yield client
