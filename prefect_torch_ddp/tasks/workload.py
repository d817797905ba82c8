"""Owns what can be known of a workload without running it: the flow process checks it and
doesn't load torch for that.
"""

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

FUNCTIONS = ("prepare", "train", "evaluate")


@dataclass(frozen=True)
class WorkloadSource:
    """A workload as its source shows it."""

    name: str
    tree: ast.Module
    object_name: str | None

    def prepare_digest(self) -> str:
        """Return a digest of `prepare` and of all that it uses in its module; comments and
        layout don't count.

        Of a `module:object` workload the whole module counts.
        """
        statements = [
            (node, *_changed_and_used(node)) for node in self.tree.body if not _is_for_scripts(node)
        ]
        if self.object_name is not None or not any(
            "prepare" in changed for _, changed, _ in statements
        ):
            return _digest(ast.dump(self.tree))
        wanted = {"prepare", "*"}
        needed: set[int] = set()
        while more := {
            i
            for i, (_, changed, _) in enumerate(statements)
            if i not in needed and changed & wanted
        }:
            needed |= more
            wanted |= {name for i in more for name in statements[i][2]}
        return _digest("\n".join(ast.dump(statements[i][0]) for i in sorted(needed)))


def read_workload(reference: str) -> WorkloadSource:
    """Find the workload's source and check that it has the three functions.

    Raises:
        InvalidParamsError: there is no such module, it can't be parsed, or a function is
            missing.
    """
    module_name, _, object_name = reference.partition(":")
    source = _source_of(module_name, reference)
    try:
        tree = ast.parse(source.read_bytes(), filename=str(source))
        scope = symtable.symtable(ast.unparse(tree), str(source), "exec")
    except (SyntaxError, ValueError) as error:
        msg = f"workload {reference!r} can't be parsed: {error}"
        raise InvalidParamsError(msg) from error
    has_all_names = not any(_is_star_import(node) for node in ast.walk(tree))
    if object_name:
        if object_name not in _bound_in(scope) and has_all_names:
            msg = f"workload {reference!r}: module {module_name} defines no {object_name!r}; it defines {_listed(scope)}"
            raise InvalidParamsError(msg)
        classes = [
            node
            for node in tree.body
            if isinstance(node, ast.ClassDef) and node.name == object_name
        ]
        if (
            len(classes) != 1
            or classes[0].bases
            or classes[0].keywords
            or classes[0].decorator_list
        ):
            return WorkloadSource(reference, tree, object_name)  # only running it tells what it has
        (scope,) = (
            child
            for child in scope.get_children()
            if child.get_name() == object_name and child.get_type() == "class"
        )
    missing = [name for name in FUNCTIONS if name not in _bound_in(scope)]
    if missing and has_all_names:
        msg = (
            f"workload {reference!r} has no function {', '.join(map(repr, missing))}: "
            f"a workload defines prepare(rank), train(rank) and evaluate(rank); {source.name} defines {_listed(scope)}"
        )
        raise InvalidParamsError(msg)
    return WorkloadSource(reference, tree, object_name or None)


def dataset_id(
    workload: WorkloadSource,
    data_options: Mapping[str, Any],
    source: Mapping[str, str] | None = None,
) -> str:
    """Return the name of the dataset that `prepare` makes: the same code, options and sources
    give the same name.

    Args:
        workload: what prepares it.
        data_options: of the run.
        source: place and listing's digest of the raw data, where the run has some.
    """
    parts = {
        "workload": workload.name,
        "prepare": workload.prepare_digest(),
        "options": data_options,
        "sources": {name: _fingerprint(value) for name, value in data_options.items()},
    }
    if source is not None:
        parts["source"] = dict(source)
    try:
        text = json.dumps(parts, sort_keys=True)
    except TypeError as error:
        msg = f"data_options can't be written as JSON ({error}); give plain values"
        raise InvalidParamsError(msg) from error
    return _digest(text)[:16]


def _source_of(module_name: str, reference: str) -> Path:
    try:
        spec = importlib.util.find_spec(module_name)
    except Exception as error:
        # Finding package.module runs the package's own __init__, which may raise anything.
        msg = f"workload {reference!r} can't be found: {error}; its package must be importable here and on the Dask workers"
        raise InvalidParamsError(msg) from error
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        msg = f"workload {reference!r} can't be found: no module {module_name}; write it as package.module, and install it"
        raise InvalidParamsError(msg)
    return Path(spec.origin)


def _changed_and_used(statement: ast.stmt) -> tuple[set[str], set[str]]:
    """Return the module's names that a statement binds or may change, and those that it uses;
    "*" stands for any name.
    """
    scope = symtable.symtable(ast.unparse(statement), "<statement>", "exec")
    here = {symbol.get_name() for symbol in scope.get_symbols() if symbol.is_referenced()}
    changed = _bound_in(scope)
    if not isinstance(
        statement,
        ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom,
    ):
        stores = (
            node
            for node in ast.walk(statement)
            if isinstance(getattr(node, "ctx", None), ast.Store)
        )
        is_plain = isinstance(statement, ast.Assign | ast.AnnAssign)
        if not is_plain or any(isinstance(node, ast.Attribute | ast.Subscript) for node in stores):
            changed |= here  # CLASSES.append("x"), OPTIONS["x"] = 1, for ... in ...
    if any(_is_star_import(node) for node in ast.walk(statement)):
        changed.add("*")
    return changed, here | _globals_below(scope)


def _bound_in(scope: symtable.SymbolTable) -> set[str]:
    return {
        symbol.get_name()
        for symbol in scope.get_symbols()
        if symbol.is_assigned() or symbol.is_imported()
    }


def _globals_below(scope: symtable.SymbolTable) -> set[str]:
    """Return the module's names that functions and classes in a scope use: a local variable of
    the same name is none.
    """
    found: set[str] = set()
    for child in scope.get_children():
        found |= {
            symbol.get_name() for symbol in child.get_symbols() if symbol.is_global()
        } | _globals_below(child)
    return found


def _is_for_scripts(statement: ast.stmt) -> bool:
    """Tell `if __name__ == "__main__"`, which no rank runs."""
    return isinstance(statement, ast.If) and any(
        isinstance(node, ast.Name) and node.id == "__name__" for node in ast.walk(statement.test)
    )


def _is_star_import(node: ast.AST) -> bool:
    return isinstance(node, ast.ImportFrom) and node.names[0].name == "*"


def _listed(scope: symtable.SymbolTable) -> str:
    return (
        ", ".join(symbol.get_name() for symbol in scope.get_symbols() if symbol.is_namespace())
        or "no function"
    )


def _fingerprint(value: object) -> str | None:
    """Return a digest of names, sizes and times of a local source, so that changed files are
    prepared anew.
    """
    if not isinstance(value, str) or not value or not Path(value).exists():
        return None
    paths = (
        [Path(value)]
        if Path(value).is_file()
        else sorted(path for path in Path(value).rglob("*") if path.is_file())
    )
    return _digest(
        "\n".join(f"{path} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in paths)
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
