"""What the README shows works: each of its Python examples runs as it stands."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.extended

README = Path(__file__).parents[2] / "README.md"
EXAMPLES = re.findall(
    r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
)
LIMIT_S = 150


def name_of(example: str) -> str:
    """Return the file name that an example's first line gives it, else one made from what it
    imports from the package."""
    given = re.match(r"# (\w+\.py)\n", example)
    used = re.search(r"from prefect_torch_ddp import ([\w, ]+)", example)
    return (
        given[1]
        if given
        else "_".join(re.findall(r"\w+", used[1] if used else "none")).lower() + "_example.py"
    )


def last_line(example: str, folder: Path) -> str:
    """Run an example as a script in a folder and a home of its own; return the last line that
    it prints."""
    script = folder / name_of(example)
    script.write_text(example, encoding="utf-8")
    environment = os.environ | {"HOME": str(folder), "PREFECT_HOME": str(folder / "prefect")}
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.usefixtures("prefect_api")
@pytest.mark.parametrize("example", EXAMPLES, ids=name_of)
def test_the_example_runs_as_it_stands(tmp_path: Path, example: str) -> None:
    """Copied into a file and run, it ends well and prints what the README promises."""
    result = last_line(example, tmp_path)
    if "run_gang" in example:
        assert result == "[3.0, 3.0]"
    elif "model_uri" in example:
        assert Path(result).is_relative_to(tmp_path / "prefect-torch-ddp")
        assert Path(result).is_file()
    elif "ddp_task" in example:
        assert float(result) < 0.1
    else:
        assert float(result) >= 0.9


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
