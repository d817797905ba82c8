"""Owns how a workload's name becomes its functions, on a rank."""

import importlib
from collections.abc import Callable
from typing import Any

from prefect_torch_ddp.errors import InvalidParamsError


def resolve(reference: str) -> Any:
    """Import what `package.module` or `package.module:object.attribute` names.

    Raises:
        InvalidParamsError: the module has no such object.
    """
    module_name, _, qualname = reference.partition(":")
    target: Any = importlib.import_module(module_name)
    for part in filter(None, qualname.split(".")):
        try:
            target = getattr(target, part)
        except AttributeError as error:
            msg = f"{reference!r}: {target!r} has no {part!r}; write it as package.module or package.module:object"
            raise InvalidParamsError(msg) from error
    return target


def stage_function(workload: str, stage: str) -> Callable[..., Any]:
    """Return a workload's function of a stage.

    Raises:
        InvalidParamsError: it has none, or it isn't callable.
    """
    function = getattr(resolve(workload), stage, None)
    if not callable(function):
        what = "has no" if function is None else f"has a {type(function).__name__} instead of a"
        msg = f"workload {workload!r} {what} function {stage!r}: a workload defines prepare(rank), train(rank) and evaluate(rank)"
        raise InvalidParamsError(msg)
    return function  # type: ignore[no-any-return]
