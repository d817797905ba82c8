"""Shows how the stages of a workload are run on a rank, and what they may return."""

import json
import math
import re
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

from prefect_torch_ddp import RankContext, Report
from prefect_torch_ddp.checkpoint.attempts import claim_attempt
from prefect_torch_ddp.checkpoint.resume_point import ResumePoint
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.params import CheckpointParams
from prefect_torch_ddp.rank.config import RankConfig
from prefect_torch_ddp.rank.stages import run_stage, run_task, run_with_context
from prefect_torch_ddp.results import TrainingSummary
from prefect_torch_ddp.storage.directory import DirectoryStorage

returns = SimpleNamespace(train=None, evaluate=None, prepare="not a function")


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": 0}
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))


def config(folder: Path, stage: Any) -> RankConfig:
    """Describe a stage; a training claims the run's next attempt."""
    storage = DirectoryStorage(folder)
    attempt = claim_attempt(storage, "run") if stage == "train" else 1
    return RankConfig("run", attempt, stage, storage, dataset_id="points")


def outcome(folder: Path, stage: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a stage whose function returns the value."""
    monkeypatch.setattr(returns, stage, lambda _rank: value)
    return run_stage(config(folder, stage), f"{__name__}:returns")


def test_train_gives_plain_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON scalars; nan as text; nothing tracked is no checkpoint."""
    same = {"name": "x", "count": 3, "good": True, "none": None}
    values = {"accuracy": np.float64(0.5), "loss": math.nan, **same}
    found = outcome(tmp_path, "train", values, monkeypatch)
    assert found == {
        "value": {"accuracy": 0.5, "loss": "nan", **same},
        **dict.fromkeys(["num_steps", "num_epochs"], 0),
        **dict.fromkeys(["last_checkpoint", "best_checkpoint", "resumed_from_step"]),
        "model_uris": {},
    }
    assert type(found["value"]["accuracy"]) is float
    assert outcome(tmp_path, "train", None, monkeypatch)["value"] == {}


@pytest.mark.parametrize(
    ("stage", "value", "says"),
    [
        ("train", {"weights": torch.ones(2)}, r"'weights' as torch.Tensor.*ctx.track for models"),
        ("train", 0.5, "returned float; return a dict"),
        ("evaluate", 0.5, "returned float; return a prefect_torch_ddp.Report"),
    ],
)
def test_other_values_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, value: object, says: str
) -> None:
    """A tensor in the dict, no dict at all, no report."""
    with pytest.raises(TypeError, match=says):
        outcome(tmp_path, stage, value, monkeypatch)


def test_evaluate_gives_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the function made it."""
    report = Report(num_samples=2, accuracy=0.5)
    assert outcome(tmp_path, "evaluate", report, monkeypatch) == report


def test_a_report_whose_metric_has_a_newline_in_its_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`show` printed its score as two lines."""
    report = Report(num_samples=2, metrics={"top\n5": 0.5})
    with pytest.raises(ValueError, match=r"name 'top\\n5' has control characters: '\\n'"):
        outcome(tmp_path, "evaluate", report, monkeypatch)


def test_an_evaluation_of_another_model_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever forgets ctx.track, or tracks only something else, scores untrained weights."""

    def make(ctx: RankContext) -> None:
        ctx.track(model=nn.Linear(1, 1), seen=nn.Linear(2, 1))
        ctx.checkpoint(force=True)

    run_with_context(config(tmp_path, "train"), make)
    evaluates = config(tmp_path, "evaluate")
    point = ResumePoint(evaluates.storage, evaluates.run_id, step=0, attempt=1)
    chosen = replace(evaluates, restore=point)
    says = "evaluate restored no model of the checkpoint of step 0"
    for tracks, is_warned in [({}, True), ({"model": nn.Linear(1, 1)}, False)]:

        def evaluate(ctx: RankContext, given: Any = tracks) -> Report:
            ctx.track(**given)
            return Report(num_samples=2, accuracy=0.5)

        monkeypatch.setattr(returns, "evaluate", evaluate)
        caplog.clear()
        run_stage(chosen, f"{__name__}:returns")
        assert (says in caplog.text) is is_warned


@pytest.mark.parametrize("stage", ["train", "evaluate"])
def test_a_wrong_value_is_told_with_the_place_of_its_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """No traceback has it, since its frame is over; a callable without code has no place."""

    @torch.no_grad()
    def wrong(_ctx: RankContext) -> object:
        return object

    place = f"{wrong.__wrapped__.__code__.co_filename}:{wrong.__wrapped__.__code__.co_firstlineno}"
    monkeypatch.setattr(returns, stage, wrong)
    with pytest.raises(TypeError, match=re.escape(f"returns ({place}) returned type; return a")):
        run_stage(config(tmp_path, stage), f"{__name__}:returns")
    monkeypatch.setattr(returns, stage, partial(max, 1.0, key=lambda _ctx: 0))
    with pytest.raises(TypeError, match="returns returned float; return a"):
        run_stage(config(tmp_path, stage), f"{__name__}:returns")


def test_prepare_publishes_what_it_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dataset's id leads train to what prepare wrote."""
    monkeypatch.setattr(returns, "prepare", lambda ctx: (ctx.data / "x").write_text("made"))
    report = run_stage(config(tmp_path, "prepare"), f"{__name__}:returns")
    assert (report.dataset_id, report.num_files) == ("points", 1)
    found = run_with_context(config(tmp_path, "train"), lambda ctx: (ctx.data / "x").read_text())
    assert found == "made"


