"""The code of a gang's call: its pickle, the paths of its modules, and the libraries it imports."""

import ast
import functools
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from pkgutil import iter_modules
from types import FunctionType, ModuleType
from typing import Any

import cloudpickle

from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.lazy import parse_python
from prefect_torch_ddp.protocol.rank import CodePaths, Preload, is_installed, package_folders

PACKAGE = "prefect_torch_ddp"
LOADED = {*sys.stdlib_module_names, "torch", "numpy"}
"""What every fork server has loaded anyway, or what costs next to nothing."""
PREPARES_IMPORTS = re.compile(r"\benviron\b|\bputenv\b|\bsys\.(path|modules|meta_path)\b")
"""Code by which a module prepares the imports that follow it."""


def pickle_call(
    fn: Callable[..., Any] | str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bytes:
    """Pickle the call, a script by its whole path; raises InvalidParamsError where that fails."""
    if isinstance(fn, str) and fn.endswith(".py"):
        fn = str(Path(fn).resolve())
    try:
        payload: bytes = cloudpickle.dumps((fn, args, kwargs))
    except Exception as error:
        msg = (
            f"{name_of(fn)} or its arguments can't be sent to the ranks: "
            f"{type(error).__name__}: {error}"
        )
        raise InvalidParamsError(msg) from error
    return payload


def brings_context(fn: Callable[..., Any] | str) -> bool:
    """Whether this is our own entry with a RankContext, which says from when it is watched."""
    return isinstance(fn, str) and fn.startswith("prefect_torch_ddp.rank.stages:")


def name_of(fn: Callable[..., Any] | str) -> str:
    """Return the function's name for people."""
    return fn if isinstance(fn, str) else getattr(fn, "__qualname__", type(fn).__name__)


def own_code_paths() -> CodePaths:
    """Return the caller's import paths with the user's own code, without installed packages.

    A function that is pickled by reference must be importable at its rank, also when the Dask
    worker was started elsewhere on the same machine or a shared file system; and a name that the
    user's own module shares with an installed package must mean the same there.
    """
    paths = list(dict.fromkeys(Path(path).resolve() for path in sys.path))
    where = [paths.index(folder) for folder in package_folders() if folder in paths]
    boundary = min(where, default=len(paths))
    own = [(at, str(path)) for at, path in enumerate(paths) if not is_installed(path)]
    return CodePaths(
        first=tuple(path for at, path in own if at < boundary),
        last=tuple(path for at, path in own if at > boundary),
    )


def preload_of(code: Callable[..., Any] | str, paths: CodePaths) -> Preload:
    """Return what fork servers load ahead for a function, a workload or a script.

    That is what its own modules import from installed packages at their top. Nothing is imported
    to learn it. Imports that follow code which may prepare them are left to the ranks.
    """
    reader = _ImportReader()
    if isinstance(code, str) and code.endswith(".py"):
        reader.read_file(Path(code), "")
    elif isinstance(code, str):
        reader.read_entry(code.partition(":")[0])
    elif _is_sent_by_value(code):
        reader.read_function(code)
    else:
        reader.read_entry(code.__module__)
    # Not Dask's own folder for each worker, mostly empty: callers on two workers ask for the same.
    shadowing = (path for path in paths.first if any(iter_modules([path])))
    return Preload(tuple(reader.imports), tuple(shadowing))


def imported_packages(source: Path, module: str) -> set[str]:
    """Return the packages that a module in a file imports anywhere, and its own modules with it."""
    reader = _ImportReader(module, anywhere=True)
    is_package = source.name == "__init__.py"
    reader.read_file(source, module if is_package else module.rpartition(".")[0])
    return {each.split()[1].partition(".")[0] for each in reader.imports} - {PACKAGE}


def _is_sent_by_value(function: Callable[..., Any]) -> bool:
    """Whether cloudpickle sends the function itself, not the name of its module."""
    name = getattr(function, "__qualname__", "<")
    return "<" in name or getattr(function, "__module__", None) in (None, "__main__")


class _ImportReader:
    """Collects imports of installed packages from sources. Its readers return False to stop."""

    def __init__(self, module: str = PACKAGE, *, anywhere: bool = False) -> None:
        """Take a module's package for the user's own; read its top, or what is anywhere in it."""
        self.imports: dict[str, None] = {}
        self._own = module.partition(".")[0]
        self._anywhere = anywhere
        self._seen: set[object] = set()

    def read_entry(self, module: str) -> None:
        # Its package counts as the user's own, installed or not: it may be installed anew.
        self._own = module.partition(".")[0]
        self._read_module(module)

    def read_function(self, function: Callable[..., Any]) -> None:
        """Look at the modules behind the global names that a function uses."""
        self._seen.add(function)
        names = function.__code__.co_names if isinstance(function, FunctionType) else ()
        for value in (getattr(function, "__globals__", {}).get(name) for name in names):
            if isinstance(value, ModuleType):
                self._take(value.__name__, f"import {value.__name__}")
            elif isinstance(value, FunctionType) and _is_sent_by_value(value):
                if value not in self._seen:
                    self.read_function(value)
            elif isinstance(value, type | FunctionType):
                self._take(value.__module__, f"import {value.__module__}")

    def read_file(self, path: Path, package: str) -> bool:
        try:
            found, is_whole = _imports_in(path.read_bytes(), package, anywhere=self._anywhere)
        except (OSError, SyntaxError, ValueError):
            return True  # its rank will say so
        return all(self._take(*each) for each in found) and is_whole

    def _read_module(self, name: str) -> bool:
        """Read a module of the user's own, after the packages that hold it."""
        if name in self._seen:
            return True
        self._seen.add(name)
        parent = name.rpartition(".")[0]
        if parent and not self._read_module(parent):
            return False
        spec = _find(name)
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            return True
        return self.read_file(Path(spec.origin), name if _folders(spec) else parent)

    def _take(self, module: str, statement: str) -> bool:
        top = module.partition(".")[0]
        if top in LOADED:
            return True
        spec = _find(top)
        if spec is None:  # it isn't there, or a finder of its own finds it
            return True
        where = spec.origin or next(iter(_folders(spec)), "")
        if top == PACKAGE or (top != self._own and is_installed(where)):
            self.imports.update({statement: None} if statement else {})
            return True
        return self._read_module(module)


@functools.lru_cache(maxsize=256)  # a restart, and an evaluation, read the same modules again
def _imports_in(
    source: bytes, package: str, *, anywhere: bool
) -> tuple[list[tuple[str, str]], bool]:
    """Return what a module imports, each with its statement, and whether that is all.

    It isn't where code may prepare the imports that follow.
    """
    tree, found = parse_python(source), list[tuple[str, str]]()
    for node in ast.walk(tree) if anywhere else tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            found += _imports(node, package)
        elif isinstance(node, ast.stmt) and not anywhere and _prepares_imports(node):
            return found, False
    return found, True


def _prepares_imports(node: ast.stmt) -> bool:
    is_definition = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    return not is_definition and PREPARES_IMPORTS.search(ast.unparse(node)) is not None


def _imports(node: ast.Import | ast.ImportFrom, package: str) -> Iterator[tuple[str, str]]:
    """Yield each imported module with the statement that imports it, from elsewhere too."""
    if isinstance(node, ast.Import):
        yield from ((alias.name, f"import {alias.name}") for alias in node.names)
        return
    base = package.split(".") if node.level else []
    base = base[: len(base) - max(0, node.level - 1)]
    module = ".".join([*base, *filter(None, [node.module])])
    names = [alias.name for alias in node.names]
    yield module, f"from {module} import {', '.join(names)}"
    yield from ((f"{module}.{name}", "") for name in names)  # a module of the user's own, or none


def _find(name: str) -> ModuleSpec | None:
    """Find a module on the import path without importing the packages that hold it."""
    path: Sequence[str] | None = None
    spec = None
    for dot in re.finditer(r"\.|$", name):
        try:
            spec = PathFinder.find_spec(name[: dot.start()], path)
            path = _folders(spec)
        except Exception:  # noqa: BLE001 - a nested namespace package, or another's own finder
            return None
        if spec is None:
            return None
    return spec


def _folders(spec: ModuleSpec | None) -> list[str]:
    return list(spec.submodule_search_locations or ()) if spec is not None else []
