"""What a gang runs on every rank: a user's function, or a workload's stage, with a RankContext."""

import inspect
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from prefect_torch_ddp.data.datasets.dataset_store import publish_dataset
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.lazy import exported_by
from prefect_torch_ddp.protocol.events import NO_RANK, FunctionEnded
from prefect_torch_ddp.protocol.prepared import LazyDataset
from prefect_torch_ddp.rank.assembly import ContextAssembly
from prefect_torch_ddp.rank.config import RankConfig, RankInfo
from prefect_torch_ddp.rank.context import RankContext
from prefect_torch_ddp.rank.distributed import current_device
from prefect_torch_ddp.rank.generators import seed_stage
from prefect_torch_ddp.rank.lazy_dataset import is_collection, kind_of, lazy_dataset
from prefect_torch_ddp.rank.link import current_link
from prefect_torch_ddp.rank.named_metrics import refuse_control
from prefect_torch_ddp.rank.user_code import resolve
from prefect_torch_ddp.refusals import in_words
from prefect_torch_ddp.results import DatasetReport, Report

M = TypeVar("M", bound=BaseModel)

LEFT = (
    "evaluate restored no model of the checkpoint of step %d: unless it loads the trained model by "
    "itself, its scores are those of another one. Track the model there too, by the same name: "
    "ctx.track(model=model)"
)

logger = logging.getLogger(__name__)


