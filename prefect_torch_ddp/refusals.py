"""What pydantic refuses, in words that name the option, and the one that may have been meant."""

import difflib
import re
from collections.abc import Iterable

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError


def in_words(error: ValidationError, model: type[BaseModel]) -> str:
    """Return each fault of values for a model in words, on one line."""
    return "; ".join(_fault(each, model) for each in error.errors())


def unknown(name: str, known: Iterable[str], kind: str = "option") -> str:
    """Return that there is no such option, and which one is near: `did you mean epochs?`."""
    close = difflib.get_close_matches(name, list(known), 1)
    return f"there is no {kind} {name}" + "".join(f"; did you mean {each}?" for each in close)


def with_near_names(error: ValidationError, model: type[BaseModel]) -> ValidationError:
    """Return the error with, for each field that the model doesn't have, the one that is near.

    An unknown field of a model within the model was worded there.
    """

    def reworded(fault: ErrorDetails) -> InitErrorDetails:
        text, names = fault["msg"], fault["loc"]
        if fault["type"] == "extra_forbidden" and len(names) == 1:
            text = unknown(str(names[0]), model.model_fields)
        kind = PydanticCustomError(fault["type"], text, fault.get("ctx"))
        return InitErrorDetails(type=kind, loc=names, input=fault["input"])

    faults = [reworded(fault) for fault in error.errors()]
    return ValidationError.from_exception_data(error.title, faults)


def _fault(details: ErrorDetails, model: type[BaseModel]) -> str:
    context = details.get("ctx", {})
    if "error" in context:
        return str(context["error"])  # a validator's own words
    *groups, last = map(str, details["loc"] or ("they",))
    name = ".".join([*groups, last])
    if details["type"] == "extra_forbidden":
        prefix = "".join(f"{each}." for each in groups)
        return unknown(name, [f"{prefix}{each}" for each in _fields_at(model, groups)])
    if details["type"] == "literal_error":
        choices = ", ".join(re.findall(r"'([^']*)'", context["expected"]))
        return f"{name} is {details['input']!r}; choose one of {choices}"
    return f"{name} is {details['input']!r}; {details['msg'].replace('Input', 'it')}"


def _fields_at(model: type[BaseModel], groups: Iterable[str]) -> list[str]:
    """Return the names of a model's fields, or of a model below it."""
    for group in groups:
        inner = model.model_fields[group].annotation if group in model.model_fields else None
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return []
        model = inner
    return list(model.model_fields)
