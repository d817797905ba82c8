"""What is read from a workload's source without running it: its functions, and what its dataset
is called."""

import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import ModuleType

import pytest

from flows import options
from prefect_torch_ddp import InvalidParamsError, Params
from prefect_torch_ddp.examples.digits_options import DigitsData
from prefect_torch_ddp.tasks.workload import (
    check_options,
    dataset_id,
    known_options,
    options_of_prepare,
    read_workload,
)

BASE = """
import json
from pathlib import Path

SIZE = 10
TRAIN, TEST = 8, 2
CLASSES = ["a"]
LR = 0.1


def draw(n):
    return [n * step for step in range(n)]


def prepare(ctx):
    train, val = draw(SIZE), draw(TEST)
    (ctx.data / "x.json").write_text(json.dumps([train, val, TRAIN, CLASSES]))


def train(ctx):
    return {"lr": LR}


def evaluate(ctx):
    return {"num_samples": TEST}


if __name__ == "__main__":
    prepare(None)
    train(None)
"""
CLASS = """
class Mine:
    @staticmethod
    def prepare(ctx): ...
    @staticmethod
    def train(ctx): ...
    @staticmethod
    def {name}(ctx): ...

class Heir(Mine): ...

made = Mine()
"""
MINE, LACKING = CLASS.format(name="evaluate"), CLASS.format(name="score")
OTHERS = "def train(ctx): ...\nasync def evaluate(ctx): ...\n"
Write = Callable[..., str]
numbers = count()


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Return a function that writes a module and gives its name."""
    monkeypatch.syspath_prepend(tmp_path)

    def write_module(source: str, name: str = "") -> str:
        name = name or f"workload_{next(numbers)}"
        coding = "latin-1" if "latin-1" in source else "utf-8"
        (tmp_path / f"{name}.py").write_text(source, encoding=coding)
        return name

    return write_module


@pytest.fixture
def dataset(write: Write) -> Callable[..., str]:
    """Return a function that names the dataset of one module whose source is given."""

    def name_of(text: str, part: str = "", /, **data_options: object) -> str:
        return dataset_id(read_workload(write(text, "one_workload") + part), data_options)

    return name_of


# ---- The three functions.


@pytest.mark.parametrize(
    ("source", "part"),
    [
        ("from somewhere import prepare, train\nfrom elsewhere import score as evaluate\n", ""),
        ("prepare, train = make()\nevaluate = lambda ctx: None\n", ""),
        ("try:\n    import fast\nexcept ImportError:\n    def prepare(ctx): ...\n" + OTHERS, ""),
        ("if FAST:\n    def prepare(ctx): ...\nelse:\n    def prepare(ctx): ...\n" + OTHERS, ""),
        ("from somewhere import *\n", ""),
        ("# -*- coding: latin-1 -*-\nNAME = '\xe9'\n" + BASE + "raise RuntimeError('run')\n", ""),
        (MINE, ":Mine"),
        (MINE, ":Heir"),
        (MINE, ":made"),
        (LACKING, ":Heir"),
    ],
)
def test_any_way_to_define_them_counts(write: Write, source: str, part: str) -> None:
    """Imported, assigned, in a branch, from a star import, or what a class inherits or an object
    has, which only running tells: none of them is refused, and nothing of the module is run: the
    flow's process would load torch."""
    module = write(source)
    assert (read_workload(module + part).object_name or "") == part[1:]
    assert module not in sys.modules


@pytest.mark.parametrize(
    ("source", "part", "says"),
    [
        # What a function binds isn't the module's.
        (
            BASE.replace("def train(", "def other(") + "def f():\n    train = 1\n",
            "",
            r"has no function 'train'.*workload_\d+\.py defines .*other",
        ),
        (MINE, ":Other", "has no 'Other': .* defines .*Mine"),
        (LACKING, ":Mine", "has no function 'evaluate'.*defines .*score"),
        ("def prepare(:\n", "", "can't be parsed"),
        ("x = 1\0\n", "", "can't be parsed"),
        ("", "", "defines no function"),
    ],
)
def test_source_that_is_no_workload(write: Write, source: str, part: str, says: str) -> None:
    """The error names the workload, what is missing and what there is."""
    reference = write(source) + part
    with pytest.raises(InvalidParamsError, match=f"workload '{reference}' .*{says}"):
        read_workload(reference)


