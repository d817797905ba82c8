"""What counts as silence: time in which this process itself was stopped doesn't."""

from prefect_torch_ddp.gang.liveness import TURN_S, Liveness


class Clock:
    """A clock that the test sets."""

    now_s = 100.0

    def __call__(self) -> float:
        """Return its time."""
        return self.now_s


def test_it_lasts_until_a_sign_of_life() -> None:
    """It counts down over looks, and starts anew when something is heard."""
    clock = Clock()
    silence = Liveness(5.0, clock)
    clock.now_s += 2
    assert silence.left_s == 3
    clock.now_s += 2
    assert silence.left_s == 1
    silence.heard()
    assert silence.left_s == 5
    for _ in range(3):
        clock.now_s += 2
        left_s = silence.left_s
    assert left_s == 0


def test_time_in_which_one_was_stopped_oneself_does_not_count() -> None:
    """A caller or worker that is continued after a minute doesn't take its peers for lost
    before it has listened again."""
    clock = Clock()
    silence = Liveness(12.0, clock)
    clock.now_s += 60
    assert silence.left_s == 12 - TURN_S
