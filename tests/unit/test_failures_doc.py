"""The table of failures names the tests that show what it says: they exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "failures.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)))


@pytest.mark.parametrize(("file", "test"), NAMED)
def test_each_named_test_exists(file: str, test: str) -> None:
    """A test that is renamed or removed takes its row along."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    assert test in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_each_row_names_a_test_or_says_that_there_is_none() -> None:
    """No row promises something that nothing shows, and there are rows."""
    rows = [
        line
        for line in PAGE.splitlines()
        if line.startswith("| ") and not line.startswith("| what ")
    ]
    assert len(rows) > 30
    for row in rows:
        shown_by = row.split(" | ")[-1]
        assert "no test yet" in shown_by or re.search(r"`tests/[\w/]+\.py::test_\w+`", shown_by), (
            row
        )
