"""The pages: tables name tests that exist, docs/api.md is current, what is linked is there."""

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from prefect_torch_ddp.checkpoint.manifest import Manifest, ManifestObject
from prefect_torch_ddp.data.dataset_manifest import DatasetFile, DatasetManifest
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
from tests.api_page import PAGE, page

ROOT = Path(__file__).parents[2]
README, FAULTS, SECURITY = (
    (ROOT / name).read_text(encoding="utf-8")
    for name in ("README.md", "tests/faults.md", "docs/security.md")
)
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
DEFINED = re.compile(r"^ *def (test_\w+)\(", re.MULTILINE)


def test_each_named_test_exists() -> None:
    """A test that is renamed or removed takes its row along."""
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")]
    tests = {name for source in sources for name in DEFINED.findall(source)}
    missing = set(re.findall(r"`(test_\w+)`", FAULTS + SECURITY)) - tests
    assert not missing


def test_each_row_names_a_test_or_says_that_there_is_none() -> None:
    """No row promises something that nothing shows, and there are rows."""
    rows = [row for row in FAULTS.splitlines() if row.startswith("| ") and "| what " not in row]
    assert len(rows) > 30
    for row in rows:
        shown_by = row.split(" | ")[-1]
        assert "no test yet" in shown_by or re.search(r"`test_\w+`", shown_by), row


def test_the_api_page_is_what_the_docstrings_say() -> None:
    """After a change of a public name, signature or docstring: `python -m tests.api_page`."""
    assert PAGE.read_text(encoding="utf-8") == page(), "run `python -m tests.api_page`"


def test_all_three_levels_and_a_workload_are_shown() -> None:
    """README has one example of each level, and a whole workload; test_wheel.py runs them."""
    assert len(EXAMPLES) == 4
    for text in ("report.model_uri", "@ddp_task", "run_gang(", "def prepare("):
        assert sum(text in example for example in EXAMPLES) == 1


def test_pages_are_short_and_links_and_paths_lead_somewhere() -> None:
    """Every file that the README and the documents link to, or name by its path, is there; each
    page but the table of faults has at most 200 lines."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")]
    for path in (*pages, ROOT / "tests/faults.md"):
        text = path.read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#:]+)(?:#[\w-]+)?\)", text):
            assert (path.parent / target).exists(), f"{path.name} links to {target}"
        for named in re.findall(r"`([\w/]+/[\w/]+\.(?:py|pyi|yaml|md))`", text):
            found = [folder / named for folder in (ROOT, ROOT / "prefect_torch_ddp")]
            assert any(map(Path.exists, found)), f"{path.name} names {named}"
        assert path not in pages or text.count("\n") <= 200, path.name


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
