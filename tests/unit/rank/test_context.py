"""Shows what user code meets in RankContext, in one process without a process group."""

import math
import re
from collections.abc import Callable
from contextlib import nullcontext
from decimal import Decimal
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from prefect_torch_ddp import RankContext
from prefect_torch_ddp.checkpoint.attempts import claim_attempt
from prefect_torch_ddp.checkpoint.manifest import list_manifests
from prefect_torch_ddp.errors import BadKeyError, CheckpointError, InvalidParamsError
from prefect_torch_ddp.params import CheckpointParams
from prefect_torch_ddp.protocol.events import (
    CheckpointCommitted,
    Progress,
    RankEvent,
    decode_event,
    encode_event,
)
from prefect_torch_ddp.rank.assembly import ContextAssembly
from prefect_torch_ddp.rank.config import RankConfig, RankInfo
from prefect_torch_ddp.rank.link import Link
from prefect_torch_ddp.rank.training.reporting import measured
from prefect_torch_ddp.records.metrics import read_new_records
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.storage.s3.storage import S3Storage
from prefect_torch_ddp.tasks.report.curves import MetricCurves
from tests.support.records import read_all_records, read_records
from tests.support.tracked import Tracked, steps_over
from tests.workloads import healthy

T = TypeVar("T")


def fit(folder: Path, *, run_id: str = "local", **options: Any) -> dict[str, Any]:
    """Train the healthy workload here."""
    policy = CheckpointParams(every_steps=2, every_s=None)
    with RankContext.local(
        options=options, storage=folder, run_id=run_id, checkpoint=policy
    ) as ctx:
        value = healthy.train(ctx)
    return {**value, **ctx._assembly.outcome()}


def test_that_there_is_no_process_group_is_explained() -> None:
    """Beside torch's error."""
    with pytest.raises(ValueError, match="has not been initialized") as caught:  # noqa: SIM117
        with RankContext.local():
            dist.get_world_size()
    (note,) = caught.value.__notes__
    assert "RankContext.local() has no process group" in note


def test_it_says_what_it_is(tmp_path: Path) -> None:
    """World size 1, and what was chosen."""
    with RankContext.local(data=tmp_path, options={"lr": 0.1}, seed=5) as ctx:
        place = [ctx.rank, ctx.world_size, ctx.local_rank, ctx.local_world_size, ctx.node_rank]
        assert place == [0, 1, 0, 1, 0]
        assert (ctx.stage, ctx.seed, ctx.attempt, ctx.data) == ("train", 5, 1, tmp_path)
        assert ctx.options == {"lr": 0.1}
        assert (ctx.step, ctx.epoch, ctx.epoch_ended, ctx.should_stop) == (0, 0, False, False)
        assert ctx.device.type == ("cuda" if torch.cuda.is_available() else "cpu")
        model = nn.Linear(1, 1)
        assert ctx.wrap(model) is model
        temporary = Path(ctx.config.storage.uri)
        assert temporary.exists()
    assert not temporary.exists()


