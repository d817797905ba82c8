"""What is known of a workload without running it, which would load torch in the flow's process."""

import ast
import hashlib
import importlib.util
import json
import symtable
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.lazy import parse_python

FUNCTIONS = ("prepare", "train", "evaluate")


@dataclass(frozen=True)
class WorkloadSource:
    """A workload as its source shows it."""

    name: str
    tree: ast.Module
    object_name: str | None


def _is_no_data(node: ast.stmt) -> bool:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return node.name in ("train", "evaluate")
    # `if __name__ == "__main__"`: no rank runs it.
    return isinstance(node, ast.If) and any(
        isinstance(part, ast.Name) and part.id == "__name__" for part in ast.walk(node.test)
    )


def read_workload(reference: str) -> WorkloadSource:
    """Find the workload's source and check that it has the three functions.

    Objects that aren't plain classes can't be checked without running the module.

    Raises:
        InvalidParamsError: there is no such module, it can't be parsed, or a function is
            missing.
    """
    module_name, _, object_name = reference.partition(":")
    path = path_of(module_name, reference)
    try:
        tree = parse_python(path.read_bytes(), str(path))
        scope = symtable.symtable(ast.unparse(tree), str(path), "exec")
    except (SyntaxError, ValueError) as error:
        msg = f"workload {reference!r} can't be parsed: {error}"
        raise InvalidParamsError(msg) from error
    found = WorkloadSource(reference, tree, object_name or None)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    if any(node.names[0].name == "*" for node in imports):
        return found
    kind, wanted = ("", [object_name]) if object_name else ("function ", FUNCTIONS)
    if object_name in _bound_in(scope):
        if not any(_is_plain_class(node, object_name) for node in tree.body):
            return found
        *_, scope = (child for child in scope.get_children() if child.get_name() == object_name)
        kind, wanted = "function ", FUNCTIONS
    if missing := ", ".join(repr(name) for name in wanted if name not in _bound_in(scope)):
        needs = "a workload defines prepare(ctx), train(ctx) and evaluate(ctx)"
        there = ", ".join(each.get_name() for each in scope.get_symbols() if each.is_namespace())
        defines = f"{needs}; {path.name} defines {there or 'no function'}"
        msg = f"workload {reference!r} has no {kind}{missing}: {defines}"
        raise InvalidParamsError(msg)
    return found


def _bound_in(scope: symtable.SymbolTable) -> set[str]:
    symbols = scope.get_symbols()
    return {each.get_name() for each in symbols if each.is_assigned() or each.is_imported()}


def _is_plain_class(node: ast.stmt, name: str) -> bool:
    return (
        isinstance(node, ast.ClassDef)
        and node.name == name
        and not (node.bases or node.keywords or node.decorator_list)
    )


def dataset_id(
    workload: WorkloadSource,
    data_options: Mapping[str, Any],
    source: Mapping[str, str] | None = None,
) -> str:
    """Name the dataset that `prepare` makes: the same code, options and source, the same name.

    The code is the module but for its functions `train` and `evaluate`, of a `module:object`
    workload the whole module. Comments and layout don't count.

    Args:
        workload: what prepares it.
        data_options: of the run; a path among them counts as a text.
        source: place and listing's digest of the raw data, where the run has some.
    """
    is_whole = workload.object_name is not None
    counting = [node for node in workload.tree.body if is_whole or not _is_no_data(node)]
    parts = {
        "workload": workload.name,
        "prepare": _digest("\n".join(map(ast.dump, counting))),
        "options": data_options,
        "source": None if source is None else dict(source),
    }
    try:
        return _digest(json.dumps(parts, sort_keys=True))[:16]
    except TypeError as error:
        msg = f"data_options can't be written as JSON ({error}); give plain values"
        raise InvalidParamsError(msg) from error


def path_of(module_name: str, reference: str) -> Path:
    """Return the source of a workload's module; raises InvalidParamsError where there is none."""
    try:
        spec = importlib.util.find_spec(module_name)
    except Exception as error:
        # Finding package.module runs the package's own __init__, which may raise anything.
        needs = "its package must be importable here and on the Dask workers"
        msg = f"workload {reference!r} can't be found: {error}; {needs}"
        raise InvalidParamsError(msg) from error
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        hint = "write it as package.module, and install it"
        msg = f"workload {reference!r} can't be found: no module {module_name}; {hint}"
        raise InvalidParamsError(msg)
    return Path(spec.origin)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
