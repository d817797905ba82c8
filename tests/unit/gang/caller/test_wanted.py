"""How many stand-ins ask for how many workers."""

import pytest

from prefect_torch_ddp.gang.caller.wanted import num_stand_ins


@pytest.mark.parametrize(
    ("num_more", "num_workers", "num_threads", "num_tasks", "expected"),
    [
        pytest.param(2, 0, 0, 0, 2, id="no worker yet: one for each"),
        pytest.param(1, 1, 1, 1, 1, id="the task that calls the gang counts as well"),
        pytest.param(1, 1, 8, 1, 15, id="a worker of many threads"),
        pytest.param(1, 3, 8, 0, 10, id="workers of different sizes"),
        pytest.param(1, 2, 2, 9, 1, id="many tasks that wait elsewhere: at least one each"),
        pytest.param(0, 4, 4, 3, 1, id="those there are enough, and idle ones are kept"),
        pytest.param(-3, 4, 4, 3, 0, id="some are superfluous"),
    ],
)
def test_so_many_tasks_have_to_wait(
    num_more: int, num_workers: int, num_threads: int, num_tasks: int, expected: int
) -> None:
    """So many that Dask's own count ends at the workers there are and those that lack."""
    assert num_stand_ins(num_more, num_workers, num_threads, num_tasks) == expected
