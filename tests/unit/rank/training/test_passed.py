"""Code between several calls of ctx.steps that decides or reports otherwise when it runs again."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from prefect_torch_ddp import RankContext, read_metrics
from prefect_torch_ddp.checkpoint.manifest import list_manifests
from prefect_torch_ddp.checkpoint.state.objects import read_states
from prefect_torch_ddp.errors import CheckpointError, InvalidParamsError
from prefect_torch_ddp.params import CheckpointParams
from prefect_torch_ddp.rank.training.loop_progress import LoopProgress
from prefect_torch_ddp.rank.training.numbers import CheckpointNumbers, OwnSaves
from prefect_torch_ddp.rank.training.replay import Replay
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.storage.protocol import Storage
from tests.support.tracked import Tracked, steps_over

EVERY_STEP = CheckpointParams(every_steps=1, every_s=None)
ON_DEMAND = CheckpointParams(every_s=None)


def stopping_early(
    folder: Path, dies_at: int | None = None, *, asks: bool = False, num_calls: int = 6
) -> int:
    """Train up to six loops of two steps, and stop if the loss is no better for two of them;
    return the number of steps."""
    with RankContext.local(storage=folder, checkpoint=EVERY_STEP) as ctx:
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        ctx.track(model=model)
        best, bad = float("inf"), 0
        for _ in range(num_calls):
            for _ in steps_over(ctx, size=2):
                if ctx.step == dies_at:
                    raise InterruptedError
                with torch.no_grad():  # there in four calls, then no better
                    model.weight += (model.weight < 8).float()
            loss = 8 - model.weight.item()
            ctx.report(loss=loss)
            best, bad = (loss, 0) if loss < best else (best, bad + 1)
            if bad == 2:
                if not asks:
                    break
                ctx.request_stop("no better")
        return ctx.step


@pytest.mark.parametrize(
    ("resumes", "did"),
    [
        ({}, "returned after 3"),
        ({"asks": True}, "asked to stop after 3"),
        ({"num_calls": 2}, "returned after 2"),
    ],
)
def test_early_stopping_that_decides_otherwise_on_resume_is_an_error(
    tmp_path: Path, resumes: dict[str, int], did: str
) -> None:
    """A function that ends before the checkpoint's call is an error, not an empty success."""
    with pytest.raises(InterruptedError):
        stopping_early(tmp_path, dies_at=10)
    for _ in range(2):  # a refused one leaves no trace of an end
        with pytest.raises(InvalidParamsError, match=f"in call 5 .* function {did}: "):
            stopping_early(tmp_path, **resumes)


@pytest.mark.parametrize("asks", [False, True])
def test_a_training_that_stopped_early_by_a_break_adds_nothing(
    tmp_path: Path, *, asks: bool
) -> None:
    """It had ended, so that it doesn't matter where its code breaks off now."""
    assert [stopping_early(tmp_path, asks=asks) for _ in range(3)] == [12, 12, 12]


@pytest.mark.parametrize("length", ["epochs", "total"])
def test_a_call_that_had_made_all_its_steps_continues_if_it_is_asked_for_more(
    length: str, tmp_path: Path
) -> None:
    """Also if its checkpoint was requested after it, in another run and in the same one."""

    def made(run_id: str, num: int, resume_from: str | None = None, *, leaves: bool = False) -> int:
        with RankContext.local(
            storage=tmp_path, checkpoint=ON_DEMAND, run_id=run_id, resume_from=resume_from
        ) as ctx:
            total = Tracked()
            ctx.track(total=total)
            loader = ctx.loader(TensorDataset(torch.arange(4)), global_batch_size=2)
            given = {"epochs": num} if length == "epochs" else {"total": 2 * num}
            begins_at = ctx.step
            for _ in ctx.steps(loader, **given):
                total.value += 1
                if leaves:
                    break
            ctx.checkpoint(force=True)
            assert total.value == ctx.step
            return ctx.step - begins_at

    assert [made("a", 2), made("a", 2), made("a", 3), made("a", 3)] == [4, 0, 2, 0]
    assert [made("b", 5, "a"), made("b", 5)] == [4, 0]
    assert [made("left", 2, leaves=True), made("left", 3)] == [1, 0]


