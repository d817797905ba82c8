"""What is read from a workload's source without running it: its functions, and what its dataset
is called."""

import os
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from textwrap import dedent

import pytest

from prefect_torch_ddp import InvalidParamsError
from prefect_torch_ddp.tasks.workload import dataset_id, read_workload

BASE = """
import json
from pathlib import Path

SIZE = 10
TRAIN, TEST = 8, 2
CLASSES = ["a"]
LR = 0.1


def draw(n):
    return [n * step for step in range(n)]


def prepare(rank):
    train, val = draw(SIZE), draw(TEST)
    (ctx.data / "x.json").write_text(json.dumps([train, val, TRAIN, CLASSES]))


def train(rank):
    return {"lr": LR}


def evaluate(rank):
    return {"num_samples": TEST}


if __name__ == "__main__":
    prepare(None)
    train(None)
"""
OTHERS = "def train(rank): ...\nasync def evaluate(rank): ...\n"
Write = Callable[[str], str]
numbers = count()


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Return a function that writes a module and gives its name."""
    monkeypatch.syspath_prepend(tmp_path)

    def write_module(source: str) -> str:
        name = f"workload_{next(numbers)}"
        (tmp_path / f"{name}.py").write_text(dedent(source), encoding="utf-8")
        return name

    return write_module


@pytest.fixture
def dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return a function that names the dataset of one module whose source is given."""
    monkeypatch.syspath_prepend(tmp_path)

    def name_of(text: str, reference: str = "one_workload", /, **data_options: object) -> str:
        (tmp_path / "one_workload.py").write_text(dedent(text), encoding="utf-8")
        return dataset_id(read_workload(reference), data_options)

    return name_of


# ---- The three functions.


@pytest.mark.parametrize("name", ["prepare", "train", "evaluate"])
def test_a_missing_function_is_named(write: Write, name: str) -> None:
    """The error names the workload, what is missing and what there is."""
    module = write(BASE.replace(f"def {name}(", "def other("))
    says = rf"workload '{module}' has no function '{name}'.*{module}\.py defines .*other"
    with pytest.raises(InvalidParamsError, match=says):
        read_workload(module)


def test_reading_runs_nothing_of_the_module(write: Write) -> None:
    """The flow's process would load torch, and whatever a module does when it is imported."""
    module = write(BASE + "raise RuntimeError('imported')\n")
    assert read_workload(module).name == module
    assert module not in sys.modules


@pytest.mark.parametrize(
    "source",
    [
        "from somewhere import prepare, train\nfrom elsewhere import score as evaluate\n",
        "prepare, train = make()\nevaluate = lambda rank: None\n",
        "prepare = train = evaluate = None\n",
        "try:\n    import fast\nexcept ImportError:\n    def prepare(rank): ...\n" + OTHERS,
        "with quiet():\n    from somewhere import prepare, train, evaluate\n",
        "if FAST:\n    def prepare(rank): ...\nelse:\n    def prepare(rank): ...\n" + OTHERS,
        "from somewhere import *\n",
        "try:\n    from somewhere import *\nexcept ImportError:\n    pass\n",
    ],
)
def test_any_way_to_define_them_counts(write: Write, source: str) -> None:
    """Imported, assigned, in a branch, from a star import that only running resolves: none of
    them is refused."""
    assert read_workload(write(source)).object_name is None


def test_a_name_inside_a_function_is_no_function_of_the_module(write: Write) -> None:
    """Only what the module itself binds counts."""
    with pytest.raises(InvalidParamsError, match="has no function 'evaluate'"):
        read_workload(
            write("def prepare(rank): ...\ndef train(rank):\n    def evaluate(rank): ...\n")
        )


CLASS = """
class Mine:
    @staticmethod
    def prepare(rank): ...
    @staticmethod
    def train(rank): ...
    @staticmethod
    def {name}(rank): ...

class Heir(Mine): ...

made = Mine()
"""


