"""Which installed libraries fork servers import before they fork the ranks of a call.

Those that the user names. By default those of a short list that the function's module imports
at its top before it runs anything else: what it runs might prepare the import, for instance by
setting environment variables.
"""

import ast
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.lazy import parse_python
from prefect_torch_ddp.protocol.rank import MODULE_FLAG, SAFE_LIBRARIES, Preload, is_installed

OWN_NAME = __name__.partition(".")[0]
"""This package, which counts as installed even if it runs from a checkout."""


def preload_of(code: Callable[..., Any] | str, named: Sequence[str] | None = None) -> Preload:
    """Return what fork servers load for a function, a workload or a script.

    Args:
        code: what ranks run. It is read, not imported.
        named: the libraries that the user names; None takes the default.

    Raises:
        InvalidParamsError: one that is named is the user's own module.
    """
    is_script = isinstance(code, str) and code.endswith(".py")
    beside = [str(Path(str(code)).parent)] if is_script else []
    folders = [*beside, *sys.path]
    shadowed = tuple(name for name in SAFE_LIBRARIES if _is_the_users(name, folders))
    if named is None:
        found = dict.fromkeys(_first_imports(code))
        return Preload(tuple(n for n in found if n in {*SAFE_LIBRARIES} - {*shadowed}), shadowed)
    for name in named:
        if _is_the_users(name, folders):
            msg = (
                f"preload names {name!r}, which is your own module and may be edited between two "
                "gangs; name only installed packages, ranks import the rest themselves"
            )
            raise InvalidParamsError(msg)
    return Preload(tuple(dict.fromkeys(named)), shadowed)


def _is_the_users(name: str, folders: Sequence[str]) -> bool:
    """Whether a rank would find a module of the user's own by that name before any other."""
    spec = PathFinder.find_spec(name.partition(".")[0], folders)
    return spec is not None and not is_installed(spec.origin or next(iter(folders_of(spec)), ""))


def _first_imports(code: Callable[..., Any] | str) -> Iterator[str]:
    """Yield the installed packages that a call's module imports before it runs anything else."""
    for path in _sources(code):
        try:
            statements = parse_python(path.read_bytes()).body
        except (OSError, SyntaxError, ValueError):
            return  # its rank will say so
        for statement in statements:
            if isinstance(statement, ast.Import | ast.ImportFrom):
                tops = _tops(statement)
                if not all(map(_is_installed_package, tops)):
                    return  # a module of the user's own, which may run anything
                yield from tops
            elif not _runs_nothing(statement):
                return


def _sources(code: Callable[..., Any] | str) -> list[Path]:
    """Return the files that run when ranks import it: of its packages, then of its module."""
    if isinstance(code, str) and code.endswith(".py"):
        return [Path(code)]
    if isinstance(code, str):
        module: str | None = code.removeprefix(MODULE_FLAG).strip().partition(":")[0]
    else:
        module = getattr(code, "__module__", None)
    if module is None or module == "__main__":
        main = getattr(sys.modules["__main__"], "__file__", None)
        return [Path(main)] if main else []
    specs = [find_module(name) for name in _prefixes(module)]
    return [Path(spec.origin) for spec in specs if spec is not None and spec.origin is not None]


def _tops(statement: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(statement, ast.Import):
        return [alias.name.partition(".")[0] for alias in statement.names]
    return ["" if statement.level else (statement.module or "").partition(".")[0]]


def _is_installed_package(name: str) -> bool:
    if name in sys.stdlib_module_names or name == OWN_NAME:
        return True
    spec = find_module(name) if name else None
    return spec is not None and is_installed(spec.origin or next(iter(folders_of(spec)), ""))


def _runs_nothing(statement: ast.stmt) -> bool:
    """Whether it is a docstring, a constant or a definition that calls nothing."""
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant)
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
        calls = any(isinstance(node, ast.Call) for node in ast.walk(statement.args))
        return not (statement.decorator_list or calls)
    if isinstance(statement, ast.ClassDef):
        has_only_body = not (statement.decorator_list or statement.bases or statement.keywords)
        return has_only_body and all(map(_runs_nothing, statement.body))
    if isinstance(statement, ast.Assign | ast.AnnAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        are_names = all(isinstance(target, ast.Name) for target in targets)
        return are_names and (statement.value is None or _is_constant(statement.value))
    return isinstance(statement, ast.Pass)


def _is_constant(value: ast.expr) -> bool:
    try:
        ast.literal_eval(value)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


def find_module(name: str) -> ModuleSpec | None:
    """Find a module on the import path without importing the packages that hold it."""
    path: Sequence[str] | None = None
    spec = None
    for part_of in _prefixes(name):
        try:
            spec = PathFinder.find_spec(part_of, path)
            path = folders_of(spec)
        except Exception:  # noqa: BLE001 - a nested namespace package, or another's own finder
            return None
        if spec is None:
            return None
    return spec


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[: number + 1]) for number in range(len(parts))]


def folders_of(spec: ModuleSpec | None) -> list[str]:
    """Return the folders of a package; none of a module."""
    return list(spec.submodule_search_locations or ()) if spec is not None else []
