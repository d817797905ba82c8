"""Owns the functions that a gang runs on every rank: a user's function or a workload's stage, with a RankContext."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from prefect_torch_ddp.data.dataset_store import prepare_folder, publish_dataset
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.rank.config import RankConfig
from prefect_torch_ddp.rank.context import RankContext
from prefect_torch_ddp.rank.device import current_device
from prefect_torch_ddp.rank.link import current_link
from prefect_torch_ddp.rank.seeding import seed_stage
from prefect_torch_ddp.rank.state import Place
from prefect_torch_ddp.rank.workload import resolve, stage_function
from prefect_torch_ddp.results import DatasetReport, Report


def run_with_context(
    config: RankConfig, fn: Callable[..., Any] | str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> Any:
    """Call `fn(context, *args, **kwargs)` on this rank and return its value.

    Args:
        config: equal on all ranks.
        fn: a callable or `"package.module:function"`.
        args: its positional arguments after the context.
        kwargs: its keyword arguments.
    """
    function = resolve(fn) if isinstance(fn, str) else fn
    with _context(config) as context:
        value = function(context, *args, **(kwargs or {}))
        current_link().function_ended()
        return value


def run_stage(config: RankConfig, workload: str) -> DatasetReport | Report | dict[str, Any]:
    """Run the stage of a workload that the config names.

    Args:
        config: equal on all ranks.
        workload: `package.module` or `package.module:object`.

    Returns:
        The DatasetReport of prepare, the Report of evaluate, or of train a dict with `value`, `num_steps`, `num_epochs`,
        `last_checkpoint`, `best_checkpoint`, `resumed_from_step` and `model_uri`; checkpoints and model are None except on
        rank 0.

    Raises:
        InvalidParamsError: the workload has no such function.
        TypeError: the function returned something else than its stage gives.
    """
    function = stage_function(workload, config.stage)
    if config.stage == "prepare":
        return _prepare(config, function)
    with _context(config) as context:
        value = function(context)
        current_link().function_ended()
        if config.stage == "evaluate":
            return _report(value, workload)
        plain = _plain_values(value, workload)
    return {"value": plain, **context.outcome(), "model_uri": context.export_model(workload)}


def _prepare(config: RankConfig, function: Callable[..., Any]) -> DatasetReport:
    if config.dataset_id is None:
        msg = f"run {config.run_id} has no dataset_id to prepare a dataset for"
        raise InvalidParamsError(msg)
    with prepare_folder(config.storage, config.dataset_id) as folder:
        with _context(config, data=folder) as context:
            function(context)
        return publish_dataset(config.storage, config.dataset_id, folder)


@contextmanager
def _context(config: RankConfig, data: Path | None = None) -> Iterator[RankContext]:
    seed_stage(config.seed, config.stage)
    with RankContext(config, Place.from_environment(), device=current_device(), link=current_link(), data=data) as context:
        yield context


def _report(value: Any, workload: str) -> Report:
    if isinstance(value, Report):
        return value
    if isinstance(value, Mapping):
        try:
            return Report.model_validate(dict(value))
        except ValidationError as error:
            msg = f"evaluate of {workload} returned a dict that is no Report: {error}"
            raise TypeError(msg) from error
    msg = f"evaluate of {workload} returned {type(value).__name__}; return a prefect_torch_ddp.Report"
    raise TypeError(msg)


def _plain_values(value: Any, workload: str) -> dict[str, float | int | str | bool | None]:
    """Return the dict that train returned; None counts as an empty one."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        msg = f"train of {workload} returned {type(value).__name__}; return a dict of plain values"
        raise TypeError(msg)
    return {str(key): _plain_value(key, item, workload) for key, item in value.items()}


def _plain_value(key: object, value: Any, workload: str) -> float | int | str | bool | None:
    if isinstance(value, float):  # numpy's float64 is one too
        return float(value) if math.isfinite(value) else str(value)  # JSON has no nan
    if value is None or isinstance(value, bool | int | str):
        return value
    msg = (
        f"train of {workload} returned {key!r} as {type(value).__module__}.{type(value).__qualname__}; its values are numbers, "
        "texts, booleans or None: use .item() on a tensor, rank.save for files, rank.track for models"
    )
    raise TypeError(msg)