def test_class_workload(write: Write) -> None:
    """`module:Class`: its own methods are checked; what it inherits or an object has, only
    running tells."""
    module = write(CLASS.format(name="evaluate"))
    for name in ("Mine", "Heir", "made"):
        assert read_workload(f"{module}:{name}").object_name == name
    with pytest.raises(
        InvalidParamsError, match=f"module {module} defines no 'Other'; it defines .*Mine"
    ):
        read_workload(f"{module}:Other")
    lacking = write(CLASS.format(name="score"))
    with pytest.raises(
        InvalidParamsError,
        match=f"workload '{lacking}:Mine' has no function 'evaluate'.*defines .*score",
    ):
        read_workload(f"{lacking}:Mine")
    assert read_workload(f"{lacking}:Heir").object_name == "Heir"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("def prepare(:\n", "can't be parsed"),
        ("x = 1\0\n", "can't be parsed"),
        ("", "defines no function"),
    ],
)
def test_source_that_is_no_workload(write: Write, source: str, says: str) -> None:
    """A syntax error or an empty module is refused by the workload's name."""
    module = write(source)
    with pytest.raises(InvalidParamsError, match=f"workload '{module}' .*{says}"):
        read_workload(module)


def test_source_in_another_encoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python reads such modules, by their first line, and so do we."""
    (tmp_path / "latin_workload.py").write_bytes(
        b"# -*- coding: latin-1 -*-\nNAME = '\xe9'\n" + BASE.encode()
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert read_workload("latin_workload").name == "latin_workload"


@pytest.mark.parametrize(
    ("reference", "says"),
    [
        ("no_such_workload", "no module no_such_workload"),
        ("no_such_package.mine", "No module named 'no_such_package'"),
        ("json.no_such", "no module json.no_such"),
        ("sys", "no module sys"),
        ("broken_package.mine", "the package is broken"),
    ],
)
def test_a_module_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: str, says: str
) -> None:
    """The error names the workload and what was looked for, also when the package around it
    can't be imported."""
    (tmp_path / "broken_package").mkdir()
    (tmp_path / "broken_package" / "__init__.py").write_text(
        "raise RuntimeError('the package is broken')"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InvalidParamsError, match=f"workload '{reference}' can't be found: {says}"):
        read_workload(reference)


# ---- What the dataset is called.


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("SIZE = 10\n", "# A comment.\nSIZE = 10  # and another\n\n\n"),
        ("draw(SIZE), draw(TEST)", "(draw( SIZE ),\n        draw(TEST) )"),
        ("LR = 0.1", "LR = 0.2"),
        ('return {"lr": LR}', 'return {"lr": LR * 2}'),
        ('return {"num_samples": TEST}', 'return {"num_samples": TEST + 1}'),
        ("    prepare(None)\n", "    prepare(1)\n"),
        ("import json\n", "import json\nimport unused\n"),
    ],
)
def test_what_leaves_the_dataset_as_it_is(dataset: Callable[..., str], old: str, new: str) -> None:
    """Comments, layout, other functions and what only they use, though prepare has a local
    variable of that name."""
    assert BASE.count(old) == 1
    assert dataset(BASE.replace(old, new)) == dataset(BASE)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("[train, val, TRAIN, CLASSES]", "[val, train, TRAIN, CLASSES]"),
        ("SIZE = 10", "SIZE = 11"),
        ("TRAIN, TEST = 8, 2", "TRAIN, TEST = 7, 2"),
        ("n * step", "n + step"),
        ("import json\n", "import json5 as json\n"),
        ("LR = 0.1", 'LR = 0.1\nCLASSES.append("b")'),
        ("LR = 0.1", "LR = 0.1\nCLASSES[0] = 'b'"),
        ("LR = 0.1", "LR = 0.1\nSIZE += 1"),
        ("LR = 0.1", "LR = 0.1\nfor name in 'bc':\n    CLASSES.append(name)"),
        ("SIZE = 10", "if LR:\n    SIZE = 1\nelse:\n    SIZE = 10"),
        ("def prepare(rank)", "@draw\ndef prepare(rank)"),
        ("def prepare(rank)", "def prepare(rank, size=SIZE)"),
        ("LR = 0.1", "LR = 0.1\nfrom somewhere import *"),
    ],
)
def test_what_makes_another_dataset(dataset: Callable[..., str], old: str, new: str) -> None:
    """Prepare, a helper, an import or a constant that it uses, whichever way the constant is
    made."""
    assert BASE.count(old) == 1
    assert dataset(BASE.replace(old, new)) != dataset(BASE)


