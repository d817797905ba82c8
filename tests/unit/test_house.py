"""The bounds of the house that `tests.yardsticks` prints hold."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from itertools import combinations

from tests.yardsticks import PACKAGE, ROOT, changing_fields, own_imports

MAX_IMPORTS, MAX_FIELDS, MAX_MODULES = 15, 8, 12
MAX_LINES = 450
TEXTS = {
    str(path.relative_to(ROOT)): path.read_text("utf-8")
    for path in sorted((ROOT / PACKAGE).rglob("*.py"))
    if path.name != "__init__.py"
}


def test_no_module_imports_more_than_15_of_the_package() -> None:
    """One that needs more answers more than one question."""
    counts = {name: own_imports(text) for name, text in TEXTS.items()}
    assert {name: num for name, num in counts.items() if num > MAX_IMPORTS} == {}


def test_no_object_has_more_than_8_fields_that_change() -> None:
    """One with more has several values in one, or is written from everywhere."""
    counts = changing_fields(TEXTS.values())
    assert {name: num for name, num in counts.items() if num > MAX_FIELDS} == {}


def test_no_folder_has_more_than_12_modules() -> None:
    """One with more is several rooms, of which each needs a name."""
    counts = Counter(name.rpartition("/")[0] for name in TEXTS)
    assert {name: num for name, num in counts.items() if num > MAX_MODULES} == {}


def test_a_module_of_more_than_450_lines_says_why_it_is_long() -> None:
    """In its docstring, such as by the texts that the manual is made of."""
    docstrings = {
        name: " ".join((ast.get_docstring(ast.parse(text)) or "").split())
        for name, text in TEXTS.items()
        if text.count("\n") > MAX_LINES
    }
    assert docstrings
    assert {name for name, says in docstrings.items() if " is long by " not in says} == set()


def _asked_classes(text: str) -> Iterator[str]:
    """Yield the names of the classes that a module asks of a value whether it is one."""
    for node in ast.walk(ast.parse(text)):
        asked: ast.AST | None = None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            asked = node.args[1] if node.func.id in {"isinstance", "issubclass"} else None
        elif isinstance(node, ast.MatchClass):
            asked = node.cls
        for each in ast.walk(asked) if asked is not None else ():
            if isinstance(each, ast.Name | ast.Attribute):
                yield each.id if isinstance(each, ast.Name) else each.attr


def _asked_members(text: str) -> Iterator[str]:
    """Yield the names of the attributes that a module asks of a value whether it has them."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Call(func=ast.Name("hasattr"), args=[_, ast.Constant(str(name))]):
                yield name


def test_only_storage_asks_whether_something_is_a_storage() -> None:
    """Nor of which class one is: in what they differ is a question of `Readable` or `Storage`."""
    folder = f"{PACKAGE}/storage/"
    classes = [
        node
        for name, text in TEXTS.items()
        if name.startswith(folder)
        for node in ast.parse(text).body
        if isinstance(node, ast.ClassDef)
    ]
    readable, num_before = {"Readable"}, 0
    while len(readable) > num_before:
        num_before = len(readable)
        readable |= {each.name for each in classes if readable & {*map(ast.unparse, each.bases)}}
    assert {"Readable", "Storage", "DirectoryStorage", "S3Storage", "HttpsFile"} <= readable
    members = {
        part.name
        for node in classes
        if node.name in {"Readable", "Storage"}
        for part in node.body
        if isinstance(part, ast.FunctionDef)
    }
    asked = {
        name: found
        for name, text in TEXTS.items()
        if not name.startswith(folder)
        and (found := (readable & {*_asked_classes(text)}) | (members & {*_asked_members(text)}))
    }
    assert asked == {}


VERDICT = f"{PACKAGE}/gang/caller/verdict/"
MAX_WALK, ON_THE_WAY = 5, ("gang/restarts", "gang/policy", "gang/caller/supervisor")


