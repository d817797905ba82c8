"""A8: the device of a rank is a pure rule."""

import pytest

from prefect_torch_ddp.rank.process_group import device_index


@pytest.mark.parametrize(
    ("local_rank", "slot", "num_devices", "rotated", "expected"),
    [
        (3, 0, 4, True, 0),  # dask-cuda: a worker per GPU, each sees its own first
        (3, 1, 4, True, 1),  # two ranks on such a worker
        (3, 0, 4, False, 3),  # plain workers that all see all GPUs
        (3, 3, 4, False, 3),  # one worker, a rank per GPU
        (5, 5, 4, False, 1),  # more ranks than GPUs share them
        (2, 0, 1, False, 0),  # a scheduler that shows each worker its one GPU as number 0
    ],
)
def test_device_index(local_rank: int, slot: int, num_devices: int, rotated: bool, expected: int) -> None:  # noqa: FBT001
    """The rule for each way of sharing GPUs out."""
    assert device_index(local_rank, slot, num_devices, rotated=rotated) == expected