def test_an_epochs_end_is_known_after_a_resume(tmp_path: Path) -> None:
    """Code after a call of `steps` that asks for it does the same as before."""

    def ends(dies_at: int | None = None) -> list[tuple[int, bool]]:
        found = []
        with RankContext.local(storage=tmp_path, checkpoint=EVERY_STEP) as ctx:
            ctx.track(total=Tracked())
            for _ in range(3):
                for _ in steps_over(ctx, size=2):
                    if ctx.step == dies_at:
                        raise InterruptedError
                found.append((ctx.step, ctx.epoch_ended))
        return found

    with pytest.raises(InterruptedError):
        ends(dies_at=5)
    with pytest.raises(InterruptedError):
        ends(dies_at=6)
    assert ends()[-1] == (6, True)
    assert ends() == [(6, True)] * 3


def test_what_code_between_loops_reports_is_recorded_once(tmp_path: Path) -> None:
    """What it reports while finished calls are passed by is on record, from other weights."""
    with pytest.raises(InterruptedError):
        stopping_early(tmp_path, dies_at=6)
    assert stopping_early(tmp_path) == 12
    records = read_metrics(tmp_path, "local")
    assert records["step"].tolist() == [2, 4, 6, 8, 10, 12]
    assert records["loss"].tolist() == [6, 4, 2, 0, 0, 0]


def summing(
    storage: Storage,
    policy: CheckpointParams,
    saves: str,
    *,
    num_calls: int = 3,
    goal: int = 99,
    dies_at: int | None = None,
) -> None:
    """Train loops of two steps that add 1, and add 100 after each; stop after the goal. Die
    in a step, or at the end, which is step 7."""
    with RankContext.local(storage=storage, checkpoint=policy) as ctx:
        total = Tracked()
        ctx.track(total=total)
        best = -1.0
        for _ in range(num_calls):
            for _ in steps_over(ctx, size=2):
                if ctx.step == dies_at:
                    raise InterruptedError
                total.value += 1
            is_better, best = min(total.value % 100, goal) > best, min(total.value % 100, goal)
            if saves == "always" or (saves == "the best" and is_better):
                ctx.checkpoint(force=True)
            total.value += 100
            if goal < 99 and not is_better:
                break
        if dies_at == 7:
            raise InterruptedError


def totals(storage: Storage) -> list[float]:
    """Return the sum in each checkpoint."""
    found = list_manifests(storage, "local")
    return [
        read_states(storage, manifest, manifest.objects)["total"]["value"] for manifest in found
    ]


