"""What is known of a workload without running it, which would load torch in the flow's process."""

import ast
import difflib
import hashlib
import importlib.util
import json
import symtable
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.lazy import parse_python
from prefect_torch_ddp.refusals import unknown

if TYPE_CHECKING:
    from prefect_torch_ddp.params import TrainParams

FUNCTIONS = ("prepare", "train", "evaluate")
DIGITS = "prefect_torch_ddp.examples.digits"
NEAR = 0.8
"""How similar a file's name has to be to that of the module that isn't there."""
Functions = ast.FunctionDef | ast.AsyncFunctionDef
PASSING = {"enable_grad", "inference_mode", "no_grad"}
"""Decorators of torch, by which a function takes the same arguments as without."""


@dataclass(frozen=True)
class WorkloadSource:
    """A workload as its source shows it."""

    name: str
    tree: ast.Module
    object_name: str | None
    has_prepare: bool = True
    """False: its source's Parquet files are its dataset. If the source doesn't show it, True."""


def _is_no_data(node: ast.stmt) -> bool:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return node.name in ("train", "evaluate")
    # `if __name__ == "__main__"`: no rank runs it.
    return isinstance(node, ast.If) and any(
        isinstance(part, ast.Name) and part.id == "__name__" for part in ast.walk(node.test)
    )


def read_workload(reference: str, *, has_source: bool = False) -> WorkloadSource:
    """Find the workload's source and check that it has the three functions.

    Objects that aren't plain classes can't be checked without running the module.

    Args:
        reference: `package.module` or `package.module:object`.
        has_source: whether the run has raw data; then the workload needs no `prepare`.

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
        if not any(_is_bare_class(node, object_name) for node in tree.body):
            return found
        *_, scope = (child for child in scope.get_children() if child.get_name() == object_name)
        kind, wanted = "function ", FUNCTIONS
    missing = [name for name in wanted if name not in _bound_in(scope)]
    lacks_prepare = wanted is FUNCTIONS and missing == ["prepare"]
    if lacks_prepare and has_source:
        found, missing = replace(found, has_prepare=False), []
    if missing:
        needs = "a workload defines prepare(ctx), train(ctx) and evaluate(ctx)"
        there = ", ".join(each.get_name() for each in scope.get_symbols() if each.is_namespace())
        defines = f"{needs}; {path.name} defines {there or 'no function'}"
        lacks = ", ".join(map(repr, missing))
        msg = f"workload {reference!r} has no {kind}{lacks}: {defines}"
        if lacks_prepare:
            msg += "; with a source of Parquet files, source=..., it needs no prepare"
        raise InvalidParamsError(msg)
    _check_arguments(found)
    return found


def _check_arguments(workload: WorkloadSource) -> None:
    """Refuse functions that can't be called with a RankContext and nothing else.

    What another decorator than one of torch's made of them isn't known.
    """
    functions = _functions_of(workload)
    for name in FUNCTIONS:
        function = functions.get(name)
        if function is None or not all(map(_passes, function.decorator_list)):
            continue
        if what := _misfit_of(function.args):
            msg = f"{name} of workload {workload.name!r} {what}: write `def {name}(ctx):`"
            raise InvalidParamsError(msg)


def _passes(decorator: ast.expr) -> bool:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return getattr(called, "attr", getattr(called, "id", None)) in PASSING


def _functions_of(
    workload: WorkloadSource,
) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    """Return what the module defines, or the plain class that is the workload, by name."""
    body = workload.tree.body
    if workload.object_name is not None:
        found = [node for node in body if _is_bare_class(node, workload.object_name)]
        body = [part for node in found[-1:] if isinstance(node, ast.ClassDef) for part in node.body]
    return {node.name: node for node in body if isinstance(node, Functions)}  # the last one counts


def _misfit_of(takes: ast.arguments) -> str:
    """Return why a call with one argument would fail; empty if it wouldn't."""
    positional = [arg.arg for arg in (*takes.posonlyargs, *takes.args)]
    named = zip(takes.kwonlyargs, takes.kw_defaults, strict=True)
    required = positional[1 : len(positional) - len(takes.defaults)]
    required += [arg.arg for arg, default in named if default is None]
    if not positional and takes.vararg is None:
        return "takes no argument, and is given a RankContext"
    if required:
        return f"takes {', '.join(required)} too; options are in ctx.options"
    return ""


def _bound_in(scope: symtable.SymbolTable) -> set[str]:
    symbols = scope.get_symbols()
    return {each.get_name() for each in symbols if each.is_assigned() or each.is_imported()}


def _is_bare_class(node: ast.stmt, name: str) -> bool:
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


