"""Trainers of others on a GPU: killed in mid-epoch, each ends with the undisturbed bits."""

from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
from distributed import Client

from prefect_torch_ddp import RankContext, RankFailedError, run_gang
from tests.support.gangs import RUN_WITH_CONTEXT
from tests.support.ranks import config_for
from tests.workloads import trainers

pytestmark = pytest.mark.timeout(400)


def on_cuda(ctx: RankContext, name: str, folder: str, die_at: int | None) -> str:
    """Run a training of `trainers` on the GPU; fail if it took no memory there."""
    import torch

    digest: str = getattr(trainers, name)(ctx, folder, die_at, cuda=True)
    assert torch.cuda.max_memory_allocated() > 0
    return digest


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("lightning", "pytorch_lightning"),
        ("transformers", "transformers"),
        ("accelerate", "accelerate"),
    ],
)
def test_a_killed_trainer_ends_with_the_undisturbed_bits_on_cuda(
    gpu_client: Client, tmp_path: Path, name: str, package: str
) -> None:
    """One rank on a GPU, with dropout there."""
    if find_spec(package) is None:  # imported in the ranks alone: Lightning sets variables
        pytest.skip(f"{package} is not installed")

    def train(folder: Path, die_at: int | None = None) -> list[str]:
        folder.mkdir(exist_ok=True)
        fn = partial(on_cuda, name=name, folder=str(folder), die_at=die_at)
        return run_gang(
            gpu_client, RUN_WITH_CONTEXT, args=(config_for(folder, 2), fn, ()), world_size=1
        )

    undisturbed = train(tmp_path / "straight")
    assert undisturbed[0].startswith("30 ")
    with pytest.raises(RankFailedError, match=r"rank 0 .* was killed by SIGKILL"):
        train(tmp_path / "killed", 17)
    assert train(tmp_path / "killed") == undisturbed
