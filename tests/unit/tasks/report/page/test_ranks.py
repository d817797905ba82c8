"""The report's table of ranks and of the wall time: who is slow, bounded and safe."""

from dataclasses import replace

from prefect_torch_ddp.records.timing import TimingLine
from prefect_torch_ddp.results import Goodput
from prefect_torch_ddp.tasks.report.page.ranks import MAX_RANK_ROWS, RecentTimes, rank_table
from prefect_torch_ddp.tasks.report.progress import TrainingProgress
from tests.support.pages import page_of

HOSTILE = "a|b<script>alert(1)</script>[x](http://evil)"


def times(rank: int, at: int = 100, waits: float = 0.4, **changes) -> TimingLine:
    """Make the record of a rank that spent `at` seconds, half of its steps' time waiting."""
    seconds = {"loading": at * 0.1, "step": at * 0.9, "waiting": at * waits}
    where, counts = ("cpu", at, 1000.0 + at), (at * 8, at, 0, 812_000_000, 0)
    line = TimingLine(rank, 1, f"node-{rank // 8}", *where, *counts, seconds)
    return replace(line, **changes)


def test_the_slow_rank_is_in_the_headline_and_each_rank_in_the_table() -> None:
    """Of equal ranks none is named, nor any after a few steps."""
    three = [times(0), times(1, waits=0.02), times(2, waits=0.3)]
    slow = page_of(ranks=three)
    assert slow.splitlines()[2].endswith("others wait 33 % of the time for rank 1 on node-0")
    ended = page_of(TrainingProgress(3, status="failed"), ranks=three)
    assert "others waited 33 % of the time for rank 1 on node-0" in ended
    assert "| 0 | node-0 | cpu | 8 | 10 % | 50 % | 40 % | 0 % | 812 MB |" in slow
    assert "others wait" not in page_of(ranks=[times(0), times(1, waits=0.35)])
    for short in ({"num_steps": 4}, {"seconds": {"step": 1.9, "waiting": 0.1}}):
        assert "others wait" not in page_of(ranks=[times(0), times(1, waits=0.02, **short)])


def test_a_waiting_that_is_not_known_is_none_and_a_gpu_shows_its_memory() -> None:
    """No 0 %, and nobody is named."""
    gpu = {"device": "cuda:0 NVIDIA H200", "cuda_bytes": 3_000_000_000, "seconds": {"step": 9.0}}
    shown = page_of(ranks=[times(rank, **gpu) for rank in range(2)])
    assert "| 100 % |  | 0 % | 812 MB | 3,000 MB |" in shown
    assert "others wait" not in shown


def test_many_ranks_and_hostile_names_stay_bounded_and_safe() -> None:
    """The slow one is always among those that are shown."""
    ranks = [times(rank, host=HOSTILE, waits=0.4 if rank < 499 else 0.001) for rank in range(500)]
    shown = rank_table(ranks)
    assert shown.count("\n| ") == MAX_RANK_ROWS + 1
    assert "\n| 499 |" in shown
    assert "436 more ranks are left out" in shown
    assert "<script" not in shown
    assert "[x]" not in page_of(ranks=ranks).splitlines()[2].replace(r"\[x\]", "")


def test_a_rank_that_becomes_slow_late_is_named() -> None:
    """What counts is the last minute."""
    recent = RecentTimes()
    for at in range(100, 1000, 30):
        recent.add([times(rank, at) for rank in range(2)])
    late = times(1, 1060, waits=(970 * 0.4 + 1) / 1060)
    shown = page_of(ranks=recent.add([times(0, 1060), late]))
    assert "for rank 1 on" in shown.splitlines()[2]


def test_the_wall_time_is_laid_out_by_size() -> None:
    """The table has the useful share, and nothing if no time is known."""
    goodput = Goodput(run_id="run", num_attempts=2, wall_s=100.0, steps_s=60.0, redone_s=40.0)
    shown = page_of(goodput=goodput)
    assert "**60 %** of 1 min 40 s, in 2 attempts, went into useful steps." in shown
    assert shown.index("useful steps") < shown.index("| lost: done again")
    assert "waiting includes all-reduce" in page_of(ranks=[times(0)])
    assert "starting" not in shown
    assert "The ranks had" not in shown
    assert "Where the time went" not in page_of()


def test_the_hours_at_the_ranks_disposal_follow_the_useful_share() -> None:
    """GPU hours are there if there was a GPU."""
    goodput = Goodput(run_id="run", num_attempts=1, wall_s=100.0, core_hours=12.34567)
    assert "useful steps. The ranks had 12.35 core hours.\n" in page_of(goodput=goodput)
    both = goodput.model_copy(update={"gpu_hours": 2.0})
    assert "The ranks had 12.35 core hours and 2 GPU hours.\n" in page_of(goodput=both)
