"""Writes docs/api.md from the public names: `python -m tests.api_page`; a test holds it current."""

import inspect
import re
from pathlib import Path
from typing import Unpack, get_args, get_origin

from pydantic import BaseModel

import prefect_torch_ddp
import prefect_torch_ddp.data
from prefect_torch_ddp import Params

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
TOPICS = {
    "Flows and tasks": ("flow", "tasks", "tracking"),
    "Gangs": ("gang",),
    "In a rank": ("rank",),
    "Data": ("data",),
    "Storages": ("storage",),
    "Parameters": ("params",),
    "Results": ("results",),
    "Errors": ("errors",),
}
WITH_MEMBERS = ("In a rank",)
HEAD = """# API

Every public name, with the first sentence of its docstring; `help(name)` shows the rest. They are
imported from `prefect_torch_ddp`, those under *Data* from `prefect_torch_ddp.data`. This page is
written by `python -m tests.api_page`.
"""


def page() -> str:
    """Return the whole page."""
    doors = (prefect_torch_ddp, prefect_torch_ddp.data)
    names = {name: getattr(door, name) for door in doors for name in door.__all__}
    del names["__version__"]
    by_topic: dict[str, list[str]] = {topic: [] for topic in TOPICS}
    for name in sorted(names, key=str.lower):
        by_topic[_topic(names[name])] += _entries(name, names[name])
    sections = [f"## {topic}\n\n" + "\n".join(lines) for topic, lines in by_topic.items() if lines]
    return "\n\n".join([HEAD.strip(), *sections]) + "\n"


def _topic(value: object) -> str:
    home = getattr(value, "__module__", "") or type(value).__module__
    room = inspect.unwrap(getattr(value, "fn", value)).__module__.split(".")[1:2] or [home]
    return next(topic for topic, rooms in TOPICS.items() if room[0] in rooms)


def _entries(name: str, value: object) -> list[str]:
    lines = [f"- **`{name}{_signature(value)}`**: {_summary(value)}"]
    if isinstance(value, type) and issubclass(value, Params):
        fields = value.model_fields.items()
        lines += [
            f"  - `{field}`: {' '.join(str(about.description).split())}" for field, about in fields
        ]
    elif isinstance(value, type) and _topic(value) in WITH_MEMBERS:
        for member, found in vars(value).items():
            if not member.startswith("_") and inspect.getdoc(found) and _is_member(found):
                function = getattr(found, "__func__", found)
                shown = "" if isinstance(found, property) else _signature(function)
                lines.append(f"  - `.{member}{shown}`: {_summary(found)}")
    options = [hint for hint in _hints(value).values() if get_origin(hint) is Unpack]
    if options:
        names = ", ".join(f"`{option}`" for option in get_args(options[0])[0].__annotations__)
        lines.append(f"  - options: {names}")
    return lines


def _hints(value: object) -> dict[str, object]:
    function = inspect.unwrap(getattr(value, "fn", value))  # type: ignore[arg-type]
    return dict(getattr(function, "__annotations__", {})) if inspect.isfunction(function) else {}


def _is_member(found: object) -> bool:
    return inspect.isfunction(found) or isinstance(found, property | classmethod | staticmethod)


def _signature(value: object) -> str:
    if isinstance(value, type) and issubclass(value, BaseModel | Exception):
        return ""
    try:
        signature = inspect.signature(inspect.unwrap(getattr(value, "fn", value)))  # type: ignore[arg-type]
    except ValueError:
        return ""
    names, is_keyword = [], False
    for name, parameter in signature.parameters.items():
        if name == "self" or name.startswith("_"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not is_keyword:
            names.append("*")
            is_keyword = True
        names.append({2: "*", 4: "**"}.get(parameter.kind.value, "") + name)
    return f"({', '.join(names)})"


def _summary(value: object) -> str:
    text = inspect.getdoc(value) or ""
    first = " ".join(text.split("\n\n")[0].split())
    return re.sub(r"(?<=[.;:]) .*", "", first) if len(first) > 160 else first


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
