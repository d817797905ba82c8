"""What counts as silence: time in which this process itself was stopped doesn't."""

import dask.config
import pytest

from prefect_torch_ddp.gang.liveness import TURN_S, Liveness
from prefect_torch_ddp.tasks.watch.task_watch import TAKE_IN_S, TaskLiveness, pause_after


class Clock:
    """A clock that the test sets."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_silence_counts_down_until_a_sign_of_life() -> None:
    """It counts over looks, but for time in which this process was most likely stopped itself: a
    caller or worker continued after a minute listens again before it gives up its peers."""
    clock = Clock()
    liveness = Liveness(5.0, clock)
    for left_s in (3, 1, 0):
        clock.now_s += 2
        assert liveness.look_left_s() == left_s
    liveness.heard()
    assert liveness.look_left_s() == 5
    clock.now_s += 60
    assert liveness.look_left_s() == 5 - TURN_S


@pytest.mark.parametrize("limit_s", [12, 300])
def test_the_limit_is_a_setting(limit_s: float) -> None:
    """A submitted task is watched by it, too, once it was taken in."""
    with dask.config.set({"prefect-torch-ddp.liveness-timeout-s": limit_s}):
        assert Liveness().limit_s == limit_s
        task = TaskLiveness()
        assert task.limit_s == max(TAKE_IN_S, limit_s)
        task.heard(has_task=True)
        assert task.limit_s == limit_s


def test_a_setting_that_can_not_work_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """The default holds then, which outlives another task's hold of the GIL."""
    with dask.config.set({"prefect-torch-ddp.liveness-timeout-s": "soon"}):
        assert Liveness().limit_s == 60
    assert "prefect-torch-ddp.liveness-timeout-s" in caplog.text


def test_a_flow_looks_seldom_while_all_answer() -> None:
    """Each look takes time from the ranks, and a short limit leaves none to lose."""
    assert pause_after(60, have_answered=True) == 3
    assert pause_after(12, have_answered=True) == 1.2
    assert pause_after(60, have_answered=False) == 1