def check_options(
    workload: WorkloadSource, options: Iterable[str], data_options: Iterable[str]
) -> None:
    """Refuse options that would have no effect, as far as the workload's source shows it.

    Args:
        workload: what reads them.
        options: names, of what `train` and `evaluate` get.
        data_options: names, of what all three get.

    Raises:
        InvalidParamsError: names each option that is never read, the likely intended one, and all
            known ones; or each that `prepare` reads, which doesn't get it.
    """
    options, data_options = list(options), list(data_options)
    of_prepare = options_of_prepare(workload)
    if missed := [name for name in options if name in of_prepare and name not in data_options]:
        them = "it" if len(missed) == 1 else "them"
        msg = (
            f"prepare of workload {workload.name!r} reads {', '.join(missed)}, but gets only "
            f"data_options: give {them} there (-d {missed[0]}=...) instead of in options"
        )
        raise InvalidParamsError(msg)
    known = known_options(workload)
    if known is None:
        return
    if not (strangers := [name for name in (*options, *data_options) if name not in known]):
        return
    faults = "; ".join(unknown(name, known) for name in strangers)
    there = f"there are {', '.join(sorted(known))}" if known else "it reads none"
    msg = f"workload {workload.name!r} can't take the options: {faults}; {there}"
    raise InvalidParamsError(msg)


def checked_workload(params: "TrainParams") -> WorkloadSource:
    """Return a run's workload; raises InvalidParamsError if it or the options can't be right."""
    workload = read_workload(params.workload, has_source=params.source is not None)
    check_options(workload, params.options, params.data_options)
    return workload


def known_options(workload: WorkloadSource) -> frozenset[str] | None:
    """Return the names of the options that a workload reads; None if its source doesn't show all.

    It shows them in `read_options(Model, ctx.options)`, which refuses all others itself. Without
    that, it shows them in `ctx.options["name"]` and `ctx.options.get("name")`, unless it uses
    `ctx.options` in another way, imports one of the three functions, or hands its `ctx` to code of
    other modules.
    """
    tree = workload.tree
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    defined = {node.name: node for node in ast.walk(tree) if isinstance(node, Functions)}
    contexts = {arg.arg for node in ast.walk(tree) if (arg := _context_of(node)) is not None}
    # What its other parameters are given isn't followed.
    functions = {name for name, node in defined.items() if contexts & _parameters_of(node)}
    needed = {*FUNCTIONS} if workload.has_prepare else {"train", "evaluate"}
    models, found, is_complete = set[str](), set[str](), defined.keys() >= needed
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in contexts:
            is_complete &= _stays_here(node, parents[node], functions)
        elif isinstance(node, ast.Attribute) and node.attr == "options":
            match _read_by(node, parents):
                case "model", name:
                    models.add(name)
                case "name", name:
                    found.add(name)
                case _:
                    is_complete = False
    for model in models:
        fields = _fields_of(model, tree, workload.name)
        if fields is None:
            return None
        found |= fields
    refuses_others = models and workload.object_name is None
    return frozenset(found) if is_complete or refuses_others else None


def options_of_prepare(workload: WorkloadSource) -> frozenset[str]:
    """Return the names of the options that the lines of `prepare` read.

    These are `ctx.options["name"]`, `ctx.options.get("name")`, and `options.name` after `options =
    read_options(Model, ctx.options)`. What it hands to other functions isn't followed.
    """
    prepare = _functions_of(workload).get("prepare")
    if prepare is None:
        return frozenset()
    nodes = list(ast.walk(prepare))
    parents = {child: node for node in nodes for child in ast.iter_child_nodes(node)}
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    found, models = set[str](), set[str]()
    for node in attributes:
        # An annotation's or a decorator's parent is `prepare` itself, which has none here.
        match node.attr == "options" and _read_by(node, parents), parents.get(parents[node]):
            case ("name", name), _:
                found.add(name)
            case ("model", _), ast.Assign(targets=[ast.Name(id=variable)]):
                models.add(variable)
    of_models = [node for node in attributes if getattr(node.value, "id", None) in models]
    return frozenset(found | {node.attr for node in of_models})


def _context_of(node: ast.AST) -> ast.arg | None:
    """Return the argument of a function that is a RankContext, by its place or its annotation."""
    if not isinstance(node, Functions):
        return None
    arguments = [*node.args.posonlyargs, *node.args.args]
    typed = [arg for arg in arguments if arg.annotation and "RankContext" in ast.dump(arg)]
    placed = [arg for arg in arguments if arg.arg != "self"] if node.name in FUNCTIONS else []
    return next(iter([*typed, *placed]), None)


def _parameters_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    return {arg.arg for arg in (*node.args.posonlyargs, *node.args.args)}


def _stays_here(node: ast.Name, parent: ast.AST, functions: set[str]) -> bool:
    if isinstance(parent, ast.Call):
        return isinstance(parent.func, ast.Name) and parent.func.id in functions
    return isinstance(parent, ast.Attribute) and parent.value is node


