"""Owns how a workload reads its options: as one described model, in which a misspelt name is an error and not a default."""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from prefect_torch_ddp.errors import InvalidParamsError

M = TypeVar("M", bound=BaseModel)


def read_options(model: type[M], options: Mapping[str, Any]) -> M:
    """Return the options as a model.

    Args:
        model: a `prefect_torch_ddp.params.Params` with a field for each option, its default and its limits.
        options: `rank.options`.

    Raises:
        InvalidParamsError: one is unknown, missing or out of its limits; names it, and shows those there are.
    """
    try:
        return model.model_validate(dict(options))
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, fault['loc'])) or 'they'}: {fault['msg']}" for fault in error.errors())
        msg = f"the workload's options can't be used: {faults}; there are {', '.join(model.model_fields)}"
        raise InvalidParamsError(msg) from error