def test_a_helpers_helper_counts(dataset: Callable[..., str]) -> None:
    """What a class or a helper uses in turn makes another dataset too."""
    maker = "\nclass Maker:\n    def make(self, n):\n        return lambda: SCALE * n\n"
    deep = BASE.replace("n * step", "Maker().make(n)") + maker
    assert dataset(deep + "\nSCALE = 1\n") != dataset(deep + "\nSCALE = 2\n")
    assert dataset(deep + "\nSCALE: int = 1\n") != dataset(deep + "\nSCALE: int = 2\n")


def test_constants_of_both_branches_count(dataset: Callable[..., str]) -> None:
    """A name that is bound twice is more than its last binding."""
    for branches in (
        "if LR:\n    SIZE = {}\nelse:\n    SIZE = 10",
        "if LR:\n    SIZE = 10\nelse:\n    SIZE = {}",
        "try:\n    SIZE = 10\nexcept ValueError:\n    SIZE = {}",
    ):
        first, second = (
            dataset(BASE.replace("SIZE = 10", branches.format(number))) for number in (1, 2)
        )
        assert first != second


def test_of_a_class_workload_the_module_counts(dataset: Callable[..., str]) -> None:
    """What its methods use is not told from what they don't: too often prepared is right, too
    seldom is not."""
    source = CLASS.format(name="evaluate")
    assert dataset(source, "one_workload:Mine") == dataset(
        source + "# comment\n", "one_workload:Mine"
    )
    assert dataset(source, "one_workload:Mine") != dataset(
        source + "\nX = 1\n", "one_workload:Mine"
    )
    assert dataset(source, "one_workload:Mine") != dataset(source, "one_workload:made")


def test_options_count(dataset: Callable[..., str]) -> None:
    """Data options make another dataset, their order doesn't; what can't be written as JSON is
    refused."""
    assert dataset(BASE, a=1, b="x") == dataset(BASE, b="x", a=1)
    assert len({dataset(BASE), dataset(BASE, a=1), dataset(BASE, a=2), dataset(BASE, b=1)}) == 4
    with pytest.raises(InvalidParamsError, match="data_options can't be written as JSON"):
        dataset(BASE, a=object())


def test_files_of_a_local_source_count(dataset: Callable[..., str], tmp_path: Path) -> None:
    """A folder or a file that an option names: a file more, less, changed or renamed is another
    dataset."""
    folder = tmp_path / "images" / "cats"
    folder.mkdir(parents=True)
    first = folder / "1.png"
    first.write_bytes(b"one")
    seen = [dataset(BASE, source=str(tmp_path / "images"))]
    assert dataset(BASE, source=str(tmp_path / "images")) == seen[0]
    (folder / "2.png").write_bytes(b"two")
    seen.append(dataset(BASE, source=str(tmp_path / "images")))
    (folder / "2.png").rename(folder / "3.png")
    seen.append(dataset(BASE, source=str(tmp_path / "images")))
    first.write_bytes(b"longer")
    seen.append(dataset(BASE, source=str(tmp_path / "images")))
    os.utime(first, ns=(1, 1))
    seen.append(dataset(BASE, source=str(tmp_path / "images")))
    seen.append(dataset(BASE, source=str(first)))
    first.unlink()
    seen.extend((dataset(BASE, source=str(tmp_path / "images")), dataset(BASE, source=str(first))))
    assert len(set(seen)) == len(seen)
