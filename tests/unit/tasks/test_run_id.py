"""Which training a task run or a flow run is."""

import pickle
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import cloudpickle
import numpy as np
import pytest
import torch
from prefect.cache_policies import INPUTS, TASK_SOURCE
from pydantic import BaseModel
from torch.utils.data import Dataset, TensorDataset

from prefect_torch_ddp import InvalidParamsError, RankContext, ddp_script
from prefect_torch_ddp.protocol.call import Call
from prefect_torch_ddp.tasks.gangs.task_training import TaskCode, TaskParams, task_run_id
from prefect_torch_ddp.tasks.train_run import run_id_of

FLOW_RUN = UUID("01989fd2-7b1e-7c3a-9f00-1b2c3d4e5f60")
TASK_RUN = UUID("01989fd2-7b1e-7c3a-9f00-a1a2a3a4a5a6")
KEYED = TaskParams(run_key="night")


@dataclass(slots=True)
class Shape:
    """A dataclass."""

    size: int


@dataclass(frozen=True)
class Classes:
    """One that can be a key."""

    of: frozenset[Any]


class Model(BaseModel):
    """A model of pydantic's."""

    of: Any


@dataclass
class Other(Shape):
    """One of the same fields."""


def first(_x: float) -> None:
    """Be an argument."""


def second(_x: float) -> None:
    """Be another one."""


FUNCTION = TaskCode("module", "module:fit", None)


def name_of(
    params: TaskParams,
    *args: Any,
    flow_run: UUID = FLOW_RUN,
    name: str = "fit",
    code: TaskCode = FUNCTION,
    fn: Callable[..., None] = first,
    **kwargs: Any,
) -> str:
    """Name the training of a call."""
    task_run = SimpleNamespace(id=TASK_RUN, flow_run_id=flow_run)
    context: Any = SimpleNamespace(task=SimpleNamespace(name=name), task_run=task_run)
    return task_run_id(context, params, code, Call(fn, args, kwargs))


def test_runs_that_are_scheduled_together_are_told_apart() -> None:
    """The ends of ids count, since Prefect's ids of one minute begin in the same way."""
    other = UUID("01989fd2-7b1e-7c3a-9f00-ffffffffffff")
    assert run_id_of("Nightly run", FLOW_RUN) == "nightly-run-1b2c3d4e5f60"
    assert run_id_of("Nightly run", other) != run_id_of("Nightly run", FLOW_RUN)


def test_without_a_key_each_task_run_is_a_training() -> None:
    """Whatever its arguments."""
    assert name_of(TaskParams(), 1) == name_of(TaskParams(), 2) == "fit-a1a2a3a4a5a6"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 2),
        (1, 1.0),
        (np.int64(1), np.int64(2)),
        (np.arange(3), np.array([0, 1, 5])),
        (torch.ones(2), torch.zeros(2)),
        (first, second),
        (timedelta(1), timedelta(2)),
        (Decimal("0.1"), Decimal("0.9")),
        (Shape(1), Shape(2)),
        ([Shape(1)], [Other(1)]),
        ({1}, frozenset({1})),
        ([1], (1,)),
        (torch.ones(2), torch.ones(2, 1)),
        (torch.ones(2), torch.ones(2, dtype=torch.float64)),
        ({"lr": 0.1}, {"lr": 0.9}),
    ],
    ids=[
        *("whole numbers", "1 and 1.0", "NumPy scalars", "arrays", "tensors", "functions"),
        *("durations", "decimals", "objects", "classes", "a set and a frozenset"),
        *("a list and a tuple", "shapes of tensors", "dtypes of tensors", "dicts"),
    ],
)
def test_other_arguments_are_another_training(one: Any, other: Any) -> None:
    """Whatever their types: no fold resumes another's checkpoint."""
    assert name_of(KEYED, one) == name_of(KEYED, one)
    assert name_of(KEYED, one) != name_of(KEYED, other)
    assert name_of(KEYED, x=one) != name_of(KEYED, x=other)


def linear() -> torch.nn.Module:
    """Make a module of certain weights."""
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    torch.nn.init.ones_(module[0].weight)
    torch.nn.init.zeros_(module[0].bias)
    return module


def samples() -> Dataset[Any]:
    """Make a dataset."""
    return TensorDataset(torch.arange(6.0), torch.arange(12).reshape(6, 2))


