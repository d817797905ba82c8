"""The shape of README and documents, and where they lead; test_wheel.py runs the examples."""

import re
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"
EXAMPLES = re.findall(
    r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
)


def test_all_three_levels_and_a_workload_are_shown() -> None:
    """There is one example of each level, and a whole workload."""
    assert len(EXAMPLES) == 4
    for text in ("report.model_uri", "@ddp_task", "run_gang(", "def prepare("):
        assert sum(text in example for example in EXAMPLES) == 1


def test_links_and_paths_lead_somewhere() -> None:
    """Every file that the README and the documents link to, or name by its path, is there."""
    root = README.parent
    pages = [README, root / "CONTRIBUTING.md", *root.glob("docs/*.md"), root / "tests/faults.md"]
    for page in pages:
        text = page.read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#:]+)(?:#[\w-]+)?\)", text):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
        for path in re.findall(r"`([\w/]+/[\w/]+\.(?:py|pyi|yaml|md))`", text):
            found = [folder / path for folder in (root, root / "prefect_torch_ddp")]
            assert any(map(Path.exists, found)), f"{page.name} names {path}"


def test_pages_are_short() -> None:
    """The README and every page of the documents has at most 200 lines."""
    for page in (README, *README.parent.glob("docs/*.md")):
        assert page.read_text(encoding="utf-8").count("\n") <= 200, page.name
