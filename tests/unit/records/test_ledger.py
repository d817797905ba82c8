"""The ledger's check: clean for every history of crashes and sizes in which nothing was lost,
never when something was."""

import random
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefect_torch_ddp.data.sampler import GlobalBatches
from prefect_torch_ddp.records.ledger import (
    EndLine,
    LoopLine,
    StepLine,
    check_ledger,
    first_steps,
)
from prefect_torch_ddp.results import LedgerReport


@dataclass
class History:
    """Lines as the ranks of several attempts write them, those that were flushed before each
    death."""

    batches: GlobalBatches
    lines: list[LoopLine | StepLine | EndLine] = field(default_factory=list)

    def attempt(self, number, world_size, done, last, *, flushed=None) -> None:
        """Resume after step `done` up to `last`; of each rank's lines those up to the step that
        `flushed` says reach the storage."""
        size, drop_last = self.batches.global_batch_size, self.batches.drop_last
        epoch, batch = divmod(done, self.batches.num_batches)
        loop = done + 1, epoch + 1, 0, batch * size, self.batches.num_samples, size, drop_last
        is_drawn = self.batches.weights is not None
        for rank in range(world_size):
            until = last if flushed is None else min(last, flushed[rank % len(flushed)])
            self.lines.append(
                LoopLine(*loop, world_size, is_drawn=is_drawn, rank=rank, attempt=number)
            )
            steps = range(done + 1, until + 1)
            self.lines += [self.step(step, rank, number, world_size) for step in steps]

    def end(self, number: int, world_size: int, last: int) -> None:
        """Write down on all ranks that the loop has ended after a step."""
        epoch, batch = divmod(last, self.batches.num_batches)
        at = last + 1, epoch + 1, 0, batch * self.batches.global_batch_size
        self.lines += [EndLine(*at, rank=rank, attempt=number) for rank in range(world_size)]

    def step(self, step: int, rank: int, attempt: int = 1, world_size: int = 2) -> StepLine:
        """Make the line of one rank's step."""
        epoch, batch = divmod(step - 1, self.batches.num_batches)
        samples = self.batches.share(epoch, batch, rank, world_size)
        offset = batch * self.batches.global_batch_size
        size, is_last = self.batches.num_global(batch), batch == self.batches.num_batches - 1
        of = {"rank": rank, "attempt": attempt}
        return StepLine(step, epoch + 1, 0, offset, size, is_last, samples, **of)

    def steps(self) -> list[StepLine]:
        """Return the lines of steps."""
        return [line for line in self.lines if isinstance(line, StepLine)]

    def check(self) -> LedgerReport:
        """Check it, the lines of ranks and attempts mixed."""

        def mixed(line: LoopLine | StepLine | EndLine) -> tuple[bool, int, int]:
            return isinstance(line, StepLine), line.rank, line.attempt

        lines = sorted(self.lines, key=mixed)
        return check_ledger("run", first_steps(lines), lines)


@st.composite
def histories(draw: st.DrawFn) -> History:
    """Draw a training of three epochs that is killed up to three times, each time resumed by any
    number of ranks at a checkpoint, and ends."""
    num_samples, size = draw(st.integers(1, 40)), draw(st.integers(1, 12))
    drop_last = draw(st.booleans()) and num_samples >= size
    seed = draw(st.integers(0, 9))
    history = History(GlobalBatches(num_samples, size, seed, shuffle=True, drop_last=drop_last))
    total, done = 3 * history.batches.num_batches, 0
    for number in range(1, draw(st.integers(1, 4))):
        last = draw(st.integers(done, total))
        # Each rank writes its lines before a checkpoint is committed.
        saved = draw(st.integers(done, last))
        flushed = draw(st.lists(st.integers(saved, last), min_size=1, max_size=4))
        history.attempt(number, draw(st.integers(1, 4)), done, last, flushed=flushed)
        done = saved
    world_size = draw(st.integers(1, 4))
    history.attempt(9, world_size, done, total)
    history.end(9, world_size, total)
    return history


@settings(max_examples=150, deadline=None)
@given(histories())
def test_a_training_that_lost_nothing_is_clean(history: History) -> None:
    """Whatever was killed, flushed and resumed, at any sizes: each epoch has each sample once,
    and says so."""
    report = history.check()
    assert report.is_clean, str(report)
    assert [epoch.epoch for epoch in report.epochs] == [1, 2, 3]
    batches = history.batches
    tail = batches.num_samples % batches.global_batch_size
    due = batches.num_samples - (tail if batches.drop_last else 0)
    assert [epoch.num_samples for epoch in report.epochs] == [due] * 3
    assert all(epoch.is_finished for epoch in report.epochs)
    assert f"epoch 3: {due} samples, each once" in str(report)


