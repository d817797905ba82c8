"""What a workload's module imports, read from its source and those of its own modules."""

import ast
import functools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from prefect_torch_ddp.gang.caller.sent.preload import find_module, folders_of
from prefect_torch_ddp.lazy import parse_python
from prefect_torch_ddp.protocol.rank import is_installed

PACKAGE = "prefect_torch_ddp"
LEFT_OUT = {*sys.stdlib_module_names, "torch", "numpy", PACKAGE}
"""Python's own, and what every run names anyway."""
PACKAGE_FOLDERS = frozenset({"site-packages", "dist-packages"})


def imported_packages(source: Path, module: str) -> set[str]:
    """Return the packages that a module in a file imports anywhere, and its own modules with it."""
    reader = _ImportReader(module)
    is_package = source.name == "__init__.py"
    reader.read_file(source, module if is_package else module.rpartition(".")[0])
    return reader.packages


class _ImportReader:
    """Collects the names of installed packages; a module's own package counts as the user's."""

    def __init__(self, module: str) -> None:
        self.packages: set[str] = set()
        self._own = module.partition(".")[0]
        self._seen: set[str] = set()

    def read_file(self, path: Path, package: str) -> None:
        try:
            names = _imports_in(path.read_bytes(), package)
        except (OSError, SyntaxError, ValueError):
            return
        for name in names:
            self._take(name)

    def _take(self, module: str) -> None:
        top = module.partition(".")[0]
        spec = None if top in LEFT_OUT else find_module(top)
        if spec is None:  # it isn't there, or a finder of its own finds it
            return
        origin = spec.origin or next(iter(folders_of(spec)), "")
        if top != self._own and (is_installed(origin) or _is_among_packages(origin)):
            self.packages.add(top)
        else:
            self._read_module(module)

    def _read_module(self, name: str) -> None:
        """Read a module of the user's own, after the packages that hold it."""
        if not name or name in self._seen:
            return
        self._seen.add(name)
        parent = name.rpartition(".")[0]
        self._read_module(parent)
        spec = find_module(name)
        if spec is not None and spec.origin is not None and spec.origin.endswith(".py"):
            self.read_file(Path(spec.origin), name if folders_of(spec) else parent)


def _is_among_packages(origin: str) -> bool:
    """Whether a module lies among packages of a cluster's environment modules or `pip --target`.

    To read everything that such a package imports takes minutes, and until then the run would have
    no page.
    """
    path = Path(origin)
    if not PACKAGE_FOLDERS.isdisjoint(path.parts):
        return True
    return any(_holds_packages(folder) for folder in sys.path if path.is_relative_to(folder))


@functools.cache
def _holds_packages(folder: str) -> bool:
    """Whether packages are installed in a folder of the import path, by their metadata there."""
    return next(Path(folder).glob("*.dist-info"), None) is not None


@functools.lru_cache(maxsize=256)  # an evaluation reads the same modules again
def _imports_in(source: bytes, package: str) -> Sequence[str]:
    tree = parse_python(source)
    return [name for node in ast.walk(tree) for name in _names(node, package)]


def _names(node: ast.AST, package: str) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = package.split(".") if node.level else []
        base = base[: len(base) - max(0, node.level - 1)]
        module = ".".join([*base, *filter(None, [node.module])])
        yield module
        # A module of the user's own, or none.
        yield from (f"{module}.{alias.name}" for alias in node.names)