EQUAL_ARGUMENTS: dict[str, Callable[[], Any]] = {
    "tensor": lambda: torch.tensor([1.0, 2.0]),
    "0-d bfloat16 tensor": lambda: torch.tensor(1, dtype=torch.bfloat16),
    "non-contiguous tensor": lambda: torch.arange(12.0)[::2].reshape(2, 3).T,
    "sparse tensor": lambda: torch.eye(3).to_sparse(),
    "parameter": lambda: torch.nn.Parameter(torch.ones(2)),
    "module": linear,
    "dataset": samples,
    "subset": lambda: torch.utils.data.Subset(samples(), [2, 1]),
    "optimizer state": lambda: torch.optim.SGD(linear().parameters(), lr=0.1).state_dict(),
    "set": lambda: {"class_a", "class_b", "class_c"},
    "frozenset in a dict": lambda: {"classes": frozenset({("a", 1), ("b", 2)})},
    "array in Fortran order": lambda: np.asfortranarray(np.arange(6).reshape(2, 3)),
    "array of objects": lambda: np.array(["a", None]),
    "object": lambda: Shape(3),
    "text that isn't interned": lambda: "l" + str(1),
}


@pytest.mark.parametrize("make", EQUAL_ARGUMENTS.values(), ids=EQUAL_ARGUMENTS)
def test_equal_arguments_are_one_training(make: Callable[[], Any]) -> None:
    """By content, wherever in memory it is, and also when it was sent to a Dask worker."""
    one = make()
    sent = pickle.loads(pickle.dumps((one, [one])))
    assert name_of(KEYED, make(), [make()]) == name_of(KEYED, one, [one]) == name_of(KEYED, *sent)


def test_order_does_not_count_and_what_contains_itself_can_be_an_argument() -> None:
    """Of a mapping or of keywords, as `==` has it; and a module that knows its parent, whose digest
    needn't be the same elsewhere."""
    assert name_of(KEYED, a={"x": 1, "y": 2}, b=3) == name_of(KEYED, b=3, a={"y": 2, "x": 1})
    values: list[Any] = [1]
    values.append({"itself": values})
    assert name_of(KEYED, values) == name_of(KEYED, values) != name_of(KEYED, 1)


@pytest.mark.parametrize(
    "changed",
    [
        {"run_key": "day"},
        {"seed": 1},
        {"options": {"lr": 0.9}},
        {"resume_from": "other-run"},
        {"determinism": "elastic", "virtual_ranks": 4},
    ],
)
def test_other_options_are_another_training(changed: dict[str, Any]) -> None:
    """All that changes what is trained; by whom and how long it is waited for doesn't."""
    assert name_of(TaskParams(**{"run_key": "night", **changed}), 1) != name_of(KEYED, 1)


def test_a_key_counts_within_its_flow_run_and_task() -> None:
    """The next night trains from the start, and the number of ranks and restarts may change."""
    named = name_of(KEYED, 1)
    assert named.startswith("fit-night-")
    assert name_of(TaskParams(run_key="night", world_size=3, max_restarts=1), 1) == named
    assert name_of(KEYED, 1, flow_run=TASK_RUN) != named
    assert name_of(KEYED, 1, name="other") != named


def made_with(loss: Any) -> Callable[..., None]:
    """Make a function that differs by what it encloses."""

    def fit(_ctx: object) -> Any:
        return loss

    return fit


@pytest.mark.parametrize(
    "enclose",
    [
        lambda value: value,
        lambda value: [(value,)],
        lambda value: {value: 2},
        lambda value: {Classes(frozenset({value})): 2},
        lambda value: Model(of=value),
    ],
    ids=["itself", "a part", "a key", "in a key", "in a model"],
)
def test_kinds_of_enclosed_values_count(enclose: Callable[[Any], Any]) -> None:
    """Also where Python or JSON takes one for the other."""
    values: list[Any] = [1, 1.0, True, "1", b"1", 1 + 0j, Decimal(1), np.int64(1), (1,), None]
    values += [frozenset({1}), torch.float16, torch.float32, torch.device("cpu")]
    names = [name_of(KEYED, 1, fn=made_with(enclose(each))) for each in values]
    assert len(set(names)) == len(values)
    assert names == [name_of(KEYED, 1, fn=made_with(enclose(each))) for each in values]