@settings(max_examples=150, deadline=None)
@given(histories(), st.randoms(use_true_random=False))
def test_a_line_that_counts_is_missed(history: History, rng: random.Random) -> None:
    """One lost line of the last attempt, or one more sample in it, isn't clean and is named."""
    counted = [line for line in history.steps() if line.attempt == 9 and line.samples]
    if not counted:
        return
    victim = rng.choice(counted)
    history.lines.remove(victim)
    (epoch,) = [epoch for epoch in history.check().epochs if not epoch.is_clean]
    assert epoch.num_missing == len(victim.samples)
    assert set(epoch.missing) <= set(victim.samples)
    history.lines.append(replace(victim, samples=[*victim.samples, victim.samples[0]]))
    twice = history.check()
    (epoch,) = [epoch for epoch in twice.epochs if not epoch.is_clean]
    assert (epoch.num_missing, epoch.num_repeated, epoch.repeated) == (0, 1, (victim.samples[0],))
    assert f"1 repeated ({victim.samples[0]} in step {victim.step})" in str(epoch)


def whole(*, drop_last: bool = False, last: int = 6) -> History:
    """Return two epochs of 10 samples in batches of 4 on two ranks."""
    history = History(GlobalBatches(10, 4, shuffle=False, drop_last=drop_last))
    history.attempt(1, 2, 0, last)
    return history


UNFINISHED = "samples of 10, each once; not finished"
CASES = {
    "under way; not all ranks wrote the last step before they died": (
        {"last": 4, "alone": [5]},
        {1: "10 samples, each once", 2: f"6 {UNFINISHED}"},
    ),
    "steps of one rank alone may reach into the next epoch": (
        {"last": 2, "alone": [3, 4]},
        {1: f"9 {UNFINISHED}", 2: f"2 {UNFINISHED}"},
    ),
    "and are an error as soon as a whole step follows": (
        {"last": 2, "alone": [3, 4], "together": [5]},
        {
            1: "9 samples of 10; 1 missing (9); not finished",
            2: "6 samples of 10; 2 missing; not finished",
        },
    ),
    "a loop that ended lacks nothing": (
        {"last": 4, "alone": [5], "end": 5},
        {2: "6 samples of 10; 2 missing; not finished"},
    ),
    "nor a whole step": ({"last": 3, "end": 5}, {2: "0 samples of 10; 8 missing; not finished"}),
    "a step is missing before one that is there": (
        {"last": 5, "lost": lambda line: (line.step, line.rank) == (4, 1)},
        {2: "6 samples of 10; 2 missing; not finished"},
    ),
    "an epoch was left for the next one in the same loop": (
        {"lost": lambda line: line.step == 3},
        {1: "8 samples of 10; 2 missing (8, 9); not finished"},
    ),
    "also one without any line": (
        {"lost": lambda line: line.epoch == 1},
        {1: "0 samples of 10; 10 missing (0, 1, 2, 3, 4, ...); not finished"},
    ),
    "drop_last leaves out no more than the tail": (
        {"last": 4, "drop_last": True},
        {2: "8 samples, each once; 2 left out by drop_last"},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_it_says_of_an_epoch(case: str) -> None:
    """Of those that aren't finished, too; only what is missing isn't clean."""
    told, expected = CASES[case]
    history = whole(drop_last=told.get("drop_last", False), last=told.get("last", 6))
    history.lines += [history.step(step, 0) for step in told.get("alone", ())]
    together = told.get("together", ())
    history.lines += [history.step(step, rank) for step in together for rank in range(2)]
    if "end" in told:
        history.end(1, 2, told["end"])
    lost = [line for line in history.steps() if told.get("lost", lambda _: False)(line)]
    history.lines = [line for line in history.lines if line not in lost]
    report = history.check()
    said = {epoch.epoch: str(epoch).partition(": ")[2] for epoch in report.epochs}
    assert said | expected == said
    assert report.is_clean == ("missing" not in str(report))


def test_ids_that_the_dataset_does_not_have_are_named() -> None:
    """Too large ones and negative ones."""
    history = whole()
    place = history.lines.index(history.step(3, 0))
    history.lines[place] = replace(history.lines[place], samples=[-1, 77])
    found = str(history.check().epochs[0])
    assert found == "epoch 1: 9 samples; 1 missing (8); 2 that the dataset doesn't have (-1, 77)"


def test_a_run_that_starts_in_the_middle_of_an_epoch_says_what_was_done_before() -> None:
    """What another run had done is in that run's ledger."""
    history = History(GlobalBatches(10, 4))
    history.attempt(1, 2, 1, 6)
    report = history.check()
    assert report.is_clean
    says = "epoch 1: 6 samples, each once; 4 done by the run it started from"
    assert str(report.epochs[0]) == says


def test_an_attempt_that_took_steps_back_and_made_none_counts() -> None:
    """Resumed at step 2 and stopped before its first step: steps 3 and on of the attempt before
    are no part of the weights."""
    history = whole(last=5)
    history.attempt(2, 2, 2, 2)
    history.end(2, 2, 2)
    report = history.check()
    assert report.attempts == {1: 2}
    assert str(report) == "epoch 1: 8 samples of 10, each once; not finished"


def test_nothing_on_record_proves_nothing() -> None:
    """No record isn't clean, and one without its loop neither."""
    for lines, says in (
        ([], "has no ledger"),
        (whole().steps(), "the record of its dataset is lost"),
    ):
        report = History(GlobalBatches(10, 4), lines=lines).check()
        assert not report.is_clean
        assert says in str(report)