def _imported_from(text: str, folder: str) -> set[str]:
    """Return the modules of a folder that a module imports."""
    names = {node.module for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)}
    paths = {f"{name.replace('.', '/')}.py" for name in names if name}
    return {path for path in paths if path.startswith(folder)}


def test_why_a_gang_restarted_is_found_in_5_modules() -> None:
    """The restarts log it, `policy` decides it, the supervisor raises the error; the reason and its
    text are in at most two modules of `verdict`, of which one may import the other."""
    asked = _imported_from(TEXTS[f"{PACKAGE}/{ON_THE_WAY[-1]}.py"], VERDICT)
    assert len(asked) >= 3
    too_many = {}
    for each in asked:
        needed, todo = {each}, [each]
        while todo:
            further = _imported_from(TEXTS[todo.pop()], VERDICT) - needed
            needed |= further
            todo += further
        if len(ON_THE_WAY) + len(needed) > MAX_WALK:
            too_many[each] = sorted(needed)
    assert too_many == {}


MAX_TAKING, MAX_CHANGING = 12, 5


def test_the_parameters_of_a_run_are_resolved_once() -> None:
    """At most 12 modules take them whole, the command's aside, and at most 5 functions return
    others: everything else is given a `Run`, or the values that it needs."""
    taking, changing = set(), set()
    for name, text in TEXTS.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and "/cli/" not in name:
                if {"TrainParams", "ContextParams"} & _names_in(node.args):
                    taking.add(name)
                if "TrainParams" in _names_in(node.returns):
                    changing.add(f"{name}: {node.name}")
    assert {f"{PACKAGE}/tasks/train_run.py", f"{PACKAGE}/tasks/workload.py"} <= taking
    assert f"{PACKAGE}/tasks/clusters/current.py: with_ranks_placed" in changing
    assert len(taking) <= MAX_TAKING, sorted(taking)
    assert len(changing) <= MAX_CHANGING, sorted(changing)


def _names_in(node: ast.AST | None) -> set[str]:
    """Return the names in annotations, those in quotes as well."""
    return set(re.findall(r"\w+", ast.unparse(node))) if node is not None else set()


COUNTERPARTS = ("arrays", "bags", "images", "tables")
"""Folders of data/ whose modules of one name do the same for each kind of data."""


def _is_counterpart(one: str, other: str) -> bool:
    """Tell whether two modules may have one name: a command and what it calls, or kinds of data."""
    if "cli" in (one.split("/")[1], other.split("/")[1]):
        return True
    kinds = {f"{PACKAGE}/data/{kind}" for kind in COUNTERPARTS}
    return {one.rpartition("/")[0], other.rpartition("/")[0]} <= kinds


def test_only_counterparts_have_the_same_module_name() -> None:
    """Of two others nobody knows which one a log line, a traceback or a search means."""
    twins = [
        (one, other)
        for one, other in combinations(TEXTS, 2)
        if one.rpartition("/")[2] == other.rpartition("/")[2] and not _is_counterpart(one, other)
    ]
    assert twins == []


def test_no_two_classes_have_the_same_public_name() -> None:
    """A name of a class means one thing in the whole package."""
    names: dict[str, list[str]] = {}
    for name, text in TEXTS.items():
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                names.setdefault(node.name, []).append(name)
    assert {name: where for name, where in names.items() if len(where) > 1} == {}


def _defined_names(tree: ast.Module) -> Iterator[str]:
    """Yield the names of functions, classes, constants and fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        for part in node.body if isinstance(node, ast.Module | ast.ClassDef) else ():
            if isinstance(part, ast.Assign | ast.AnnAssign):
                targets = part.targets if isinstance(part, ast.Assign) else [part.target]
                yield from (each.id for each in targets if isinstance(each, ast.Name))


def test_no_name_says_plain() -> None:
    """Of a value, a list, a class or a loop it means something else each time: a name says what."""
    plain = {
        f"{name}: {each}"
        for name, text in TEXTS.items()
        for each in _defined_names(ast.parse(text))
        if "plain" in each.lower().split("_")
    }
    assert plain == set()
