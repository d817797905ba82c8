"""The bounds of the house that `tests.yardsticks` prints hold."""

from collections import Counter

from tests.yardsticks import PACKAGE, ROOT, changing_fields, own_imports

MAX_IMPORTS, MAX_FIELDS, MAX_MODULES = 15, 8, 12
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
