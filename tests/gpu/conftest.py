"""What every test on a GPU relies on: that there is one, and a cluster whose workers see it."""

from collections.abc import Iterator

import pytest
from distributed import Client, LocalCluster


@pytest.fixture(autouse=True, scope="session")
def num_gpus() -> int:
    """Return how many CUDA devices torch sees; skip if it sees none."""
    import torch

    if not torch.cuda.is_available():
        pytest.skip(f"torch {torch.__version__} sees no CUDA device")
    return torch.cuda.device_count()


@pytest.fixture(scope="session")
def gpu_client(num_gpus: int) -> Iterator[Client]:
    """Run one worker more than there are GPUs; CUDA_VISIBLE_DEVICES is as it is."""
    with (
        LocalCluster(
            n_workers=num_gpus + 1, threads_per_worker=1, processes=True, dashboard_address=":0"
        ) as cluster,
        Client(cluster) as client,
    ):
        client.wait_for_workers(num_gpus + 1, timeout=120)
        yield client
