"""Public names that load when first used, each listed once: in the stub next to `__init__`.

Also how the package parses Python, which this needs first.
"""

import ast
import gc
import pkgutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.metadata import version
from typing import Any, TypeVar

__version__ = version("prefect-torch-ddp")

PARSE_TRIES = 10
_Named = TypeVar("_Named", bound=Callable[..., Any])


def parse_python(source: bytes, filename: str = "<unknown>") -> ast.Module:
    """Return the syntax tree of a module.

    Python 3.11 counts the depth of trees for all threads together, and raises SystemError if
    another thread parsed meanwhile (python/cpython#106905): then it is parsed again.
    """
    for _ in range(PARSE_TRIES):
        with suppress(SystemError):
            return ast.parse(source, filename)
    return ast.parse(source, filename)


def lazy_names(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` for a package, from its `__init__.pyi`.

    The stub is what type checkers read. Each of its lines `from module import name as name` is a
    public name; the module is imported when the name is first used. `from module import name` is
    for what `help` of a public name shows, such as a base class: unpickling imports it from here.
    A class or function says itself that it is exported, by `exported_by`.
    """
    stub = parse_python(pkgutil.get_data(package, "__init__.pyi") or b"")
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom) and node.module]
    homes = {alias.name: str(node.module) for node in imports for alias in node.names}
    public = sorted(alias.name for node in imports for alias in node.names if alias.asname)

    def getattr_(name: str) -> Any:
        if name not in homes:
            msg = f"module {package!r} has no attribute {name!r}"
            raise AttributeError(msg)
        with _collector_paused():
            value = getattr(import_module(homes[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return getattr_, lambda: public, public


def exported_by(package: str) -> Callable[[_Named], _Named]:
    """Set `__module__` of a class or function to the package that exports it.

    `help`, tracebacks and pickles then show what a user can import, as with NumPy's `set_module`.
    Flows keep their module, by which Prefect finds the file of a deployment.
    """

    def name(value: _Named) -> _Named:
        value.__module__ = package
        return value

    return name


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Import without collections, which find nothing in a fifth of the time of a large import."""
    is_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_on:
            gc.enable()
