"""What benchmarks share."""

from collections.abc import Iterator

import pytest
from distributed import Client

from prefect_torch_ddp import run_gang
from prefect_torch_ddp.tasks.clusters.local_cluster import local_cluster
from tests.workloads import plain


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
