"""Measures the code: `python -m tests.yardsticks 25ab4f4 .` prints a table of both states.

Each argument is a git revision, or `.` for the working tree.
"""

import ast
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
PACKAGE = "prefect_torch_ddp"
CIRCLES = """
import grimp, sys
graph = grimp.build_graph(sys.argv[1], cache_dir=None)
imported = {module: graph.find_upstream_modules(module) for module in graph.modules}
circles = set()
for module, others in imported.items():
    circle = {other for other in others if module in imported[other]} - {module}
    if circle:
        circles.add(frozenset({module, *circle}))
print(len(circles))
for circle in circles:
    print(*sorted(circle), file=sys.stderr)
"""


def measure(tree: Path) -> dict[str, str]:
    """Measure one state of the repository."""
    package = {path: path.read_text("utf-8") for path in sorted((tree / PACKAGE).rglob("*.py"))}
    modules = {path: text for path, text in package.items() if path.name != "__init__.py"}
    lengths = sorted(text.count("\n") for text in modules.values())
    folders = Counter(path.parent.relative_to(tree) for path in modules)
    fullest, num_fullest = folders.most_common(1)[0]
    functions = sorted(length for text in package.values() for length in function_lengths(text))
    widest = max(len(line) for text in package.values() for line in text.splitlines())
    tests = sum(path.read_text("utf-8").count("\n") for path in (tree / "tests").rglob("*.py"))
    counted = subprocess.run(
        [sys.executable, "-c", CIRCLES, PACKAGE],
        cwd=tree,
        env={"PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
        check=True,
    )
    return {
        "package, lines": f"{sum(text.count(chr(10)) for text in package.values()):,}",
        "package, modules (without `__init__`)": str(len(modules)),
        "fullest folder, modules next to subfolders": f"{num_fullest} (`{fullest}`)",
        "module, median and most lines": f"{median(lengths):.0f}, {lengths[-1]}",
        "function, median, 95th percentile and most lines": (
            f"{median(functions):.0f}, {functions[len(functions) * 95 // 100]}, {functions[-1]}"
        ),
        "own imports of a module, most": most(
            {str(path.relative_to(tree)): own_imports(text) for path, text in modules.items()}
        ),
        "fields of an object that change, most": most(changing_fields(package.values())),
        "longest line, columns": str(widest),
        "import circles, imports for types counted": counted.stdout.strip(),
        "tests, lines": f"{tests:,}",
    }


def most(counts: dict[str, int]) -> str:
    """Name the largest count and what has it."""
    name = max(counts, key=lambda each: counts[each])
    return f"{counts[name]} (`{name.removeprefix(f'{PACKAGE}/')}`)"


def own_imports(text: str) -> int:
    """Return how many modules of the package a module imports, those for types only included.

    `lazy` doesn't count: what a module takes from it says only which of its names are public.
    """
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith(PACKAGE)}
    return len(found - {f"{PACKAGE}.lazy"})


def changing_fields(texts: Iterable[str]) -> dict[str, int]:
    """Return for each class how many of its fields are assigned after its construction.

    A field counts if a method other than `__init__` assigns it, or, for a public one, any code
    that assigns an attribute of that name of something other than `self`.
    """
    trees = [ast.parse(text) for text in texts]
    assigned = [
        (node.value.id if isinstance(node.value, ast.Name) else "", node.attr)
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    ]
    from_outside = {name for owner, name in assigned if owner != "self" and name[:1] != "_"}
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return {node.name: len(_changing(node, from_outside)) for node in classes}


def _changing(node: ast.ClassDef, from_outside: set[str]) -> set[str]:
    fields, changed = set(), set()
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            fields.add(item.target.id)
        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
            stored = {
                each.attr
                for each in ast.walk(item)
                if isinstance(each, ast.Attribute)
                and isinstance(each.ctx, ast.Store)
                and isinstance(each.value, ast.Name)
                and each.value.id == "self"
            }
            (fields if item.name == "__init__" else changed).update(stored)
    is_frozen = "frozen=True" in "".join(map(ast.unparse, node.decorator_list))
    return set() if is_frozen else changed | (fields & from_outside)


def function_lengths(text: str) -> list[int]:
    """Return the number of lines of each function; the docstring of a public one doesn't count."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]
    return [_num_lines(node) - _num_manual_lines(node) for node in functions]


def _num_lines(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _num_manual_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    is_manual = ast.get_docstring(node) is not None and not node.name.startswith("_")
    return _num_lines(node.body[0]) if is_manual else 0


def measure_revision(revision: str) -> dict[str, str]:
    """Measure a git revision, or the working tree for `.`."""
    if revision == ".":
        return measure(ROOT)
    with tempfile.TemporaryDirectory() as folder:
        command = ["git", "archive", revision, PACKAGE, "tests"]
        archive = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        return measure(Path(folder))


def table(revisions: list[str]) -> str:
    """Lay the revisions out as the columns of a markdown table."""
    columns = [measure_revision(revision) for revision in revisions]
    titles = ["now" if revision == "." else f"`{revision}`" for revision in revisions]
    rows = [["", *titles], ["---"] * (len(titles) + 1)]
    rows += [[name, *(column[name] for column in columns)] for name in columns[0]]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    print(table(sys.argv[1:] or ["."]))