def test_steps_count_steps_and_epochs() -> None:
    """Steps count from 1, an epoch's last step says so, and a second loop continues to count."""
    dataset = TensorDataset(torch.arange(50))
    with RankContext.local() as ctx:
        loader = ctx.loader(dataset, global_batch_size=20)
        seen = [(ctx.step, ctx.epoch, ctx.epoch_ended) for _ in ctx.steps(loader, epochs=2)]
        assert seen == [(step, (step + 2) // 3, step in (3, 6)) for step in range(1, 7)]
        third = torch.cat([batch for (batch,) in ctx.steps(loader, epochs=1)]).tolist()
        assert (ctx.step, ctx.epoch) == (9, 3)
        assert sorted(third) == list(range(50))
    with RankContext.local() as ctx:
        loader = ctx.loader(dataset, global_batch_size=20)
        assert torch.cat([batch for (batch,) in ctx.steps(loader, epochs=1)]).tolist() != third


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Train undisturbed."""
    return fit(tmp_path_factory.mktemp("whole"))


def test_two_runs_with_one_seed_give_the_same_weights(
    tmp_path: Path, whole: dict[str, Any]
) -> None:
    """And another seed gives others."""
    assert fit(tmp_path)["sha256"] == whole["sha256"]
    with RankContext.local(seed=1) as ctx:
        other = healthy.train(ctx)
    assert other["sha256"] != whole["sha256"]


class BreakError(Exception):
    """Ends a training from outside."""


@pytest.mark.parametrize("at", range(1, 12))
def test_a_resumed_training_is_the_uninterrupted_one(
    tmp_path: Path, whole: dict[str, Any], at: int
) -> None:
    """Ended by an exception in any step, resumed at the newest checkpoint: the same weights to
    the last bit."""
    policy = CheckpointParams(every_steps=1, every_s=None)
    with (
        pytest.raises(BreakError),
        RankContext.local(storage=tmp_path, checkpoint=policy) as ctx,
    ):
        report = ctx.report

        def interrupt(**metrics: Any) -> None:
            report(**metrics)
            if ctx.step == at:
                raise BreakError

        ctx.report = interrupt  # type: ignore[method-assign]
        healthy.train(ctx)
    found = fit(tmp_path)
    assert found["resumed_from_step"] == (at - 1 or None)
    assert found["sha256"] == whole["sha256"]
    records = read_records(DirectoryStorage(tmp_path), "local")
    assert [record.step for record in records] == list(range(1, 13))


def test_the_weights_load_with_plain_torch(tmp_path: Path) -> None:
    """Two lines, no `module.` prefix, also of a compiled model."""
    with RankContext.local(storage=tmp_path) as ctx:
        net = nn.Linear(3, 2)
        ctx.track(model=torch.compile(ctx.wrap(net)))
    (path,) = tmp_path.rglob("model.pt")
    model = nn.Linear(3, 2)
    model.load_state_dict(torch.load(path, weights_only=True))
    assert torch.equal(model.weight, net.weight.cpu())


def test_what_a_caller_asks_for_is_no_stop_before_the_loop_met_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A single rank that pauses to grow doesn't count as done between two calls of `steps`."""
    with RankContext.local() as ctx:
        monkeypatch.setattr(ctx._assembly.link, "stop_requested", lambda: True)
        assert not ctx.should_stop
        for _ in steps_over(ctx):
            assert not ctx.should_stop
        assert ctx.should_stop


def test_early_stop_ends_the_loop_and_stays_the_end(tmp_path: Path) -> None:
    """A single rank stops after that step, later loops are skipped, and a new run continues."""
    first = fit(tmp_path, stop_at=5)
    assert (first["steps"], first["last_checkpoint"]["step"]) == (5, 5)
    assert fit(tmp_path, stop_at=5)["steps"] == 5
    with RankContext.local(storage=tmp_path, run_id="next", resume_from="local", options={}) as ctx:
        assert healthy.train(ctx)["steps"] == 12
    with RankContext.local() as ctx:
        for _ in steps_over(ctx):
            ctx.request_stop("enough")
            assert ctx.should_stop
        assert list(steps_over(ctx)) == []


@pytest.mark.parametrize("fails", [False, True])
def test_leaving_the_loop_counts_the_step(tmp_path: Path, *, fails: bool) -> None:
    """`break` is an end like any other: the record and the checkpoint hold the step. What was
    reported in a step that failed is on record too."""
    with (
        pytest.raises(BreakError) if fails else nullcontext(),
        RankContext.local(storage=tmp_path) as ctx,
    ):
        ctx.track(model=nn.Linear(1, 1))
        for _ in steps_over(ctx):
            ctx.report(loss=ctx.step)
            if ctx.step == 2 and fails:
                raise BreakError
            if ctx.step == 2:
                break
    records = read_records(DirectoryStorage(tmp_path), "local")
    assert [(each.step, each.num_samples) for each in records] == [(1, 1), (2, 1)]
    assert [each.metrics["loss"] for each in records] == [1, 2]
    if not fails:
        assert ctx._assembly.outcome()["last_checkpoint"]["step"] == 2


# ---- Reports.


def test_reports_of_a_step_are_one_record(tmp_path: Path) -> None:
    """Numbers of all kinds; what is reported outside of a step is a record of no samples."""
    with RankContext.local(storage=tmp_path) as ctx:
        for _ in steps_over(ctx, size=4):
            loss = torch.tensor(0.5, requires_grad=True)
            ctx.report(loss=loss, count=3)
            odd = {"mean": np.float32(0.25), "zero": np.array(1.5), "flag": True}
            ctx.report(**odd, loss=torch.tensor(math.nan))
        ctx.report(final=1.0)
    first, second = read_records(DirectoryStorage(tmp_path), "local")
    assert math.isnan(first.metrics.pop("loss"))
    assert first.metrics == {"count": 3, "mean": 0.25, "zero": 1.5, "flag": 1}
    assert (first.num_samples, first.epoch) == (4, 1)
    assert (second.num_samples, second.metrics) == (0, {"final": 1.0})


class Listener(Link):
    """A link that keeps what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[RankEvent] = []

    def send(self, event: RankEvent) -> None:
        self.sent.append(event)

    def of(self, kind: type[T]) -> list[T]:
        """Return the events of a class."""
        return [event for event in self.sent if isinstance(event, kind)]


def test_progress_and_each_complete_checkpoint_reach_the_link(tmp_path: Path) -> None:
    """Progress at the first step, and then not more often than once a second; a checkpoint with
    its size, and its value of the metric that decides which is the best."""
    link, storage = Listener(), DirectoryStorage(tmp_path)
    policy = CheckpointParams(every_steps=200, every_s=None, keep_last=9, best_metric="loss")
    config = RankConfig("run", claim_attempt(storage, "run"), "train", storage, checkpoint=policy)
    with RankContext(ContextAssembly(config, RankInfo(), link)) as ctx:
        ctx.track(model=nn.Linear(1, 1))
        for number, _ in enumerate(steps_over(ctx, epochs=100), 1):
            ctx.report(loss=1 / number)
    of_all = {"total_steps": 400, "total_epochs": 100, "num_samples": 1}
    progress, committed = link.of(Progress), link.of(CheckpointCommitted)
    assert progress[0] == Progress(step=1, epoch=1, **of_all)
    assert len(progress) < 20
    assert [(each.step, each.epoch) for each in committed] == [(200, 50), (400, 100)]
    assert [each.value for each in committed] == [1 / 200, 1 / 400]
    manifests = list_manifests(storage, "run")
    sizes = [sum(item.num_bytes for item in each.objects) for each in manifests]
    assert [each.num_bytes for each in committed] == sizes
    assert [decode_event(encode_event(each), 0) for each in committed] == committed


@pytest.mark.parametrize(
    ("epochs", "first", "last"),
    [
        pytest.param(1, (2, 1, True), (6, 3, True), id="one epoch a call"),
        pytest.param(2, (4, 2, False), (12, 6, False), id="two epochs a call"),
        pytest.param(math.inf, (None, None, False), (None, None, False), id="without end"),
    ],
)
def test_a_call_of_one_epoch_may_continue(
    tmp_path: Path, epochs: Any, first: tuple[Any, ...], last: tuple[Any, ...]
) -> None:
    """Its totals are those of the call: as in a loop over epochs, others may follow."""
    link = Listener()
    config = RankConfig("run", 1, "train", DirectoryStorage(tmp_path))
    with RankContext(ContextAssembly(config, RankInfo(), link)) as ctx:
        for number in range(1, 4):
            for _ in steps_over(ctx, 2, epochs=epochs):
                if epochs == math.inf and ctx.step == number:
                    break
    told = [(each.total_steps, each.total_epochs, each.may_continue) for each in link.of(Progress)]
    assert (told[0], told[-1]) == (first, last)


def test_learning_rates_and_throughput_are_measured_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of tracked optimizers, at once and then now and then, without anything being reported; each
    group of each optimizer has its name, and odd ones have none. None of it is the user's
    metrics."""
    monkeypatch.setattr(measured, "MEASURE_INTERVAL_S", 0.0)
    monkeypatch.setattr(measured, "MEASURE_SHARE", 0.0)
    model = nn.Linear(1, 1)
    groups = [{"params": [model.weight], "lr": 0.5}, {"params": [model.bias], "lr": 0.25}]
    adam, sgd = torch.optim.Adam([nn.Parameter(torch.zeros(1))]), torch.optim.SGD(groups, lr=1)
    odd = nn.Linear(1, 1)
    odd.param_groups = [3, {"lr": torch.tensor(1j)}]  # type: ignore[assignment]
    with RankContext.local(storage=tmp_path) as ctx:
        ctx.track(model=model, adam=adam, sgd=sgd, odd=odd)
        for _ in steps_over(ctx, size=2, epochs=2):
            sgd.param_groups[0]["lr"] = 0.5 / ctx.step
    storage = DirectoryStorage(tmp_path)
    assert len(read_all_records(storage, "local")) == 0
    values = MetricCurves(read_new_records(storage, "local", set())).snapshot().values
    assert values["learning_rate of adam"] == [(step, 0.001) for step in (1, 2, 3, 4)]
    assert values["learning_rate of sgd[0]"] == [(step, 0.5 / step) for step in (1, 2, 3, 4)]
    assert values["learning_rate of sgd[1]"] == [(step, 0.25) for step in (1, 2, 3, 4)]
    assert [step for step, speed in values["samples/s"] if speed > 0] == [2, 3, 4]


def test_learning_rates_that_are_left_out_are_counted() -> None:
    """The names of those that are measured say how many groups there are."""
    groups = [{"params": [nn.Parameter(torch.zeros(1))]} for _ in range(6)]
    rates = dict(measured.learning_rates({"sgd": torch.optim.SGD(groups, lr=0.5)}))
    assert rates == {f"learning_rate of sgd[{each}] (of 6 groups)": 0.5 for each in range(4)}


# ---- Refusals.


def track_twice(ctx: RankContext) -> None:
    """Track a name twice."""
    ctx.track(model=nn.Linear(1, 1))
    ctx.track(model=nn.Linear(1, 1))


def track_late(ctx: RankContext) -> None:
    """Track something in a step."""
    for _ in steps_over(ctx):
        ctx.track(late=nn.Linear(1, 1))


def loop_in_a_loop(ctx: RankContext) -> None:
    """Begin a loop in a step."""
    for _ in steps_over(ctx):
        next(iter(steps_over(ctx)))


NO_NUMBERS = torch.ones(2), torch.ones(1), "0.5", None, [1.0], np.ones(3), 1j, torch.tensor(1j)
LACKS = "'lr' can't be tracked: float has no state_dict and no load_state_dict"
METRIC = r"metric 'accuracy' is a .* report a number or a 0-d"
REFUSED: list[tuple[str, Callable[[RankContext], object]]] = [
    *((METRIC, partial(RankContext.report, accuracy=value)) for value in NO_NUMBERS),
    (LACKS, lambda ctx: ctx.track(lr=0.1)),
    (
        r"dict has no state_dict and .*; plain values of your own belong in ctx\.state",
        lambda ctx: ctx.track(state={"best": 0.1}),
    ),
    ("'other'", lambda ctx: ctx.track(other=Tracked(Path()))),  # can't be read back
    ("'model' is tracked already", track_twice),
    ("can't name a tracked object", lambda ctx: ctx.track(**{"../model": nn.Linear(1, 1)})),
    ("track everything before the first step", track_late),
    (r"from ctx.loader.* not a DataLoader", lambda ctx: ctx.steps(DataLoader([1]), epochs=1)),
    ("epochs is -1", lambda ctx: steps_over(ctx, epochs=-1)),
    (r"epochs is 1\.5; give a whole number", lambda ctx: steps_over(ctx, epochs=1.5)),
    (r"inside of ctx.steps", loop_in_a_loop),
    (
        r"as by zip, make one loader of both: of torch\.utils\.data\.StackDataset",
        lambda ctx: list(zip(steps_over(ctx), steps_over(ctx), strict=True)),
    ),
    (r"was given no dataset; RankContext.local\(data=...\)", lambda ctx: ctx.data),
    ("was given no dataset", lambda ctx: ctx.data_storage),
    (r"TrainParams\(source=\.\.\.\)", lambda ctx: ctx.source),
]


def test_a_checkpoint_policy_may_be_a_dict(tmp_path: Path) -> None:
    """As in TrainParams; what it can't have is refused by name, before an attempt is claimed."""
    given: Any = {"every_s": None, "every_steps": 2}
    with RankContext.local(storage=tmp_path, checkpoint=given) as ctx:
        assert ctx.config.checkpoint == CheckpointParams(**given)
    refused: list[tuple[Any, str]] = [
        ({"every_step": 2}, "checkpoint: there is no option every_step; did you mean every_steps"),
        ({"keep_last": 0}, "checkpoint: .*keep_last"),
        (3, "checkpoint: "),
    ]
    for value, says in refused:
        with pytest.raises(InvalidParamsError, match=says):
            RankContext.local(storage=tmp_path, checkpoint=value)
    with RankContext.local(storage=tmp_path) as ctx:
        assert ctx.attempt == 2


@pytest.mark.parametrize("run_id", ["a/b", "", "..", "a/", 5, "x" * 300])
def test_a_run_id_is_a_folder_s_name(tmp_path: Path, run_id: Any) -> None:
    """A path would be a run that nothing lists; it is refused before an attempt is claimed."""
    with pytest.raises(InvalidParamsError, match=r"run_id is .* one folder.* run_id='first-try'"):
        RankContext.local(storage=tmp_path, run_id=run_id)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("says", "use"), REFUSED)
def test_what_cannot_be_is_refused_by_name(says: str, use: Callable[[RankContext], object]) -> None:
    """At the call, with the way out."""
    with RankContext.local() as ctx, pytest.raises(InvalidParamsError, match=says):
        use(ctx)


def test_without_a_dataset_its_source_is_in_its_place(tmp_path: Path) -> None:
    """Of a workload without prepare, `data_storage` is the source; `data` says so."""
    with RankContext.local(source=tmp_path) as ctx:
        assert ctx.data_storage == ctx.source
        with pytest.raises(InvalidParamsError, match=r"was given no dataset; .*ctx\.data_storage"):
            _ = ctx.data
    with RankContext.local(source=tmp_path, data=tmp_path / "own") as ctx:
        assert ctx.data_storage.uri == str(tmp_path / "own")
    with (
        RankContext.local(source=tmp_path, stage="prepare") as ctx,
        pytest.raises(InvalidParamsError, match="was given no dataset"),
    ):
        _ = ctx.data_storage


def test_whole_numbers_of_any_library_count(tmp_path: Path) -> None:
    """Also in a checkpoint, as plain ones."""
    with RankContext.local(storage=tmp_path, ledger=True) as ctx:
        loader = ctx.loader(TensorDataset(torch.ones(4)), global_batch_size=np.int32(2))
        ctx.track(model=nn.Linear(1, 1))
        for batch in ctx.steps(loader, epochs=np.int64(2)):
            assert len(list(ctx.micro_batches(batch, max_samples=np.int64(1)))) == 2
        list(ctx.steps(loader, epochs=2.0))  # type: ignore[arg-type]  # as from YAML
        for _ in ctx.steps(loader, epochs=math.inf):  # type: ignore[arg-type]
            if ctx.step == 11:
                break
    assert (ctx.step, ctx.epoch) == (11, 6)


def test_of_a_refused_call_nothing_is_tracked(tmp_path: Path) -> None:
    """Who catches the error may track it, and the training ends well."""
    with RankContext.local(storage=tmp_path) as ctx:
        model = nn.Linear(1, 1)
        for odd in (0.1, Tracked(Path())):
            with pytest.raises(InvalidParamsError, match="'odd'"):
                ctx.track(model=model, odd=odd)
        ctx.track(model=model)
    (manifest,) = list_manifests(DirectoryStorage(tmp_path), "local")
    assert {item.name for item in manifest.objects} == {"model", "rank-00000"}


def test_a_step_to_restore_is_of_an_evaluation(tmp_path: Path) -> None:
    """A training would resume from the newest checkpoint whatever the step."""
    says = r"restore_step is 10 in the stage 'train', .* stage='evaluate', or resume_from="
    with pytest.raises(InvalidParamsError, match=says):
        RankContext.local(storage=tmp_path, restore_step=10)
    assert not list(tmp_path.iterdir())


def test_a_misspelt_stage_is_refused_with_the_nearest_one(tmp_path: Path) -> None:
    """Before an attempt is claimed, and whatever else was given."""
    for stage, near in (("evalaute", "; did you mean evaluate\\?"), ("x", "")):
        says = rf"there is no stage {stage}{near} \(there are prepare, train, evaluate, task\)"
        for chosen in ({}, {"restore_step": 10}):
            wrong: Any = {"stage": stage, **chosen}
            with pytest.raises(InvalidParamsError, match=says):
                RankContext.local(storage=tmp_path, **wrong)
    assert not list(tmp_path.iterdir())


def test_evaluate_restores_exactly_or_refuses(tmp_path: Path) -> None:
    """Another step, an untracked name, a model that doesn't fit: each says so."""
    fit(tmp_path)
    with RankContext.local(storage=tmp_path, stage="evaluate", restore_step=10) as ctx:
        ctx.track(model=healthy.make_net())
        assert ctx.step == 10
        says = r"step 10 of run local has no object 'decoder'; it has .*model"
        with pytest.raises(CheckpointError, match=says):
            ctx.track(decoder=nn.Linear(1, 1))
    for step, model, message in [
        (11, healthy.make_net(), "no checkpoint of step 11"),
        (10, nn.Linear(1, 1), "step 10 of run local doesn't fit the tracked object 'model'"),
    ]:
        with (
            RankContext.local(storage=tmp_path, stage="evaluate", restore_step=step) as ctx,
            pytest.raises(CheckpointError, match=message),
        ):
            ctx.track(model=model)


def test_a_scheduler_under_the_name_of_something_else_is_refused(tmp_path: Path) -> None:
    """In words, though its options are compared with the checkpoint's first."""

    class Steps:
        def state_dict(self) -> list[int]:
            return [1, 2]

        def load_state_dict(self, state: list[int]) -> None: ...

    with RankContext.local(storage=tmp_path, run_id="first") as ctx:
        ctx.track(schedule=Steps())
        ctx.checkpoint(force=True)
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    says = "of run first doesn't fit the tracked object 'schedule'"
    resumed = RankContext.local(storage=tmp_path, run_id="next", resume_from="first")
    with pytest.raises(CheckpointError, match=says), resumed as ctx:
        ctx.track(schedule=schedule)


@pytest.mark.parametrize("stops", [False, True], ids=["to its end", "stopped"])
def test_steps_of_an_evaluation_are_not_those_of_the_training(stops: bool, tmp_path: Path) -> None:
    """A probe that is fitted to a trained model makes all of its own steps."""
    with RankContext.local(storage=tmp_path) as ctx:
        ctx.track(model=nn.Linear(1, 1))
        for _ in steps_over(ctx, size=4):
            if stops and ctx.step == 2:
                ctx.request_stop("enough")
        ctx.checkpoint(force=True)
        done = ctx.step
    with RankContext.local(storage=tmp_path, stage="evaluate") as ctx:
        ctx.track(model=nn.Linear(1, 1))
        assert ctx.step == done
        loader = ctx.loader(TensorDataset(torch.arange(8)), global_batch_size=4)
        assert [ctx.step - done for _ in ctx.steps(loader, epochs=2)] == [1, 2, 3, 4]


def test_what_is_no_real_number_is_refused_as_a_metric() -> None:
    """Texts that spell one too, and numbers that no float can hold, before they are recorded."""
    texts = [np.str_("0.5"), np.bytes_(b"1"), np.array("a"), np.array(None)]
    others = [
        Decimal(1),
        np.complex64(1),
        np.timedelta64(3, "s"),
        torch.zeros((), device="meta"),
    ]
    too_large = [10**400, Fraction(10**400), 10**5000]
    says = [METRIC] * len(texts + others) + [
        r"metric 'accuracy' is a\w* \w+ that is too large for a float; report its logarithm"
    ] * len(too_large)
    with RankContext.local() as ctx:
        for value, message in zip([*texts, *others, *too_large], says, strict=True):
            with pytest.raises(InvalidParamsError, match=message):
                ctx.report(accuracy=value)


@pytest.mark.parametrize(
    "evil", ["\n", "\r", "\t", "\x1b[2K", "\x85", "\u2028", "\ud800"], ids=ascii
)
def test_a_metrics_name_with_control_characters_is_refused(evil: str) -> None:
    """`show` printed a name with a newline as two lines, and a terminal obeys others."""
    name = f"loss{evil}2"
    says = re.escape(f"the metric's name {name!r} has control characters: {evil[0]!r}; leave them")
    with RankContext.local() as ctx:
        with pytest.raises(ValueError, match=says):
            ctx.report(**{name: 0.5})
        ctx.report(**{"validation loss": 0.5, "val/größe": 1, "損失\u3000": 1})


def test_numbers_of_every_type_are_metrics(tmp_path: Path) -> None:
    """Those of Python, numpy and torch, whole or not, and truth values."""
    of_numpy = [kind(1) for kind in (*map(np.dtype, "?bBhHiIlLqQefdg"),) for kind in [kind.type]]
    of_torch = [
        torch.ones(()).to(dtype)
        for dtype in vars(torch).values()
        if isinstance(dtype, torch.dtype)
        and re.fullmatch(
            r"torch\.(bool|u?int(8|16|32|64)|b?float(8_e[45]m[23]\w*|16|32|64))", str(dtype)
        )
    ]
    values = [True, 1, 1.0, Fraction(1), *of_numpy, *map(np.array, of_numpy), *of_torch]
    with RankContext.local(storage=tmp_path) as ctx:
        ctx.report(**{f"m{number}": value for number, value in enumerate(values)})
    (record,) = read_records(DirectoryStorage(tmp_path), "local")
    assert set(record.metrics.values()) == {1.0}
    assert len(record.metrics) == len(values) > 40


def test_a_metric_that_is_reported_outside_a_training_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Once: no record takes it, and the report of evaluate has metrics of its own."""
    with RankContext.local(storage=tmp_path, stage="evaluate") as ctx:
        for _ in range(2):
            ctx.report(f1=0.5)
    said = "evaluate is none: return Report(num_samples=n, metrics={...}) from evaluate"
    assert caplog.text.count(said) == 1


def test_who_evaluates_does_not_end_a_training(tmp_path: Path) -> None:
    """In the midst of it, in a notebook for one: the training commits its next checkpoint, and
    nothing of it is changed."""
    policy = CheckpointParams(every_steps=1, every_s=None)
    with RankContext.local(storage=tmp_path, checkpoint=policy) as training:
        training.track(model=nn.Linear(1, 1))
        for _ in steps_over(training):
            if training.step == 3:
                chosen: Any = {"stage": "evaluate", "restore_step": 1}
                with RankContext.local(storage=tmp_path, **chosen) as evaluating:
                    evaluating.track(model=nn.Linear(1, 1))
                    assert evaluating.attempt == training.attempt == 1
    newest = max(path.name for path in (tmp_path / "runs/local/checkpoints").iterdir())
    assert newest == "step-00000004"


def test_data_and_source_are_what_was_given(tmp_path: Path) -> None:
    """A path, a URI or a storage, as image_folder takes it."""
    (tmp_path / "x").write_bytes(b"1")
    for source, expected in [
        (tmp_path, DirectoryStorage(tmp_path)),
        ("s3://bucket/raw", S3Storage("bucket", "raw")),
        (S3Storage("bucket", "raw"), S3Storage("bucket", "raw")),
    ]:
        with RankContext.local(data=tmp_path, source=source) as ctx:
            assert ctx.source == expected
            assert ctx.data_storage.read("x") == b"1"


def test_save_keeps_files_of_the_run(tmp_path: Path) -> None:
    """Bytes and text, in folders; anything else, and a path that leaves the results, is refused."""
    with RankContext.local(storage=tmp_path) as ctx:
        ctx.save("names.txt", "Zoë\n")
        ctx.save("plots/loss.bin", memoryview(b"ab"))
        for path in ("../x", "/etc/x", "C:/x", "a/../../x", "a\\b", ""):
            with pytest.raises(BadKeyError):
                ctx.save(path, "no")
        says = r"ctx.save\('scores.json'\) was given a dict; it takes bytes or text"
        with pytest.raises(InvalidParamsError, match=says):
            ctx.save("scores.json", {"accuracy": 1.0})
    results = tmp_path / "runs/local/results/000001"
    files = {path for path in results.rglob("*") if path.is_file()}
    assert {path.relative_to(results).as_posix(): path.read_bytes() for path in files} == {
        "names.txt": "Zoë\n".encode(),
        "plots/loss.bin": b"ab",
    }


# ---- Checkpoints on request.


def test_a_forced_checkpoint_is_of_the_steps_end(tmp_path: Path) -> None:
    """What the body does after asking is in it."""
    with RankContext.local(storage=tmp_path, checkpoint=CheckpointParams(every_s=None)) as ctx:
        model = nn.Linear(1, 1)
        ctx.track(model=model)
        for _ in steps_over(ctx):
            ctx.checkpoint(force=ctx.step == 2)
            with torch.no_grad():
                model.weight.fill_(ctx.step)
    steps = {
        int(path.parent.parent.name.removeprefix("step-")): torch.load(path)["weight"].item()
        for path in tmp_path.rglob("model.pt")
    }
    assert steps == {2: 2.0, 4: 4.0}


def test_checkpoints_come_by_time(tmp_path: Path) -> None:
    """As soon as so many seconds have passed."""
    policy = CheckpointParams(every_steps=None, every_s=1e-9, keep_last=9)
    with RankContext.local(storage=tmp_path, checkpoint=policy) as ctx:
        ctx.track(model=nn.Linear(1, 1))
        assert len(list(steps_over(ctx))) == 4
    assert len(list(tmp_path.rglob("manifest.json"))) == 4


@pytest.mark.parametrize("loops", [True, False], ids=["before its steps", "at its end"])
def test_a_resume_from_that_nothing_is_taken_from_is_refused(tmp_path: Path, loops: bool) -> None:
    """Without ctx.track a training would begin anew, and look as if it had been continued."""
    with (
        pytest.raises(InvalidParamsError, match="nothing was restored from it"),
        RankContext.local(storage=tmp_path, run_id="next", resume_from="first") as ctx,
    ):
        for _ in ctx.steps(total=1) if loops else ():
            pytest.fail("a step was made")
