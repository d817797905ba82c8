"""The parameters and options that a report shows: those given, short, and no secret among them."""

import re
from collections.abc import Iterator, Mapping

from pydantic import BaseModel

MAX_SHOWN = 100
MAX_VALUE = 200
MAX_ITEMS = 20
HIDDEN = re.compile(
    r"pass(word|wd|phrase)|secret|token|credential|api_?key|private_?key", re.IGNORECASE
)
WITH_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+@")


def shown_params(
    params: BaseModel, arguments: Mapping[str, object] | None = None
) -> dict[str, str]:
    """Return what was given, by dotted name; of arguments, plain values alone.

    A value whose name sounds like a secret, and credentials in a URL, are hidden.
    """
    given = dict(_flat("", params.model_dump(exclude_unset=True)))
    own = dict(_flat("", arguments or {}))
    shown = {
        name: "(hidden)" if HIDDEN.search(name) else _short(value)
        for name, value in {"seed": getattr(params, "seed", 0), **given, **own}.items()
    }
    few = dict(list(shown.items())[:MAX_SHOWN])
    if len(shown) > len(few):
        few["..."] = f"{len(shown) - len(few)} more"
    return few


def _flat(prefix: str, values: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(f"{prefix}{name}.", value)
        else:
            yield f"{prefix}{name}", value


def _short(value: object) -> str:
    if isinstance(value, list | tuple) and len(value) <= MAX_ITEMS:
        return ", ".join(map(_short, value))
    if not isinstance(value, str | int | float | bool | None):
        return f"a {type(value).__name__}"
    shown = WITH_CREDENTIALS.sub("", str(value)[: 2 * MAX_VALUE])
    return shown if len(shown) <= MAX_VALUE else f"{shown[:MAX_VALUE]} ..."