def run_with_context(
    config: RankConfig,
    fn: Callable[..., Any] | str,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Call `fn(context, *args, **kwargs)` on this rank; `fn` may be `"package.module:function"`."""
    function = resolve(fn) if isinstance(fn, str) else fn
    assembly = _assembly(config)
    with RankContext(assembly) as context:
        value = function(context, *args, **(kwargs or {}))
        current_link().send(FunctionEnded(NO_RANK))
        return value


def run_task(*call: Any) -> Any:
    """Call a `ddp_task`'s function as `run_with_context` does; return only rank 0's value.

    Another rank's would be of no use, and could only fail on its way.
    """
    value = run_with_context(*call)
    return value if RankInfo.from_environment().rank == 0 else None


def run_stage(
    config: RankConfig, workload: str
) -> DatasetReport | LazyDataset | Report | dict[str, Any]:
    """Run the stage of a workload, `package.module` or `package.module:object`.

    Returns:
        The DatasetReport of prepare, or the Dask collection that it returned; the Report of
        evaluate; or of train a dict with `value`, what `ContextAssembly.outcome` gives, and
        `model_uris`; checkpoints are None, and models missing, except on rank 0.

    Raises:
        InvalidParamsError: the workload has no such function.
        TypeError: the function returned something else than its stage gives.
    """
    function = stage_function(workload, config.stage)
    if config.stage == "prepare":
        return _prepare(config, function, workload)
    assembly = _assembly(config)
    with RankContext(assembly) as context:
        value = function(context)
        current_link().send(FunctionEnded(NO_RANK))
        told = _with_place(workload, function)
        if config.stage == "evaluate":
            report = _report(value, told)
            if config.restore is not None and assembly.left:
                logger.warning(LEFT, config.restore.step)
            return report
        values = _returned_values(value, told)
    uris = assembly.export_models(workload, values)
    return {"value": values, **assembly.outcome(), "model_uris": uris}


def stage_function(workload: str, stage: str) -> Callable[..., Any]:
    """Return a workload's function of a stage."""
    function = getattr(resolve(workload), stage, None)
    if not callable(function):
        what = "has no" if function is None else f"has a {type(function).__name__} instead of a"
        defines = "a workload defines prepare(ctx), train(ctx) and evaluate(ctx)"
        msg = f"workload {workload!r} {what} function {stage!r}: {defines}"
        raise InvalidParamsError(msg)
    return function  # type: ignore[no-any-return]


@exported_by("prefect_torch_ddp")
def read_options(model: type[M], options: Mapping[str, Any]) -> M:
    """Return the options as a model, so that a misspelt name raises an error.

    Args:
        model: a subclass of `prefect_torch_ddp.Params` with a field for each option, which has its
            default and limits.
        options: `ctx.options`.

    Raises:
        InvalidParamsError: an option is unknown, missing or out of its limits. The message names
            it and lists the known options.

    Example:
        In a workload:

            from prefect_torch_ddp import Params, read_options

            class Options(Params):
                epochs: int = 10
                lr: float = 0.1

            options = read_options(Options, ctx.options)
            print(options.epochs, options.lr)
    """
    try:
        return model.model_validate(dict(options))
    except ValidationError as error:
        known = ", ".join(model.model_fields)
        msg = f"the workload's options can't be used: {in_words(error, model)}; there are {known}"
        raise InvalidParamsError(msg) from None  # pydantic's text says no more


def _assembly(config: RankConfig, data: Path | None = None) -> ContextAssembly:
    seed_stage(config.seed, config.stage)
    info = RankInfo.from_environment()
    return ContextAssembly(config, info, current_link(), device=current_device(), folder=data)


def _prepare(
    config: RankConfig, function: Callable[..., Any], workload: str
) -> DatasetReport | LazyDataset:
    if config.dataset_id is None:
        msg = f"run {config.run_id} has no dataset_id to prepare a dataset for"
        raise InvalidParamsError(msg)

    def write(folder: Path) -> None:
        with RankContext(_assembly(config, data=folder)) as context:
            value = function(context)
        if (lazy := _lazy_dataset(value, workload)) is None:
            return
        if any(folder.iterdir()):
            msg = (
                "prepare wrote files to ctx.data and returned a Dask collection: do one of the two"
            )
            raise InvalidParamsError(msg)
        raise _ReturnedLazyError(lazy)

    try:
        return publish_dataset(config.storage, config.dataset_id, write)
    except _ReturnedLazyError as returned:
        return returned.dataset


class _ReturnedLazyError(Exception):
    """Leaves the folder that files are prepared in: there are none."""

    def __init__(self, dataset: LazyDataset) -> None:
        super().__init__()
        self.dataset = dataset


def _lazy_dataset(value: object, workload: str) -> LazyDataset | None:
    """Return a Dask collection pickled; refuse data that nobody would write."""
    if not is_collection(value):
        _refuse_data(value, kind_of(value).removeprefix("builtins."), workload)
        return None
    return lazy_dataset(value, "prepare returned", ", or write files to ctx.data")


def _refuse_data(value: object, kind: str, workload: str) -> None:
    """Refuse a collection of any kind; a number or a path that a last line left is no data."""
    has_items = hasattr(type(value), "__len__") or hasattr(type(value), "__iter__")
    if has_items and not isinstance(value, str | bytes):
        msg = (
            f"prepare of {workload} returned {kind}, which nobody keeps. Return nothing, and write "
            "what train needs, also a few numbers, as files to ctx.data; or return one Dask "
            "DataFrame, Array or Bag, or one xarray Dataset"
        )
        raise TypeError(msg)


def _with_place(workload: str, function: Callable[..., Any]) -> str:
    """Return the workload's name with where its function begins: its frame is over by now."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return workload if code is None else f"{workload} ({code.co_filename}:{code.co_firstlineno})"


def _report(value: Any, workload: str) -> Report:
    if isinstance(value, Report):
        for name in value.metrics:
            refuse_control(name)
        return value
    kind = type(value).__name__
    msg = f"evaluate of {workload} returned {kind}; return a prefect_torch_ddp.Report"
    raise TypeError(msg)


def _returned_values(value: Any, workload: str) -> dict[str, float | int | str | bool | None]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        msg = f"train of {workload} returned {type(value).__name__}; return a dict of plain values"
        raise TypeError(msg)
    return {str(key): _returned_value(key, item, workload) for key, item in value.items()}


def _returned_value(key: object, value: Any, workload: str) -> float | int | str | bool | None:
    if isinstance(value, float):  # numpy's float64 is one too
        return float(value) if math.isfinite(value) else str(value)  # JSON has no nan
    if value is None or isinstance(value, bool | int | str):
        return value
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    msg = (
        f"train of {workload} returned {key!r} as {kind}; its values are numbers, texts, booleans "
        "or None: use .item() on a tensor, ctx.save for files, ctx.track for models"
    )
    raise TypeError(msg)