def test_an_enclosed_iterator_is_left_to_the_function() -> None:
    """A task's name reads none of it; nor the content of a tensor that has none."""
    values = (i for i in range(3))
    for each in (values, torch.empty((), device="meta")):
        assert name_of(KEYED, 1, fn=made_with(each)) == name_of(KEYED, 1, fn=made_with(each))
    assert [*values] == [0, 1, 2]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (b"\xff", b"\xfe"),
        ({"mean": [b"\xff"]}, {"mean": [b"\xfe"]}),
        ({frozenset("ab"): 1}, {frozenset("ab"): 2}),
        (Shape(b"\xff"), Shape(b"\xfe")),  # type: ignore[arg-type]
        ({("a", frozenset("b")): 1}, {("a", frozenset("b")): 2}),
        ({("a", frozenset("bc")): 1}, {("a", frozenset("bd")): 1}),
        ({(b"\xff", (1, frozenset("b"))): 1}, {(b"\xfe", (1, frozenset("b"))): 1}),
        ([{("a", frozenset("b")): 1}, 1.5], [{("a", frozenset("b")): 1}, 2.5]),
        (Shape({("a", frozenset("b")): 1}), Shape({("a", frozenset("b")): 2})),  # type: ignore[arg-type]
        (Model(of={("a", frozenset("b")): 1}), Model(of={("a", frozenset("b")): 2})),
        ({"\ud800": 1}, {"\ud800": 2}),
    ],
    ids=[
        *("bytes", "nested bytes", "sets as keys", "an object with bytes", "a tuple as a key"),
        *("sets in a key", "bytes in a key", "beside such a key", "such a key in an object"),
        *("such a key in a model", "half a character"),
    ],
)
def test_functions_are_told_apart_by_values_that_json_has_no_form_of(one: Any, other: Any) -> None:
    """Never does the task that has one resume the checkpoints of the one that has the other."""
    named = name_of(KEYED, 1, fn=made_with(one))
    assert named == name_of(KEYED, 1, fn=made_with(pickle.loads(pickle.dumps(one))))
    assert named != name_of(KEYED, 1, fn=made_with(other))


LOADED = """
class Mean:
    def __init__(self, value):
        self.value = value

def made_with(loss):
    def fit(_ctx):
        return loss
    return fit

values = [Mean]
values.append(values)
LOSSES = {
    "bytes and a class": {"mean": b"\\xff", "by": Mean},
    "bytes and an object": [b"\\xff", Mean(1)],
    "bytes and a function": (b"\\xff", made_with),
    "sets as keys": {frozenset({Mean, int}): {Mean}, frozenset({Mean(1), "a"}): 2},
    "what contains itself": values,
    "classes in a set": {"of": {Mean, int, made_with}},
    "sets in keys": {("a", frozenset({Mean, int})): 1, (Mean(1), frozenset("a")): 2},
}
"""


@pytest.mark.parametrize(
    "kind",
    [
        *("bytes and a class", "bytes and an object", "bytes and a function"),
        *("sets as keys", "what contains itself", "classes in a set"),
        "sets in keys",
    ],
)
def test_a_file_under_another_name_makes_the_same_function(tmp_path: Path, kind: str) -> None:
    """As a flow that is retried in another process loads it, whatever the function encloses."""
    (tmp_path / "losses.py").write_text(LOADED, encoding="utf-8")
    names = set()
    for module in ("a_losses", "z_losses"):
        spec = spec_from_file_location(module, tmp_path / "losses.py")
        assert spec is not None
        assert spec.loader is not None
        spec.loader.exec_module(loaded := module_from_spec(spec))
        names.add(name_of(KEYED, 1, fn=loaded.made_with(loaded.LOSSES[kind])))
    assert len(names) == 1


@pytest.mark.parametrize(
    "enclose",
    [
        lambda values: {"of": values},
        lambda values: [values, b"\xff"],
        lambda values: ({"x": (values,)},),
        Shape,
        lambda values: {frozenset(values): 1},
        lambda values: {("a", frozenset(values)): 1},
        lambda values: {Classes(frozenset(values)): 1},
    ],
    ids=[
        *("in a dict", "beside bytes", "deeper", "in an object", "as a key", "in a key"),
        "in an object that is a key",
    ],
)
def test_the_order_of_enclosed_sets_does_not_count(enclose: Callable[[Any], Any]) -> None:
    """It is another one in each process."""
    one, other = {0, 8}, {8, 0}
    assert list(one) != list(other)
    named = name_of(KEYED, 1, fn=made_with(enclose(one)))
    assert named == name_of(KEYED, 1, fn=made_with(enclose(other)))
    assert named != name_of(KEYED, 1, fn=made_with(enclose({0, 9})))


