"""What counts as silence: time in which this process itself was stopped doesn't."""

from prefect_torch_ddp.gang.liveness import TURN_S, Liveness


class Clock:
    """A clock that the test sets."""

    now_s = 100.0

    def __call__(self) -> float:
        """Return its time."""
        return self.now_s


def test_silence_counts_down_until_a_sign_of_life() -> None:
    """It counts over looks, and starts anew when something is heard."""
    clock = Clock()
    liveness = Liveness(5.0, clock)
    for left_s in (3, 1, 0):
        clock.now_s += 2
        assert liveness.left_s == left_s
    liveness.heard()
    assert liveness.left_s == 5


def test_time_in_which_one_was_stopped_oneself_does_not_count() -> None:
    """A caller or worker continued after a minute listens again before it gives up its peers."""
    clock = Clock()
    liveness = Liveness(12.0, clock)
    clock.now_s += 60
    assert liveness.left_s == 12 - TURN_S
