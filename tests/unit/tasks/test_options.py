"""Options: declared once, in the same words at every level, and refused by name."""

import functools
import os
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from pydantic import ValidationError

from prefect_torch_ddp import InvalidParamsError, RankContext, TrainParams, ddp_task
from prefect_torch_ddp.gang.checks import check_arguments, check_call, checked
from prefect_torch_ddp.params import ContextOptions, ContextParams, GangOptions, GangParams
from prefect_torch_ddp.protocol.call import Call
from prefect_torch_ddp.tasks.ddp_task import DdpTaskOptions
from prefect_torch_ddp.tasks.gangs.stage import options_of_stage
from prefect_torch_ddp.tasks.gangs.task_training import TaskParams


def fit(ctx: RankContext, lr: float = 0.1) -> float:
    """Be made a task."""
    return lr * ctx.world_size


@pytest.mark.parametrize(
    ("options", "params"), [(GangOptions, GangParams), (ContextOptions, ContextParams)]
)
def test_each_option_can_be_given_by_keyword(options: Any, params: Any) -> None:
    """Each keyword has its declared type, and `world_size` comes first for gangs."""
    declared, keywords = get_type_hints(params), get_type_hints(options)
    named = set(params.model_fields) - {"world_size"}
    widened = {"storage": str | os.PathLike[str]} if "storage" in named else {}
    assert keywords == {name: declared[name] for name in named} | widened
    assert set(TaskParams.model_fields) <= set(DdpTaskOptions.__annotations__)


def test_all_levels_have_all_options_of_a_gang() -> None:
    """The flow too, and with the same defaults but for three that say why they differ."""
    differing = {
        name
        for name, declared in GangParams.model_fields.items()
        if TrainParams.model_fields[name].default != declared.default
    }
    assert differing == {"world_size", "max_restarts", "progress_timeout_s"}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"checkpoint": {"every_step": 3}}, "checkpoint"),
        ({"sed": 1}, "there is no option sed; did you mean seed?"),
        ({"retrys": 2, "world_size": 0}, "world_size is 0.*; there is no option retrys"),
        ({"resources": {"GPU": 0}}, r"resources is \{.GPU.: 0\.0\}; give positive amounts"),
        ({"interface": ""}, "interface is ''; give an interface's name, e.g. 'ib0', or a network"),
        ({"interface": "10.1.0.0/99"}, "interface is '10.1.0.0/99', which is no network"),
        (
            {"determinism": "elastic", "virtual_ranks": 4, "world_size": 3},
            "virtual_ranks is 4 and world_size 3; give a world_size that divides",
        ),
        (
            {"process_group": "none", "collective_timeout_s": 5.0},
            "collective_timeout_s is 5, but with process_group=.none. there is no group",
        ),
    ],
)
def test_a_wrong_option_of_a_task_is_refused(options: dict[str, Any], says: str) -> None:
    """By its name and value, when the module is imported; also by with_options."""
    with pytest.raises(InvalidParamsError, match=says):
        ddp_task(**options)
    made: Any = ddp_task(fit)
    with pytest.raises(InvalidParamsError, match=says):
        made.with_options(**options)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        pytest.param(Path("/data/runs"), "/data/runs", id="absolute"),
        pytest.param(Path("~/runs"), "~/runs", id="home"),
        pytest.param(Path("s3-bucket/nightly"), "./s3-bucket/nightly", id="as_a_block_reads"),
        pytest.param("s3-bucket/nightly", "s3-bucket/nightly", id="text"),
    ],
)
def test_a_path_names_a_storage_and_never_a_block(given: Any, text: str) -> None:
    """Options that name a storage take a `pathlib.Path`, at each level."""
    made: Any = ddp_task(storage=given)(fit)
    assert made.params.storage == text
    params = TrainParams(storage=given, source=given)
    assert (params.storage, params.source) == (text, text)


def test_a_function_is_tested_by_its_own_call_with_a_context() -> None:
    """`fn` runs in the calling process, given a RankContext by position or by name."""
    made: Any = ddp_task(world_size=2)(fit)
    with RankContext.local() as ctx:
        assert made.fn(ctx, 0.5) == made.fn(ctx=ctx, lr=0.5) == 0.5
        assert made.fn(ctx) == 0.1


def test_a_function_called_without_a_context_names_both_ways() -> None:
    """The one for a test, and the one for a gang."""
    made: Any = ddp_task(world_size=2)(fit)
    says = r"fit\.fn was called without a RankContext.* RankContext\.local\(\).* fit\.submit"
    with pytest.raises(InvalidParamsError, match=says):
        made.fn(0.5)


def test_options_are_kept_and_changed() -> None:
    """Options of Prefect and ours are changed by name, and the others stay."""
    made: Any = ddp_task(world_size=2, seed=5, retries=1)(fit)
    changed = made.with_options(seed=6, retries=3, name="other")
    assert (made.params.seed, made.retries, made.name) == (5, 1, "fit")
    assert (changed.params.seed, changed.params.world_size) == (6, 2)
    assert (changed.retries, changed.name) == (3, "other")


@pytest.mark.parametrize(
    "function",
    [lambda: 0, lambda *, ctx: 0, lambda *args: 0],
    ids=["no argument", "a keyword", "*args"],
)
def test_a_function_without_a_context_is_refused(function: Any) -> None:
    """The import of the module shows the mistake."""
    says = r"<lambda> takes no positional argument.*takes a RankContext first"
    with pytest.raises(InvalidParamsError, match=says):
        ddp_task(world_size=2)(function)
    assert ddp_task(lambda ctx, /: 0).name == "<lambda>"


