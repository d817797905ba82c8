"""Which part of a call can't be sent to the ranks, looked for once pickle has refused the whole."""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType, FunctionType, MethodType, SimpleNamespace
from typing import Any

import cloudpickle

MAX_DEPTH = 6
WAY_OUT = (
    "have the function make it on its rank, from what can be sent, such as a path; a dataset opens "
    "its file when it first reads"
)


def unsendable(
    fn: Callable[..., Any] | str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    ignored: tuple[type, ...] = (),
) -> str | None:
    """Name the first part of a call that can't be pickled, why, and what to do; None: all can.

    Args:
        fn: whose signature names the arguments.
        args: positional ones.
        kwargs: by name.
        ignored: what is of these classes never reaches pickle.
    """
    for name, value in _named(fn, args, kwargs):
        if (found := _culprit(value, name, ignored, MAX_DEPTH)) is not None:
            path, error = found
            return f"{path} can't be sent to the ranks: {type(error).__name__}: {error}; {WAY_OUT}"
    return None


def _named(
    fn: Callable[..., Any] | str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    try:
        signature = inspect.signature(fn)  # type: ignore[arg-type]
        given = signature.bind_partial(*args, **kwargs).arguments
    except (TypeError, ValueError):  # a script's, or they don't fit, which the call will say
        given = {**{f"args[{i}]": value for i, value in enumerate(args)}, **kwargs}
    yield from given.items()
    if not isinstance(fn, str):
        yield getattr(fn, "__qualname__", type(fn).__name__), inspect.unwrap(fn)


def _culprit(
    value: Any, path: str, ignored: tuple[type, ...], depth: int
) -> tuple[str, Exception] | None:
    """Return the innermost part that can't be pickled by itself, and pickle's error."""
    pickler = _Pickler(SimpleNamespace(write=lambda _: None), protocol=5)
    pickler.ignored = ignored
    try:
        pickler.dump(value)
    except Exception as error:  # noqa: BLE001 - what a class's own pickling raises
        inner = (_culprit(part, name, ignored, depth - 1) for name, part in _contents(value, path))
        found = next(filter(None, inner), None) if depth else None
        return found or (path, error)
    return None


def _contents(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield what pickle would go on to, with the words that name it."""
    match value:
        case dict():
            yield from ((f"{path}[{key!r}]", item) for key, item in value.items())
        case list() | tuple() | set() | frozenset():
            yield from ((f"{path}[{i}]", item) for i, item in enumerate(value))
        case functools.partial():
            yield from _contents([value.func, *value.args, *value.keywords.values()], path)
        case MethodType():
            yield path, value.__self__
        case FunctionType():
            yield from _used(value, path)
        case _:
            yield from ((f"{path}.{name}", item) for name, item in _attributes(value).items())


def _used(function: FunctionType, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the variables that a function finds outside of itself."""
    code: CodeType = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"{path}'s {name}", cell.cell_contents
        except ValueError:  # it is still empty
            continue
    named = (name for name in code.co_names if name in function.__globals__)
    yield from ((f"{path}'s {name}", function.__globals__[name]) for name in named)


def _attributes(value: Any) -> dict[str, Any]:
    return {} if isinstance(value, type) else getattr(value, "__dict__", {})


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle is untyped
    ignored: tuple[type, ...] = ()

    def persistent_id(self, value: Any) -> str | None:
        return "ignored" if isinstance(value, self.ignored) else None
