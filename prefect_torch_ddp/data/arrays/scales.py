"""How values are normalised: the mean and the std of each variable, given or of the dataset."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from math import isfinite
from typing import Any, TypeAlias

from prefect_torch_ddp.data.arrays.statistics import Statistics, statistics_key
from prefect_torch_ddp.data.arrays.variables import Found, Scale, Variable
from prefect_torch_ddp.errors import InvalidParamsError

MeanStd: TypeAlias = tuple[float, float]


def checked(by: object) -> bool | dict[str, MeanStd]:
    """Return what `normalize` of `array()` is, with plain numbers; refuse anything else.

    Raises:
        InvalidParamsError: it is neither a bool nor a (mean, std) by variable.
    """
    if isinstance(by, bool):
        return by
    if not isinstance(by, Mapping):
        msg = f"normalize is {by!r}; choose True, False, or a (mean, std) by variable"
        raise InvalidParamsError(msg)
    return {str(name): _pair(name, given) for name, given in by.items()}


def _pair(name: object, given: Any) -> MeanStd:
    with suppress(TypeError, ValueError):
        mean, std = given
        if not isinstance(mean, str) and not isinstance(std, str):  # float() reads texts too
            return float(mean), float(std)
    msg = f"normalize has {given!r} for {name}; give (mean, std), two numbers"
    raise InvalidParamsError(msg)


def normalized(found: Found, by: bool | Mapping[str, MeanStd]) -> Found:  # noqa: FBT001 - or a dict
    """Return the arrays with how their variables are normalised.

    Args:
        found: the arrays.
        by: a (mean, std) by variable, and the others stay; or whether the dataset's own statistics
            are used, for all variables that have real numbers.

    Raises:
        InvalidParamsError: they don't fit the variables, or there are none.
        StorageError: the statistics can't be read.
    """
    if by is False:
        return found
    names = [variable.name for variable in found.variables]
    given = by if isinstance(by, Mapping) else {}
    if unknown := sorted(given.keys() - {*names}):
        msg = f"normalize names {', '.join(unknown)}; what is read is {', '.join(names)}"
        raise InvalidParamsError(msg)
    variables = []
    for variable in found.variables:
        if by is True and _is_real(variable):
            variables.append(_scaled(variable, *_statistics(found, variable.name)))
        elif variable.name in given:
            variables.append(_scaled(variable, *given[variable.name]))
        else:
            variables.append(variable)
    return replace(found, variables=variables)


def _statistics(found: Found, name: str) -> tuple[float, float]:
    content = None if found.read_object is None else found.read_object(statistics_key(name))
    if content is None:
        msg = (
            f"{found.uri} has no {statistics_key(name)}, and so no mean and std of {name}: return "
            f"an xarray Dataset from prepare, or pass normalize={{{name!r}: (mean, std)}}"
        )
        raise InvalidParamsError(msg)
    statistics = Statistics.from_bytes(content, f"{found.uri}/{statistics_key(name)}")
    if not statistics.num_values:
        msg = f"{found.uri}: {name} has no finite value, and can't be normalised"
        raise InvalidParamsError(msg)
    return statistics.mean, statistics.std


def _scaled(variable: Variable, mean: float, std: float) -> Variable:
    if not _is_real(variable) or not isfinite(mean) or not isfinite(std) or std < 0:
        msg = (
            f"{variable.name} ({variable.dtype}) can't be normalised by mean {mean} and std {std}: "
            "give finite numbers, and no variable of booleans or complex numbers"
        )
        raise InvalidParamsError(msg)
    dtype = "float64" if variable.dtype == "float64" else "float32"
    return replace(variable, dtype=dtype, scale=Scale(float(mean), float(std) or 1.0))


def _is_real(variable: Variable) -> bool:
    return variable.dtype.startswith(("int", "uint", "float"))