def test_arguments_that_do_not_fit_are_refused_in_a_line() -> None:
    """Prefect's own error would be shown with 80 lines of its frames."""

    def fit(ctx: RankContext, lr: float, epochs: int = 1) -> float:
        return lr * epochs

    def forgets_it(lr: float, epochs: int = 1) -> float:
        return lr * epochs

    takes, forgets = ddp_task(fit), ddp_task(forgets_it)
    after = r"; .* ctx, is the RankContext, and then it takes \(lr: float, epochs: int = 1\)$"
    for call, says in (
        (takes.submit, "^fit can't be called so: missing a required argument: 'lr'"),
        (lambda: takes(0.1, epoch=2), "got an unexpected keyword argument 'epoch'"),
        (lambda: takes.map([0.1], 2, 3), "too many positional arguments"),
    ):
        with pytest.raises(InvalidParamsError, match=says + after):
            call()
    with pytest.raises(
        InvalidParamsError, match=r"first argument: write `def .*\(ctx, lr, epochs\)"
    ):
        forgets.submit(lr=0.1)


@pytest.mark.parametrize("storage", ["ftp://x", "S3-bucket/x", "s3:/bucket", "s3//bucket"])
def test_what_names_no_storage_is_refused_where_the_task_is_made(storage: str) -> None:
    """And where its options are changed; not by its first task run, said three times."""
    with pytest.raises(InvalidParamsError, match=r"write|names no block"):
        ddp_task(world_size=2, storage=storage)(fit)
    with pytest.raises(InvalidParamsError, match=r"write|names no block"):
        ddp_task(world_size=2)(fit).with_options(storage=storage)  # type: ignore[call-arg]
    for known in ("s3://bucket/runs", "s3-bucket/name", "runs", "/proc/runs"):
        assert ddp_task(world_size=2, storage=known)(fit)


def test_methods_and_functions_whose_call_runs_nothing_are_refused() -> None:
    """A method would get the context as `self`; a coroutine or a generator can't be sent home."""

    class Trainer:
        def fit(self, ctx: RankContext) -> None: ...

    async def later(ctx: RankContext) -> None: ...

    def several(ctx: RankContext) -> Any:
        yield ctx

    for function, says in (
        (Trainer.fit, r"Trainer\.fit is a method, .* RankContext as self"),
        (later, "later is a coroutine function, whose call runs nothing"),
        (several, "several is a generator function"),
    ):
        made: Any = function
        with pytest.raises(InvalidParamsError, match=says):
            ddp_task(made)
        if function is not Trainer.fit:
            with pytest.raises(InvalidParamsError, match=says):
                check_call(made, (), None)


def test_arguments_that_do_not_fit_are_refused_before_ranks_start() -> None:
    """A plain function's; what a decorator made may add arguments of its own."""

    def fit(lr: float, *, epochs: int = 1) -> float:
        return lr * epochs

    def train(ctx: RankContext) -> None:
        del ctx

    @functools.wraps(fit)
    def decorated() -> float:
        return fit(0.1)

    for function, args, kwargs, says in (
        (fit, (), {}, r"fit\(\) can't be called .*'lr'; give them as args=\(\.\.\.\)"),
        (fit, (0.1, 2), {}, "fit.*too many positional arguments"),
        (fit, (0.1,), {"epoch": 2}, "fit.*unexpected keyword argument 'epoch'"),
        (train, (), {}, "'ctx'; run_gang passes no RankContext: make it a ddp_task"),
    ):
        with pytest.raises(InvalidParamsError, match=says):
            check_arguments(Call(function, args, kwargs))
    check_arguments(Call(fit, (0.1,), {"epochs": 2}))
    check_arguments(Call(decorated))
    check_arguments(Call(functools.partial(fit, 0.1)))
    check_arguments(Call(max, (1, 2)))


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"worldsize": 2}, "worldsize"),
        ({"workload": "not a module"}, "workload is 'not a module'"),
        ({"evaluate_on": "best"}, "checkpoint.best_metric is empty"),
        (
            {"cluster": {"address": "tcp://x:1", "cluster_class": "a.B"}},
            "leave cluster_class and cluster_kwargs empty",
        ),
        ({"cluster": {"address": "tcp://x:1", "adapt_kwargs": {"minimum": 1}}}, "and adapt_kwargs"),
        ({"cluster": {"scheduler_file": "x", "cluster_class": "a.B"}}, "scheduler_file names a"),
        ({"cluster": {"scheduler_file": "x", "address": "tcp://x:1"}}, "give only one"),
        ({"determinism": "elastic"}, "virtual_ranks is empty: give the most ranks"),
    ],
)
def test_a_wrong_parameter_of_a_run_is_refused(params: dict[str, Any], says: str) -> None:
    """An unknown or impossible one, by name, also when a deployment gives it."""
    with pytest.raises(ValidationError, match=says):
        TrainParams.model_validate(params)


def test_a_forms_texts_are_read_as_numbers() -> None:
    """A run's parameters may come as JSON or from an automation's template; a call's may not."""
    assert TrainParams.model_validate({"world_size": "3"}).world_size == 3
    with pytest.raises(InvalidParamsError, match="world_size is '3'"):
        checked(GangParams, {"world_size": "3"})


def test_only_a_training_grows() -> None:
    """A dataset is prepared by one rank, and an evaluation has no checkpoint to continue from."""
    params = TrainParams(world_size=2, max_world_size=4)
    prepared, evaluated = options_of_stage(params, 1), options_of_stage(params, 4)
    assert prepared["max_world_size"] is evaluated["max_world_size"] is None
    assert (prepared["min_world_size"], evaluated["min_world_size"]) == (1, 2)