@pytest.mark.parametrize(("dies_at", "missed", "left"), [(3, 0, 306), (5, 2, 206), (7, 3, 206)])
def test_a_save_that_is_not_asked_for_again_is_warned_of(
    tmp_path: Path, dies_at: int, missed: int, left: float, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning names the calls after which the condition for a checkpoint no longer holds."""
    storage = DirectoryStorage(tmp_path)
    with pytest.raises(InterruptedError):
        summing(storage, ON_DEMAND, "the best", dies_at=dies_at)
    summing(storage, ON_DEMAND, "the best")
    said = [f"requested after call {missed} of ctx.steps"] if missed else []
    assert re.findall(r"requested after call \d of ctx.steps", caplog.text) == said
    assert totals(storage)[-1] == left


@pytest.mark.parametrize("policy", [EVERY_STEP, ON_DEMAND])
@pytest.mark.parametrize("saves", ["never", "always", "the best"])
def test_what_a_finished_training_left_stays_when_it_is_run_again(
    tmp_path: Path, policy: CheckpointParams, saves: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The last checkpoint holds what code after the last loop changed, once; more loops continue
    from there."""
    storage = DirectoryStorage(tmp_path)
    for _ in range(3):
        summing(storage, policy, saves)
        assert totals(storage)[-1] == 306
    before = totals(storage)
    summing(storage, policy, saves)
    assert totals(storage) == before
    summing(storage, policy, saves, num_calls=5)
    assert totals(storage)[-1] == 510
    assert "not asked for again" not in caplog.text  # nothing was undone


def test_a_due_checkpoint_after_a_break_says_that_the_call_has_ended(tmp_path: Path) -> None:
    """As a forced one does: on resume the call makes no further steps."""

    def train(*, dies: bool = False) -> list[list[int]]:
        policy = CheckpointParams(every_s=None, every_steps=2)
        with RankContext.local(storage=tmp_path, checkpoint=policy) as ctx:
            ctx.track(total=Tracked())
            made: list[list[int]] = []
            for _ in range(2):
                made.append([])
                for _ in steps_over(ctx, num_samples=8):
                    made[-1].append(ctx.step)
                    if ctx.step in {4, 7}:
                        break
                ctx.checkpoint()
                if dies:
                    raise InterruptedError
            return made

    with pytest.raises(InterruptedError):
        train(dies=True)
    assert train() == [[], [5, 6, 7]]
    assert train() == [[], [8, 9, 10, 11, 12]], "the last one wasn't due, so its call continues"


def test_requests_that_make_no_checkpoint_are_passed_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """On resume, the request that made the checkpoint is found between others that made none,
    even if its own condition doesn't hold any more."""
    forced_at = {4}

    def train(dies_at: int | None = None) -> list[float]:
        found = []
        with RankContext.local(storage=tmp_path, checkpoint=ON_DEMAND) as ctx:
            total = Tracked()
            ctx.track(total=total)
            for _ in range(3):
                for _ in steps_over(ctx, size=2):
                    if ctx.step == dies_at:
                        raise InterruptedError
                    total.value += 1
                ctx.checkpoint()
                total.value += 100
                ctx.checkpoint(force=ctx.step in forced_at)
                total.value += 1000
                ctx.checkpoint()
                found.append(total.value)
        return found

    with pytest.raises(InterruptedError):
        train(dies_at=5)
    forced_at.clear()
    assert train()[1:] == [2204, 3306]
    assert "not again on resume" not in caplog.text


class Killed(DirectoryStorage):
    """A directory whose process dies right after the commit of a checkpoint."""

    def write_if_absent(self, key: str, data: bytes) -> bool:
        is_written = super().write_if_absent(key, data)
        if key.endswith("step-00000006/000001/manifest.json"):
            raise InterruptedError(key)
        return is_written


def test_a_training_killed_behind_its_last_commit_had_ended(tmp_path: Path) -> None:
    """Also if its early stopping would decide differently now."""
    with pytest.raises(CheckpointError):
        summing(Killed(tmp_path), ON_DEMAND, "never", goal=4)
    summing(DirectoryStorage(tmp_path), ON_DEMAND, "never", goal=4)
    assert totals(DirectoryStorage(tmp_path)) == [306]


def test_a_run_that_begins_from_an_ended_one_keeps_what_its_own_code_changes(
    tmp_path: Path,
) -> None:
    """The other run's calls are over; what the new run changes before its own one stays."""

    def train(run_id: str, **begins: str) -> list[float]:
        local = RankContext.local(storage=tmp_path, run_id=run_id, checkpoint=EVERY_STEP, **begins)
        with local as ctx:
            optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
            ctx.track(optimizer=optimizer)
            assert list(steps_over(ctx)) or begins
            if not begins:
                return []
            optimizer.param_groups[0]["lr"] = 0.001
            return [optimizer.param_groups[0]["lr"] for _ in steps_over(ctx, size=2)]

    train("first")
    assert train("next", resume_from="first") == [0.001, 0.001]


def validating(folder: Path, *, dies: bool = False, **begins: str) -> None:
    """Train two epochs, request a checkpoint of a better validation only, then test, and die."""
    with RankContext.local(storage=folder, checkpoint=ON_DEMAND, **begins) as ctx:
        best = ctx.state(best=0.0)
        for accuracy in (0.5, 0.7):
            for _ in steps_over(ctx, size=2):
                ctx.report(loss=1.0)
            ctx.report(val_accuracy=accuracy)
            if accuracy > best.best:
                best.best = accuracy
                ctx.checkpoint(force=True)
        if dies:
            raise InterruptedError
        ctx.report(test_accuracy=0.6)


def reported(folder: Path, run_id: str = "local") -> dict[str, list[tuple[int, float]]]:
    """Return the step and the value of each record, by metric."""
    frame = read_metrics(folder, run_id)
    names = ("loss", "val_accuracy", "test_accuracy")
    return {
        name: frame.loc[frame[name].notna(), ["step", name]].to_records(index=False).tolist()
        for name in names
        if name in frame
    }


def test_what_is_reported_after_a_request_that_is_not_repeated_is_recorded(
    tmp_path: Path,
) -> None:
    """Only what the checkpoint has is on record already."""
    with pytest.raises(InterruptedError):
        validating(tmp_path, dies=True)
    assert "test_accuracy" not in reported(tmp_path)
    validating(tmp_path)
    assert reported(tmp_path) == {
        "loss": [(1, 1.0), (2, 1.0), (3, 1.0), (4, 1.0)],
        "val_accuracy": [(2, 0.5), (4, 0.7)],
        "test_accuracy": [(4, 0.6)],
    }


def test_a_new_run_records_what_it_reports_behind_the_other_ones_checkpoint(
    tmp_path: Path,
) -> None:
    """Only the other run has those values on record. Between passed calls none is recorded, since
    the weights are later ones."""
    with pytest.raises(InterruptedError):
        validating(tmp_path, dies=True)
    validating(tmp_path, run_id="next", resume_from="local")
    assert reported(tmp_path, "next") == {
        "val_accuracy": [(4, 0.7)],
        "test_accuracy": [(4, 0.6)],
    }


def test_requests_are_counted_anew_when_an_unfinished_call_is_entered_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One that wasn't due behind a break isn't taken for one after the call's later end."""

    def train(leaves_at: int, *, dies: bool = False) -> tuple[list[int], float]:
        policy = CheckpointParams(every_s=None, every_steps=2)
        with RankContext.local(storage=tmp_path, checkpoint=policy) as ctx:
            total = Tracked()
            ctx.track(total=total)
            made = []
            for _ in steps_over(ctx, num_samples=8):
                made.append(ctx.step)
                if ctx.step == leaves_at:
                    break
            ctx.checkpoint()
            total.value += 1
            if dies:
                raise InterruptedError
            return made, total.value

    assert train(3) == ([1, 2, 3], 1)
    with pytest.raises(InterruptedError):
        train(6, dies=True)
    assert train(6) == ([], 2)
    assert totals(DirectoryStorage(tmp_path))[-1] == 2
    assert "not again on resume" not in caplog.text


@pytest.mark.parametrize("num_unforced", [0, 2])
def test_requests_are_counted_from_an_earlier_versions_checkpoint_on(
    num_unforced: int, caplog: pytest.LogCaptureFixture
) -> None:
    """It has the number of saves after its call only: on resume the forced requests are those."""
    numbers = CheckpointNumbers(LoopProgress(), own=OwnSaves(num_saves_behind=2), has_begun=True)
    replay = Replay(numbers, trains=True, is_ours=True)
    replay.pass_call(0)
    passed = [*[False] * num_unforced, True, False, True]
    come = [replay.pass_request(is_forced=is_forced) for is_forced in passed]
    assert come == [*[False] * (num_unforced + 2), True]
    assert numbers.own == OwnSaves(num_saves_behind=2, num_requests_behind=num_unforced + 3)
    replay.warn_of_missed_save()
    assert "not again on resume" not in caplog.text
    numbers.count_request()
    assert numbers.own.num_requests_behind == num_unforced + 4