def one_dask_frame() -> Any:
    """Return one that is written if it is returned alone."""
    dd = pytest.importorskip("dask.dataframe")
    return dd.from_dict({"a": [1, 2]}, npartitions=1)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: {"train": one_dask_frame(), "test": one_dask_frame()}, "dict"),
        (lambda: (one_dask_frame(), one_dask_frame()), "tuple"),
        (lambda: pd.DataFrame({"a": [1]}), r"pandas\..*DataFrame"),
        (lambda: torch.ones(2), "torch.Tensor"),
        (lambda: np.ones(2), "numpy.ndarray"),
        (lambda: TensorDataset(torch.ones(2)), r"torch\..*TensorDataset"),
        (lambda: iter([1]), "list_iterator"),
    ],
    ids=["dict", "tuple", "pandas", "tensor", "array", "dataset", "iterator"],
)
@pytest.mark.parametrize("has_file", [True, False])
def test_data_that_prepare_returns_isnt_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any, kind: str, has_file: bool
) -> None:
    """Nobody writes it, so it is refused, even if there are files too."""

    def prepare(ctx: RankContext) -> Any:
        if has_file:
            (ctx.data / "x").write_text("made")
        return make()

    monkeypatch.setattr(returns, "prepare", prepare)
    with pytest.raises(
        TypeError, match=f"prepare of .*:returns returned {kind}, .*to ctx.data"
    ) as caught:
        run_stage(config(tmp_path, "prepare"), f"{__name__}:returns")
    assert "Return nothing, and write what train needs, also a few numbers" in str(caught.value)


@pytest.mark.parametrize("value", [None, 3, np.float32(3), "text", Path("x")])
def test_what_is_no_data_may_be_returned_by_prepare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: object
) -> None:
    """As the last line of a lambda does."""
    monkeypatch.setattr(returns, "prepare", lambda c: (c.data / "x").write_text("y") and value)
    assert run_stage(config(tmp_path, "prepare"), f"{__name__}:returns").num_files == 1


def test_a_workload_that_lacks_a_function_is_refused(tmp_path: Path) -> None:
    """Missing, not a function, no such object, nothing to prepare for."""
    for workload, message in [
        ("tests.workloads.plain", "has no function 'prepare'"),
        (f"{__name__}:returns", "has a str instead of a function 'prepare'"),
        (f"{__name__}:nothing", "has no 'nothing'"),
    ]:
        with pytest.raises(InvalidParamsError, match=message):
            run_stage(config(tmp_path, "prepare"), workload)


def arguments(ctx: RankContext, *args: Any, **kwargs: Any) -> Any:
    """Return them."""
    return ctx.stage, args, kwargs


def test_arguments_arrive_as_they_are(tmp_path: Path) -> None:
    """Whatever their names; functions also by import string."""
    kwargs = {"config": 1, "fn": 2, "args": 3, "kwargs": 4}
    task = config(tmp_path, "task")
    assert run_with_context(task, arguments, (1, 2), kwargs) == ("task", (1, 2), kwargs)
    assert run_with_context(task, f"{__name__}:arguments") == ("task", (), {})


@pytest.mark.parametrize(("rank", "expected"), [(0, 7), (1, None)])
def test_a_task_returns_what_rank_0_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, expected: object
) -> None:
    """The others' values, which nobody uses, can't fail it by a class that only they know."""
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run_task(config(tmp_path, "task"), lambda _ctx: 7) == expected


@pytest.mark.parametrize(
    ("evaluate_on", "step", "names"),
    [("last", 3, ["generator", "critic"]), ("best", 2, ["critic", "model"])],
)
def test_train_exports_each_module_of_the_checkpoint_that_is_evaluated(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    evaluate_on: Any,
    step: int,
    names: list[str],
) -> None:
    """The last one's or the best one's, each under its name, with a card that says what it is; the
    one called `model` is the model."""

    def train(ctx: RankContext) -> None:
        made = {name: ctx.wrap(nn.Linear(1, 1, bias=False)) for name in names}
        ctx.track(**made, optimizer=torch.optim.SGD(made[names[0]].parameters()))
        loader = ctx.loader(TensorDataset(torch.zeros(3)), global_batch_size=1)
        for _ in ctx.steps(loader, epochs=1):
            for number, each in enumerate(made.values()):
                with torch.no_grad():
                    each.weight.fill_(10 * number + ctx.step)
            ctx.report(accuracy=[0.1, 0.9, 0.5][ctx.step - 1])
            ctx.checkpoint(force=True)

    monkeypatch.setattr(returns, "train", train)
    policy = CheckpointParams(best_metric="accuracy", keep_last=5)
    changes = {"checkpoint": policy, "evaluate_on": evaluate_on, "options": {"lr": 1.0}}
    workload = f"{__name__}:returns"
    chosen = replace(config(tmp_path, "train"), dataset_id=None, **changes)
    uris = run_stage(chosen, workload)["model_uris"]
    folder = tmp_path / "runs/run/models/000001"
    assert uris == {name: f"{folder}/{name}.safetensors" for name in names}
    for number, (name, uri) in enumerate(uris.items()):
        assert load_file(uri)["weight"].item() == 10 * number + step
        card = json.loads((folder / f"{name}.json").read_bytes())
        assert (card["tracked_as"], card["file"]) == (name, f"{name}.safetensors")
        assert (card["step"], card["workload"]) == (step, workload)
        assert (card["options"], card["dataset"]) == ({"lr": 1.0}, None)
        assert card["metrics"] == {"accuracy": {2: 0.9, 3: 0.5}[step]}
        assert card["versions"]["torch"] == version("torch")
    summary = TrainingSummary.model_construct(model_uris=uris)
    assert summary.model_uri == uris.get("model")
