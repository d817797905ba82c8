"""The pages: tables name tests that exist, every public name is in the manual, links lead there."""

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, Unpack, get_args, get_origin

import pytest

import prefect_torch_ddp
import prefect_torch_ddp.data
from prefect_torch_ddp import (
    CheckpointParams,
    ClusterParams,
    GangCancelledError,
    GangHungError,
    Hang,
    Params,
    RankFailedError,
    RankFailure,
    TrainParams,
    WorkerLostError,
    ddp_task,
    run_gang,
)
from prefect_torch_ddp.checkpoint.manifest import Manifest, ManifestObject
from prefect_torch_ddp.data.datasets.dataset_manifest import DatasetFile, DatasetManifest
from prefect_torch_ddp.option_lines import default_of, option_lines
from prefect_torch_ddp.params import GangOptions
from prefect_torch_ddp.protocol.events import FailureRecord
from prefect_torch_ddp.rank.training.loop_progress import Position
from prefect_torch_ddp.rank.training.numbers import OwnSaves
from prefect_torch_ddp.records.ledger import EndLine, LoopLine, StepLine
from prefect_torch_ddp.records.metrics import ROW
from prefect_torch_ddp.records.run_record import AttemptRecord, RunRecord
from prefect_torch_ddp.records.timing import TimingLine
from prefect_torch_ddp.results import (
    CheckpointRef,
    ClassScore,
    DatasetReport,
    FailedAttempt,
    Goodput,
    Report,
    TrainingSummary,
)
from prefect_torch_ddp.tasks.gangs.task_training import TaskParams
from tests.support.pages import example_of

ROOT = Path(__file__).parents[2]
README, FAULTS, SECURITY = (
    (ROOT / name).read_text(encoding="utf-8")
    for name in ("README.md", "tests/faults.md", "docs/security.md")
)
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
DEFINED = re.compile(r"^ *def (test_\w+)\(", re.MULTILINE)


def test_each_named_test_exists() -> None:
    """No page names a test that was renamed or removed."""
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")]
    tests = {name for source in sources for name in DEFINED.findall(source)}
    missing = set(re.findall(r"`(test_\w+)`", FAULTS + SECURITY)) - tests
    assert not missing


def test_each_row_names_a_test_or_says_that_there_is_none() -> None:
    """Every row of the table of faults names a test or says that there is none."""
    rows = [row for row in FAULTS.splitlines() if row.startswith("| ") and "| what " not in row]
    assert len(rows) > 30
    for row in rows:
        shown_by = row.split(" | ")[-1]
        assert "no test yet" in shown_by or re.search(r"`test_\w+`", shown_by), row


DOORS = (prefect_torch_ddp, prefect_torch_ddp.data)
NAMES = {name: getattr(door, name) for door in DOORS for name in door.__all__}
del NAMES["__version__"]


def test_every_public_name_is_once_in_the_manual() -> None:
    """docs/api.md has each public name, under the package that it is imported from."""
    text = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    shown = re.findall(r"^::: (?:\w+\.)+(\w+)$", text, re.MULTILINE)
    assert sorted(shown) == sorted(NAMES)


def _documented() -> Iterator[tuple[str, Any]]:
    """Yield every public name, and the public members of those that are classes of this package."""
    for name, value in NAMES.items():
        yield name, value
        for member, found in vars(value).items() if isinstance(value, type) else ():
            kinds = property | classmethod | staticmethod
            if not member.startswith("_") and (
                inspect.isfunction(found) or isinstance(found, kinds)
            ):
                yield f"{name}.{member}", found


@pytest.mark.parametrize(("name", "value"), [*_documented()])
def test_every_public_name_is_documented(name: str, value: Any) -> None:
    """It has a docstring. If that has an example, its public names and options exist."""
    assert inspect.getdoc(value), name
    _check_example(example_of(value))


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_has_an_example_that_uses_it(name: str) -> None:
    """`help` shows a program with the name itself, or with a value of that type."""
    example = example_of(NAMES[name])
    assert name in example or name in SHOWN_AS, name
    assert SHOWN_AS.get(name, name) in example


SHOWN_AS = {
    "RankContext": "ctx.",
    **dict.fromkeys(("DatasetReport", "EpochRow", "CheckpointRef", "FailedAttempt"), "report."),
    **dict.fromkeys(("ClassScore", "WorstSample", "TrainingSummary"), "report."),
    "EpochLedger": "epoch.",
    "LedgerReport": "ledger.",
    "Goodput": "goodput.",
    "TrainReport": "report.",
    "RankFailure": "error.failure",
    "Hang": "error.hang",
    "StoredObject": "found.",
    "ListedObject": "each.",
    "Readable": "ctx.source.",
    "Storage": "storage.",
    "Sharded": "ctx.loader(",
}
"""Types that programs get as values, and how an example has one."""

ERRORS = {
    "RankFailedError": RankFailedError(RankFailure(0, "a", 1, "exit", "left"), 1),
    "GangHungError": GangHungError(Hang("late", (0,), ("a",), 1), 1),
    "WorkerLostError": WorkerLostError("gone", 3),
    "GangCancelledError": GangCancelledError("cancelled"),
}
"""An error of each class that has attributes."""