def _read_by(
    node: ast.Attribute, parents: Mapping[ast.AST, ast.AST]
) -> tuple[Literal["model", "name"], str] | None:
    """Return what one use of `ctx.options` reads: a model's fields, or a name; None if neither."""
    match parents[node]:
        case ast.Subscript(slice=ast.Constant(value=str(name)), value=value) if value is node:
            return "name", name
        case ast.Compare(left=ast.Constant(value=str(name)), ops=[ast.In() | ast.NotIn()]):
            return "name", name
        case ast.Call(func=ast.Name(id="read_options"), args=[ast.Name(id=name), options]):
            return ("model", name) if options is node else None
        case ast.Attribute(attr="get") as get:
            match parents[get]:
                case ast.Call(args=[ast.Constant(value=str(name)), *_], func=func) if func is get:
                    return "name", name
    return None


def _fields_of(model: str, tree: ast.Module, reference: str) -> set[str] | None:
    """Return the fields of a class of `Params`, bases included; None if its source isn't plain."""
    if (home := _imported_from(model, tree)) is not None:
        module, name = home
        if (module, name) == ("prefect_torch_ddp", "Params"):
            return set()
        try:
            path = path_of(module, reference)
            return _fields_of(name, parse_python(path.read_bytes(), str(path)), reference)
        except (InvalidParamsError, OSError, SyntaxError, ValueError):
            return None
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == model]
    if len(classes) != 1 or classes[0].decorator_list or classes[0].keywords:
        return None
    found: set[str] = set()
    for base in classes[0].bases:
        names = _fields_of(base.id, tree, reference) if isinstance(base, ast.Name) else None
        if names is None:
            return None
        found |= names
    body = list(_fields_below(classes[0]))
    return None if None in body else found | {name for name in body if name is not None}


def _fields_below(model: ast.ClassDef) -> Iterator[str | None]:
    """Yield the name of each field, and None for one that has another name outside."""
    for node in model.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield None if "alias" in ast.unparse(node) else node.target.id
        elif isinstance(node, ast.Assign):  # model_config, perhaps
            yield None


def _imported_from(name: str, tree: ast.Module) -> tuple[str, str] | None:
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return node.module, alias.name
    return None


def path_of(module_name: str, reference: str) -> Path:
    """Return the source of a workload's module; raises InvalidParamsError if there is none."""
    if module_name.endswith(".py"):  # finding it would run the module
        module = module_name.removesuffix(".py")
        msg = f"workload {reference!r} is a file's name; give its module's: {module}"
        raise InvalidParamsError(msg)
    if module_name == "__main__":
        msg = f"workload {reference!r} is what runs here, which ranks can't import; {_own_module()}"
        raise InvalidParamsError(msg)
    try:
        spec = importlib.util.find_spec(module_name)
    except Exception as error:
        # Finding package.module runs the package's own __init__, which may raise anything.
        needs = "its package must be importable here and on the Dask workers"
        msg = f"workload {reference!r} can't be found: {error}; {needs}"
        raise InvalidParamsError(msg) from error
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        hint = _where_it_may_be(module_name)
        msg = f"workload {reference!r} can't be found: no module {module_name}; {hint}"
        raise InvalidParamsError(msg)
    return Path(spec.origin)


def _own_module() -> str:
    """Return how the code of a script or a notebook becomes a workload."""
    if file := getattr(sys.modules["__main__"], "__file__", None):
        return f"give this script's module: {Path(file).stem}"
    return (
        "in a notebook, write `%%writefile my_workload.py` above the imports and functions of the "
        "cell, run it, and give workload='my_workload'"
    )


def _where_it_may_be(module_name: str) -> str:
    """Return how to have a module found: its file nearby, or where it is looked for."""
    here, name = Path.cwd(), module_name.rpartition(".")[2]
    nearby = [*here.glob(f"{name}.py"), *here.glob(f"*/{name}.py"), here.parent / f"{name}.py"]
    for file in filter(Path.is_file, nearby):
        if file.parent == here.parent:
            return f"it is in {file.parent}: change to that folder"
        if file.parent == here and str(here) not in sys.path:
            return f"it is in {here}, which isn't on Python's path: set PYTHONPATH=."
        given = ".".join(file.relative_to(here).with_suffix("").parts)
        if given != module_name:
            return f"did you mean {given}?"
    known = {file.stem: file.stem for file in here.glob("*.py")}
    known[DIGITS.rpartition(".")[2]] = DIGITS
    if close := difflib.get_close_matches(name, known, 1, NEAR):
        return f"did you mean {known[close[0]]}?"
    return f"looked for in {here} and among what is installed; write it as package.module"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