def test_a_workload_with_a_source_needs_no_prepare(write: Write) -> None:
    """Its two functions are enough; without a source the error names both ways out."""
    found = read_workload(write(OTHERS), has_source=True)
    assert not found.has_prepare
    assert known_options(found) == set()
    assert read_workload(write(BASE), has_source=True).has_prepare
    assert read_workload(write(BASE)).has_prepare
    says = r"has no function 'prepare': .* a source of Parquet files, .* needs no prepare"
    with pytest.raises(InvalidParamsError, match=says):
        read_workload(write(OTHERS))
    with pytest.raises(InvalidParamsError, match="has no function 'prepare', 'train'"):
        read_workload(write("def evaluate(ctx): ..."), has_source=True)


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
    ("old", "new", "is_other"),
    [
        ("SIZE = 10\n", "# A comment.\nSIZE = 10  # and another\n\n\n", False),
        ("draw(SIZE), draw(TEST)", "(draw( SIZE ),\n        draw(TEST) )", False),
        ('return {"lr": LR}', 'return {"lr": LR * 2}', False),
        ('return {"num_samples": TEST}', 'return {"num_samples": TEST + 1}', False),
        ("    prepare(None)\n", "    prepare(1)\n", False),
        ("[train, val, TRAIN, CLASSES]", "[val, train, TRAIN, CLASSES]", True),
        ("SIZE = 10", "SIZE = 11", True),
        ("n * step", "n + step", True),
        ("import json\n", "import json5 as json\n", True),
        ("LR = 0.1", 'LR = 0.1\nCLASSES.append("b")', True),
        ("LR = 0.1", "LR = 0.2", True),  # who uses it isn't asked
    ],
)
def test_the_module_but_for_train_and_evaluate_makes_the_dataset(
    dataset: Callable[..., str], old: str, new: str, *, is_other: bool
) -> None:
    """Comments and layout don't count either, nor what is run as a script."""
    assert BASE.count(old) == 1
    assert (dataset(BASE.replace(old, new)) != dataset(BASE)) == is_other


def test_of_a_class_workload_the_module_counts(dataset: Callable[..., str]) -> None:
    """What its methods use is not told from what they don't: too often prepared is right, too
    seldom is not."""
    assert dataset(MINE, ":Mine") == dataset(MINE + "# comment\n", ":Mine")
    assert dataset(MINE, ":Mine") != dataset(MINE + "\ndef train(): ...\n", ":Mine")
    assert dataset(MINE, ":Mine") != dataset(MINE, ":made")


def test_options_count(dataset: Callable[..., str]) -> None:
    """Other data options or raw data make another dataset, another order of options doesn't."""
    assert dataset(BASE, a=1, b="x") == dataset(BASE, b="x", a=1)
    assert len({dataset(BASE), dataset(BASE, a=1), dataset(BASE, a=2), dataset(BASE, b=1)}) == 4
    texts = ["/", ".", "x" * 5000]  # like paths, which would be listed, or can't be looked for
    assert len({dataset(BASE, a=text) for text in texts}) == 3
    with pytest.raises(InvalidParamsError, match="data_options can't be written as JSON"):
        dataset(BASE, a=object())
    workload = read_workload("tests.workloads.tiny")
    sources = [None, *({"uri": uri, "listing": listing} for uri in "ab" for listing in "12")]
    assert len({dataset_id(workload, {}, source) for source in sources}) == 5


# ---- The options that it reads.

MODEL = """
from prefect_torch_ddp import Params, RankContext, read_options
from elsewhere import score
class Data(Params):
    \"\"\"Of prepare.\"\"\"
    size: int = 3
class Options(Data):
    lr: float = 0.1
"""
READ = "def prepare(ctx): read_options(Options, ctx.options)\n"
PLAIN = "def prepare(ctx): ctx.options['a'] + ctx.options.get('b', 1)\n"


@pytest.mark.parametrize(
    ("source", "known"),
    [
        (OTHERS + "def prepare(ctx): ...\n", set()),
        (OTHERS + PLAIN, {"a", "b"}),
        (OTHERS + PLAIN + "def more(c: RankContext): return 'd' in c.options\n", {"a", "b", "d"}),
        (OTHERS + MODEL + READ, {"size", "lr"}),
        (OTHERS + MODEL + READ + "def more(ctx): score(ctx)\n", {"size", "lr"}),
        (OTHERS + MODEL + READ + "def more(ctx): return ctx.options['c']\n", {"size", "lr", "c"}),
    ],
    ids=["none", "by key", "in another function", "a class", "handed on", "a class and a key"],
)
def test_a_source_shows_which_options_are_read(write: Write, source: str, known: set[str]) -> None:
    """By name, or by a model and its bases."""
    assert known_options(read_workload(write(source))) == known


@pytest.mark.parametrize(
    "source",
    [
        PLAIN + "def more(ctx: RankContext): score(ctx)\n",
        PLAIN + "def more(ctx: RankContext): score(**ctx.options)\n",
        PLAIN + "def more(ctx: RankContext): return ctx.options.get(NAME)\n",
        PLAIN + "def more(ctx: RankContext): return [ctx]\n",
        PLAIN + "def more(ctx: RankContext): give(ctx)\ndef give(context): score(context)\n",
        MODEL.replace("size: int = 3", "size: int = Field(3, alias='n')") + READ,
        MODEL.replace("size: int = 3", "model_config = {'extra': 'allow'}") + READ,
        MODEL.replace("class Data(Params)", "class Data(score)") + READ,
        MODEL + READ.replace("Options,", "score,"),
    ],
)
def test_where_a_source_shows_not_all_nothing_is_refused(write: Write, source: str) -> None:
    """Options may be read in other modules, or under other names."""
    assert known_options(read_workload(write(OTHERS + source))) is None


