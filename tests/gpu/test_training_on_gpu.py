"""The pipeline on CUDA: the digits are learnt there, and a resumed training gives the same
bits."""

from pathlib import Path
from typing import Any

import pytest

from prefect_torch_ddp import CheckpointParams, TrainParams, train_flow

pytestmark = [pytest.mark.timeout(400), pytest.mark.usefixtures("prefect_api")]


def test_digits_are_learnt_on_cuda(tmp_path: Path, num_gpus: int) -> None:
    """Two ranks, on a GPU each or on one together: training and evaluation run there, and at
    least 95 % are right."""
    params = TrainParams(workload="tests.gpu.on_gpu:Digits", storage=str(tmp_path), seed=7)
    report = train_flow(params)
    assert report.evaluation.accuracy is not None
    assert report.evaluation.accuracy >= 0.95


@pytest.mark.parametrize(
    ("way", "world_size"),
    [("plain", 1), ("plain", 2), ("scaled", 2), ("compiled", 2)],
)
def test_a_resume_on_cuda_is_bit_identical(tmp_path: Path, way: str, world_size: int) -> None:
    """Killed at step 13 and resumed, with dropout on the device: the weights of the
    undisturbed training, to the bit. Also in float16 with a GradScaler, and compiled."""
    plain = TrainParams(
        workload="tests.gpu.on_gpu",
        storage=str(tmp_path),
        world_size=world_size,
        seed=3,
        checkpoint=CheckpointParams(every_s=None, every_steps=5),
        options={"way": way},
    )
    killed = plain.model_copy(
        update={"options": {"way": way, "die_at_step": 13}, "retries": 1, "retry_delay_s": 0.1}
    )
    resumed = train_flow(killed)
    assert resumed.training.attempt == 2
    assert resumed.training.resumed_from_step in (5, 10), (
        "the commit of step 10 may have been under way"
    )
    undisturbed = train_flow(plain)
    assert Path(undisturbed.model_uri).read_bytes() == Path(resumed.model_uri).read_bytes()


def test_elastic_bits_on_cuda(tmp_path: Path, num_gpus: int) -> None:
    """One rank by NCCL, two and four that share devices by gloo, and two of which one is killed:
    the same weights, to the bit."""
    common: dict[str, Any] = {
        "workload": "tests.gpu.on_gpu:Elastic",
        "storage": str(tmp_path),
        "seed": 3,
        "determinism": "elastic",
        "virtual_ranks": 4,
        "checkpoint": {"every_s": None, "every_steps": 5},
    }
    killed: dict[str, Any] = {"options": {"die_at_step": 13}, "retries": 1, "retry_delay_s": 0.1}
    reports = [
        # On one worker: a client that is open in this process may have fewer.
        train_flow(TrainParams(**common, world_size=size, ranks_per_worker=size, **others))
        for size, others in ((1, {}), (2, {}), (4, {}), (2, killed))
    ]
    assert reports[-1].training.attempt == 2
    assert len({Path(report.model_uri).read_bytes() for report in reports}) == 1
