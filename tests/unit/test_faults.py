"""The tables of faults and of docs/security.md name the tests that show what they say."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = (TESTS / "faults.md").read_text(encoding="utf-8")
SECURITY = (TESTS.parent / "docs" / "security.md").read_text(encoding="utf-8")


def test_each_named_test_exists() -> None:
    """A test that is renamed or removed takes its row along."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in TESTS.rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    tests = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    missing = set(re.findall(r"`(test_\w+)`", PAGE + SECURITY)) - tests
    assert not missing


def test_each_row_names_a_test_or_says_that_there_is_none() -> None:
    """No row promises something that nothing shows, and there are rows."""
    rows = [row for row in PAGE.splitlines() if row.startswith("| ") and "| what " not in row]
    assert len(rows) > 30
    for row in rows:
        shown_by = row.split(" | ")[-1]
        assert "no test yet" in shown_by or re.search(r"`test_\w+`", shown_by), row