@pytest.mark.parametrize(
    "name",
    ["prefect_torch_ddp.examples.digits"]
    + [f"flows.{name}" for name in ("cifar10", "gridded", "land_use", "pet_names", "tabular")],
)
def test_the_examples_show_theirs(name: str) -> None:
    """All read them by a model from a module of options."""
    known = known_options(read_workload(name))
    assert known is not None
    assert {"epochs", "lr"} < known


def test_an_imported_function_shows_nothing(write: Write) -> None:
    """It may read options that no source of the workload names."""
    name = write(PLAIN + "def train(ctx): ...\nfrom x import evaluate\n")
    assert known_options(read_workload(name)) is None


def test_what_an_object_hands_to_other_modules_isnt_shown(write: Write) -> None:
    """The context of its methods comes after self."""
    source = """
from x import build

class Mine:
    def prepare(self, ctx): ...
    def train(self, ctx): return build(ctx), ctx.options["epochs"]
    def evaluate(self, ctx): ...

mine = Mine()
"""
    assert known_options(read_workload(f"{write(source)}:mine")) is None
    name = write(source.replace("build(ctx)", "build"))
    assert known_options(read_workload(f"{name}:mine")) == {"epochs"}


def test_a_wrong_option_is_named_with_the_near_one(write: Write) -> None:
    """The error also lists all options."""
    name = write(OTHERS + MODEL + READ)
    says = "there is no option siz; did you mean size\\?; there are lr, size"
    with pytest.raises(InvalidParamsError, match=says):
        check_options(read_workload(name), ["lr"], ["siz"])
    check_options(read_workload(name), ["lr"], ["size"])


AS_MODEL = "def prepare(ctx):\n    o = read_options(Options, ctx.options)\n    return o.size\n"


@pytest.mark.parametrize(
    ("source", "read"),
    [
        (OTHERS + PLAIN, {"a", "b"}),
        (OTHERS + MODEL + AS_MODEL, {"size"}),
        (OTHERS + "def prepare(ctx): return 'a' in ctx.options\n", {"a"}),
        (OTHERS + MODEL + READ, set()),
        (OTHERS + "@torch.no_grad\n" + PLAIN.replace("(ctx):", "(ctx) -> np.ndarray:"), {"a", "b"}),
        (
            PLAIN.replace("prepare", "train") + "def prepare(ctx): ...\ndef evaluate(ctx): ...\n",
            set(),
        ),
    ],
    ids=["by key", "by a model's field", "asked for", "a model handed on", "annotated", "by train"],
)
def test_an_option_of_prepare_is_refused_among_those_that_it_does_not_get(
    write: Write, source: str, read: set[str]
) -> None:
    """It would be on record, and the dataset would be made without it."""
    workload = read_workload(write(source))
    assert options_of_prepare(workload) == read
    for name in read:
        says = f"prepare of .* reads {name}, but gets only data_options: give it there .-d {name}="
        with pytest.raises(InvalidParamsError, match=says):
            check_options(workload, [name], [])
        check_options(workload, [], [name])
        check_options(workload, [name], [name])  # train may have another value, if it says both


def test_an_option_that_a_method_prepares_with(write: Write) -> None:
    """Of a class that is a workload."""
    source = """
class Mine:
    def prepare(ctx): return ctx.options["size"]
    def train(ctx): return ctx.options["epochs"]
    def evaluate(ctx): ...
"""
    assert options_of_prepare(read_workload(f"{write(source)}:Mine")) == {"size"}


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("prefect_torch_ddp.examples.digits", DigitsData),
        ("flows.cifar10", options.Cifar10Data),
        ("flows.gridded", options.GriddedData),
        ("flows.land_use", options.LandUseData),
        ("flows.pet_names", options.PetNamesData),
        ("flows.tabular", options.TabularData),
    ],
)
def test_the_examples_data_options_are_what_prepare_reads(name: str, read: type[Params]) -> None:
    """No more, which would make the dataset anew, and no less."""
    assert options_of_prepare(read_workload(name)) == set(read.model_fields)


@pytest.mark.parametrize(
    ("file", "says"),
    [("/jobs/night.py", "give this script's module: night$"), (None, "%%writefile my_workload.py")],
    ids=["script", "notebook"],
)
def test_main_is_no_workload(monkeypatch: pytest.MonkeyPatch, file: str | None, says: str) -> None:
    """The error says which module is, or what makes one of a cell."""
    main = ModuleType("__main__")
    if file:
        main.__file__ = file
    monkeypatch.setitem(sys.modules, "__main__", main)
    with pytest.raises(InvalidParamsError, match=says):
        read_workload("__main__")


def test_a_files_name_is_no_module(write: Write) -> None:
    """It says which one is, and runs nothing of it."""
    name = write("raise RuntimeError('run')\n")
    with pytest.raises(InvalidParamsError, match=f"give its module's: {name}$"):
        read_workload(f"{name}.py")
