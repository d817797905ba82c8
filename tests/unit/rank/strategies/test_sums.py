"""How many passes each step summed, as changes from step to step."""

from prefect_torch_ddp.rank.strategies.sums import MOST_CHANGES, BackwardPasses


def record(passes: BackwardPasses, nums: list[int], first: int = 1) -> None:
    """Make steps with so many passes each."""
    for step, num in enumerate(nums, first):
        passes.begin_step(step)
        for _ in range(num):
            passes.count()
        passes.end_step()


def test_only_changes_are_kept() -> None:
    """Each with its first step; what was taken once isn't returned again."""
    passes = BackwardPasses()
    record(passes, [1, 1, 1, 0, 2, 2])
    assert passes.take() == [(1, 1), (4, 0), (5, 2)]
    record(passes, [2, 2], first=7)
    assert passes.take() == [(7, 2)]
    assert passes.take() == []


def test_passes_outside_of_a_step_do_not_count() -> None:
    """Nor does the end of a loop that was left after a step's end."""
    passes = BackwardPasses()
    passes.count()
    passes.end_step()
    assert passes.take() == []


def test_the_first_changes_are_kept() -> None:
    """Of any number of them: ranks differ from the first one on."""
    passes = BackwardPasses()
    record(passes, [step % 2 for step in range(3 * MOST_CHANGES)])
    assert len(passes.take()) == MOST_CHANGES
