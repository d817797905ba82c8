"""Hangs on CUDA devices: a missing rank is found, and a device at work is no hang."""

import time
from pathlib import Path

import pytest
from distributed import Client

from prefect_torch_ddp import GangHungError, run_gang
from tests.gpu import on_gpu
from tests.support.gangs import RUN_WITH_CONTEXT
from tests.workloads import hanging

pytestmark = pytest.mark.timeout(180)


def test_a_missing_rank_is_named(gpu_client: Client, num_gpus: int, tmp_path: Path) -> None:
    """Rank 1 sleeps, and the others wait for it in a collective with a CUDA tensor."""
    with pytest.raises(GangHungError, match=r"rank 1 on .* did not arrive") as caught:
        run_gang(
            gpu_client,
            RUN_WITH_CONTEXT,
            args=(hanging.config_in(tmp_path), on_gpu.never_come, ()),
            world_size=2,
            ranks_per_worker=2,
            progress_timeout_s=3.0,
        )
    assert caught.value.ranks == (1,)


def test_a_kernel_longer_than_the_limit_is_no_hang(gpu_client: Client, tmp_path: Path) -> None:
    """The device works three times as long as the limit, twice, and the rank waits for it."""
    began = time.monotonic()
    steps = run_gang(
        gpu_client,
        RUN_WITH_CONTEXT,
        args=(hanging.config_in(tmp_path), on_gpu.kernels_of, (6.0,)),
        world_size=1,
        progress_timeout_s=2.0,
    )
    assert steps == [2]
    assert time.monotonic() - began > 8, "the device was to work for longer than the limit"
