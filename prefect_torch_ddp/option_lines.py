"""Options in words, from their declarations: for `help` of what takes them, and for the manual."""

import inspect
import textwrap
from collections.abc import Iterable
from typing import Any, NamedTuple

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from prefect_torch_ddp.run_form import OPTIONS_HEADING

UNITS = {
    "s": "seconds",
    "size": "ranks",
    "ranks": "ranks",
    "worker": "ranks",
    "divides": "ranks",
    "steps": "steps",
    "epochs": "epochs",
    "restarts": "restarts",
    "retries": "retries",
    "last": "checkpoints",
    "best": "checkpoints",
}
"""What a number counts, by the last word of its option's name."""


class OptionLine(NamedTuple):
    """An option, as people read of it."""

    name: str
    values: str
    """What it may be, with the unit: `seconds > 0, or None`."""
    default: str
    meaning: str


def option_lines(model: type[BaseModel], names: Iterable[str] | None = None) -> list[OptionLine]:
    """Return a line for each option of a parameter model, or for some of them.

    Args:
        model: where they are declared.
        names: of these, in this order; None: all, in the order of their declaration.
    """
    schema = model.model_json_schema()
    fields = model.model_fields
    return [
        OptionLine(
            name,
            _values(name, schema["properties"][name], schema),
            default_of(fields[name]),
            meaning_of(fields[name]),
        )
        for name in (fields if names is None else names)
    ]


def add_option_lines(target: Any, model: type[BaseModel], names: Iterable[str]) -> None:
    """Append options to the docstring of the function or class that takes them, for `help`.

    There "Empty:", which is for the run form, becomes "None:".
    """
    parts = [inspect.cleandoc(target.__doc__ or ""), f"\n{OPTIONS_HEADING}"]
    for name in names:
        field = model.model_fields[name]
        meaning = meaning_of(field).replace("Empty:", "None:")
        text = f"{name}: {meaning} Default: {default_of(field)}."
        parts.append(textwrap.fill(text, 96, initial_indent=" " * 4, subsequent_indent=" " * 8))
    target.__doc__ = "\n".join(parts)


def meaning_of(field: FieldInfo) -> str:
    """Return an option's description as one line."""
    return " ".join(str(field.description or "").split())


def default_of(field: FieldInfo) -> str:
    """Return an option's default as it is written in Python."""
    if field.default_factory is None:
        return repr(field.default)
    made: Any = field.get_default(call_default_factory=True)
    return f"{type(made).__name__}()" if isinstance(made, BaseModel) else repr(made)


def _values(name: str, shape: dict[str, Any], schema: dict[str, Any]) -> str:
    """Say what a JSON schema lets through, with a number's unit."""
    if "anyOf" in shape:
        parts = [_values(name, each, schema) for each in shape["anyOf"]]
        return ", or ".join(dict.fromkeys(parts))
    if "$ref" in shape:
        return f"`{shape['$ref'].rpartition('/')[2]}`"
    if "enum" in shape or "const" in shape:
        choices = shape.get("enum", [shape.get("const")])
        return ", ".join(f'`"{each}"`' for each in choices)
    kind = str(shape.get("type", "anything"))
    if {"enum", "const"} & shape.get("items", {}).keys():
        return f"some of {_values(name, shape['items'], schema)}"
    if kind in ("integer", "number"):
        unit = UNITS.get(name.rpartition("_")[2], "a number")
        limits = (("minimum", "≥"), ("exclusiveMinimum", ">"))
        limit = [f"{sign} {shape[key]:g}" for key, sign in limits if key in shape]
        return " ".join([unit, *limit])
    return {
        "boolean": "`True`, `False`",
        "string": "text",
        "array": "texts",
        "object": "a mapping",
        "null": "`None`",
    }.get(kind, kind)