def test_a_function_may_enclose_what_is_not_assigned_or_contains_itself() -> None:
    """Neither keeps a task from having a name."""
    values: list[Any] = [1]
    values.append(values)
    for each in (
        values,
        [{("a", frozenset("b")): values}],
        deque([{(frozenset("b"),): 1}, values]),
    ):
        assert name_of(KEYED, 1, fn=made_with(each)) == name_of(KEYED, 1, fn=made_with(each))

    def fit(_ctx: object) -> Any:
        return later

    assert name_of(KEYED, 1, fn=fit) == name_of(KEYED, 1, fn=fit)
    later = 1


def test_tasks_of_one_name_are_told_apart_by_their_functions() -> None:
    """By their names, and by what a function that made them gave them; not by an object's address:
    a flow that is retried in another process finds its training."""
    makes: list[Any] = ["l1", 1, "1", {"loss": "l1"}, {("a", 1): 2}, first, second, Shape, Shape(1)]
    makes += [Shape(2), Path("a"), Path("b"), Decimal(1), np.int64(1), np.int64(2), {"a", "b"}]
    makes += [torch.ones(()), torch.ones(2), float("nan"), partial(first, 1), (1, 2), [1, 2]]
    functions = [first, second, *map(made_with, makes), partial(first, 1), partial(first, 2)]
    named = [name_of(KEYED, 1, fn=each) for each in functions]
    assert len(set(named)) == len(functions)
    assert named[2:-2] == [name_of(KEYED, 1, fn=made_with(each)) for each in makes]
    for one, other in ((torch.ones(2), torch.zeros(2)), (object(), object())):
        assert name_of(KEYED, 1, fn=made_with(one)) == name_of(KEYED, 1, fn=made_with(other))
    moved = pickle.loads(cloudpickle.dumps(functions[2]))
    moved.__module__ = "loaded_under_another_name"
    assert name_of(KEYED, 1, fn=moved) == named[2]


@pytest.mark.parametrize("name", ["args", "resume_args"])
@pytest.mark.parametrize("given", ["--resume", iter(["--resume"])], ids=["a text", "an iterator"])
def test_a_scripts_arguments_are_a_list(name: str, given: Any) -> None:
    """A text would be split into characters, at the first restart."""
    with pytest.raises(InvalidParamsError, match=rf"^{name} is .*; give a list of arguments"):
        ddp_script("-m train", **{name: given})


def test_a_list_that_is_changed_later_changes_no_task_that_was_made_of_it(tmp_path: Path) -> None:
    """What its script gets is what its training is named after."""
    script, args = tmp_path / "train.py", [tmp_path / "got", 0.1]
    script.write_text("import sys, pathlib; pathlib.Path(sys.argv[1]).write_text(sys.argv[2])")
    task: Any = ddp_script(script, args)
    args[1] = 0.01
    with RankContext.local() as ctx:
        task.fn(ctx)
    assert (tmp_path / "got").read_text() == task.code.script_args[0][1] == "0.1"


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Make tasks of scripts in two folders, all of one name."""
    monkeypatch.chdir(tmp_path)
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "train.py").write_text("print(1)")
    policy = INPUTS + TASK_SOURCE
    return lambda *given, **options: ddp_script(*given, cache_policy=policy, **options)


SCRIPTS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    (("one/train.py", ["--lr", 0.1]), {}),
    (("one/train.py", ["--lr", 0.2]), {}),
    (("one/train.py", ["--lr"]), {"resume_args": [0.1]}),
    (("two/train.py", ["--lr", 0.1]), {}),
    (("-m one.train", ["--lr", 0.1]), {}),
]


def test_another_script_or_other_arguments_are_another_training(
    scripts: Callable[..., Any], tmp_path: Path
) -> None:
    """For a run_key and for Prefect's cache, to which all scripts are one function."""
    tasks = [scripts(*given, **options) for given, options in SCRIPTS]

    def key_of(task: Any) -> str:
        return str(task.cache_policy.compute_key(SimpleNamespace(task=task), {}, {}))

    for call in (lambda task: name_of(KEYED, name="train", code=task.code), key_of):
        assert len({call(task) for task in tasks}) == len(tasks)
        (given, options), *_ = SCRIPTS
        assert call(scripts(*given, **options)) == call(tasks[0])
    before = key_of(tasks[0])
    (tmp_path / "one" / "train.py").write_text("print(2)")
    assert key_of(tasks[0].with_options(retries=1)) != before, "the script was edited"