def _check_example(code: str) -> None:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("prefect_torch_ddp"):
            assert {alias.name for alias in node.names} <= NAMES.keys()
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in NAMES:
            given = {keyword.arg for keyword in node.keywords if keyword.arg}
            assert not _unknown(given, NAMES[node.func.id]), ast.unparse(node)
        if isinstance(node, ast.ExceptHandler) and node.name:
            error = ERRORS.get(ast.unparse(node.type or node), Exception())
            for used in ast.walk(node):
                if isinstance(used, ast.Attribute) and ast.unparse(used.value) == node.name:
                    assert hasattr(error, used.attr), ast.unparse(used)


def _unknown(given: set[str], value: Any) -> set[str]:
    """Return which of these arguments a public name doesn't take, as a parameter or an option."""
    parameters = inspect.signature(inspect.unwrap(getattr(value, "fn", value))).parameters
    for parameter in parameters.values():
        if get_origin(parameter.annotation) is Unpack:
            given = given - get_args(parameter.annotation)[0].__annotations__.keys()
        elif parameter.kind is parameter.VAR_KEYWORD:
            return set()
    return given - parameters.keys()


def test_help_of_a_level_lists_its_options() -> None:
    """`help(run_gang)` and `help(ddp_task)` have each option with its default at that level."""
    texts = [" ".join(str(inspect.getdoc(level)).split()) for level in (run_gang, ddp_task)]
    for text, default in zip(texts, ("None", "60.0"), strict=True):
        found = re.search(r" progress_timeout_s: .*? Default: (\S+)\.", text)
        assert found
        assert found[1] == default
        assert all(f" {name}: " in text for name in GangOptions.__annotations__)
    assert all(f" {name}: " in texts[1] for name in TaskParams.model_fields)


@pytest.mark.parametrize("model", [TrainParams, CheckpointParams, ClusterParams])
def test_help_of_parameters_lists_them(model: type[Params]) -> None:
    """`help(TrainParams)` has each parameter with its default, and the run form has it once."""
    text = " ".join(str(inspect.getdoc(model)).split())
    for name, field in model.model_fields.items():
        assert re.search(rf" {name}: .*? Default: {re.escape(default_of(field))}\.", text), name
    assert "Options:" not in model.model_json_schema()["description"]


def test_a_line_of_an_option_says_its_unit_default_and_meaning() -> None:
    """What the table of options and `help` show is made of the declaration."""
    lines = {line.name: line for line in option_lines(TrainParams)}
    assert set(lines) == set(TrainParams.model_fields)
    assert lines["retry_delay_s"] == (
        *("retry_delay_s", "seconds ≥ 0", "5.0", "Seconds before a retry."),
    )
    assert lines["backend"].values == '`"auto"`, `"gloo"`, `"nccl"`'
    assert lines["max_world_size"].values == "ranks ≥ 1, or `None`"
    assert lines["checkpoint"][1:3] == ("`CheckpointParams`", "CheckpointParams()")
    every_s = next(line for line in option_lines(CheckpointParams) if line.name == "every_s")
    assert every_s.values == 'seconds > 0, or `"auto"`, or `None`'


def test_all_three_levels_and_a_workload_are_shown() -> None:
    """README has one example of each level, and a whole workload; test_wheel.py runs them."""
    assert len(EXAMPLES) == 4
    for text in ("report.model_uri", "@ddp_task", "run_gang(", "def prepare("):
        assert sum(text in example for example in EXAMPLES) == 1


def test_pages_are_short_and_links_and_paths_lead_somewhere() -> None:
    """Every file that the README and the documents link to, or name by its path, is there; each
    page but the table of faults has at most 200 lines, without the names that api.md lists."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")]
    for path in (*pages, ROOT / "tests/faults.md"):
        text = path.read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#:]+)(?:#[\w-]+)?\)", text):
            is_made = path.parent / target == ROOT / "docs/options.md"  # by docs/site_hooks.py
            assert is_made or (path.parent / target).exists(), f"{path.name} links to {target}"
        for named in re.findall(r"`([\w/]+/[\w/]+\.(?:py|pyi|yaml|md))`", text):
            found = [folder / named for folder in (ROOT, ROOT / "prefect_torch_ddp")]
            assert any(map(Path.exists, found)), f"{path.name} names {named}"
        num_lines = text.count("\n") - 2 * text.count("\n::: ")
        assert path not in pages or num_lines <= 200, path.name


STORED: dict[str, tuple[Any, ...]] = {
    "Manifests": (Manifest, ManifestObject, Position, OwnSaves),
    "Failures": (FailureRecord,),
    "Finished trainings": (TrainingSummary, CheckpointRef, FailedAttempt),
    "Metrics": (ROW,),
    "Timing": (TimingLine,),
    "Ledger": (LoopLine, StepLine, EndLine),
    "Run records": (RunRecord, AttemptRecord, DatasetReport, Report, ClassScore, Goodput),
    "Datasets": (DatasetManifest, DatasetFile),
}


def _names(kind: Any) -> set[str]:
    named = getattr(kind, "_fields", None) or getattr(kind, "names", None)
    model = getattr(kind, "model_fields", None)
    return set(named or model or (field.name for field in fields(kind)))


@pytest.mark.parametrize("section", STORED)
def test_each_field_of_a_stored_file_is_explained(section: str) -> None:
    """docs/formats.md names it in the section of its file."""
    text = (ROOT / "docs/formats.md").read_text(encoding="utf-8")
    here = text.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    said = set(re.findall(r"`(\w+)`", here))
    assert here
    assert set().union(*map(_names, STORED[section])) <= said
