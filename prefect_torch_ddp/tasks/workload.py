"""Owns what can be known of a workload without running it: the flow process checks it and doesn't load torch for that."""

import ast
import hashlib
import importlib.util
import json
from collections.abc import Iterator, Mapping
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
        """Return a digest of `prepare` and of all that it uses in its module; comments and layout don't count.

        Of a `module:object` workload the whole module counts.
        """
        definitions = dict(_definitions(self.tree.body))
        if self.object_name is not None or "prepare" not in definitions:
            return _digest(ast.dump(self.tree))
        needed: dict[str, ast.stmt] = {}
        waiting = ["prepare"]
        while waiting:
            name = waiting.pop()
            if name in definitions and name not in needed:
                needed[name] = definitions[name]
                waiting += [node.id for node in ast.walk(definitions[name]) if isinstance(node, ast.Name)]
        return _digest("\n".join(ast.dump(needed[name]) for name in sorted(needed)))


def read_workload(reference: str) -> WorkloadSource:
    """Find the workload's source and check that it has the three functions.

    Raises:
        InvalidParamsError: there is no such module, it can't be parsed, or a function is missing.
    """
    module_name, _, object_name = reference.partition(":")
    source = _source_of(module_name, reference)
    try:
        tree = ast.parse(source.read_text(encoding="utf-8"), filename=str(source))
    except SyntaxError as error:
        msg = f"workload {reference!r} can't be parsed: {error}"
        raise InvalidParamsError(msg) from error
    names = dict(_definitions(tree.body))
    if object_name:
        if object_name not in names and not _has_star_import(tree):
            msg = f"workload {reference!r}: module {module_name} defines no {object_name!r}; it defines {_listed(names)}"
            raise InvalidParamsError(msg)
        owner = names.get(object_name)
        if not isinstance(owner, ast.ClassDef) or owner.bases:
            return WorkloadSource(reference, tree, object_name)  # only running it tells what it has
        names = dict(_definitions(owner.body))
    missing = [name for name in FUNCTIONS if name not in names]
    if missing and not _has_star_import(tree):
        msg = (
            f"workload {reference!r} has no function {', '.join(map(repr, missing))}: "
            f"a workload defines prepare(rank), train(rank) and evaluate(rank); {source.name} defines {_listed(names)}"
        )
        raise InvalidParamsError(msg)
    return WorkloadSource(reference, tree, object_name or None)


def dataset_id(workload: WorkloadSource, data_options: Mapping[str, Any]) -> str:
    """Return the name of the dataset that `prepare` makes: the same code, options and local sources give the same name."""
    parts = {
        "workload": workload.name,
        "prepare": workload.prepare_digest(),
        "options": data_options,
        "sources": {name: _fingerprint(value) for name, value in data_options.items()},
    }
    try:
        text = json.dumps(parts, sort_keys=True)
    except TypeError as error:
        msg = f"data_options can't be written as JSON ({error}); give plain values"
        raise InvalidParamsError(msg) from error
    return _digest(text)[:16]


def _source_of(module_name: str, reference: str) -> Path:
    try:
        spec = importlib.util.find_spec(module_name)
    except (ImportError, ValueError) as error:
        msg = f"workload {reference!r} can't be found: {error}; its package must be importable here and on the Dask workers"
        raise InvalidParamsError(msg) from error
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        msg = f"workload {reference!r} can't be found: no module {module_name}; write it as package.module, and install it"
        raise InvalidParamsError(msg)
    return Path(spec.origin)


def _definitions(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name.split(".")[0], node) for alias in node.names)
        elif isinstance(node, ast.Assign):
            yield from ((target.id, node) for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node
        elif isinstance(node, ast.If | ast.Try):
            yield from _definitions([child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)])


def _has_star_import(tree: ast.Module) -> bool:
    return any(isinstance(node, ast.ImportFrom) and node.names[0].name == "*" for node in tree.body)


def _listed(names: Mapping[str, ast.stmt]) -> str:
    shown = [name for name, node in names.items() if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return ", ".join(shown) or "no function"


def _fingerprint(value: object) -> str | None:
    """Return a digest of names, sizes and times of a local source, so that changed files are prepared anew."""
    if not isinstance(value, str) or not value or not Path(value).exists():
        return None
    paths = [Path(value)] if Path(value).is_file() else sorted(path for path in Path(value).rglob("*") if path.is_file())
    return _digest("\n".join(f"{path} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in paths))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
