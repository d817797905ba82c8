"""How newcomers are tested: what their environment has, what differs from a golden text."""

from pathlib import Path

import pytest

from tests.support.newcomer import newcomers_environment
from tests.support.printed import differences, without_what_varies

GOLDEN = ["begins", "3* progress", "2? saved", "saved", "the run", "the report"]
ALWAYS = ["begins", "saved", "the run", "the report"]


def changed(printed: list[str]) -> list[str]:
    """Return the lines that the diff adds or takes away."""
    lines = differences(GOLDEN, printed)
    return [line for line in lines if line[0] in "+-" and line[:3] not in ("---", "+++")]


def test_what_is_not_always_printed_is_no_difference() -> None:
    """Up to so many times, at its place or anywhere."""
    assert not changed(ALWAYS)
    assert not changed(["begins", "saved", "saved", "saved", "the run", "the report"])
    assert not changed(["progress", *ALWAYS[:2], "progress", *ALWAYS[2:], "progress"])


def test_order_and_repetition_are_differences() -> None:
    """A line elsewhere, a line once more, one too many that may be repeated, and one that lacks."""
    assert changed(["begins", "saved", "the report", "the run"]) == ["+the report", "-the report"]
    assert changed([*ALWAYS, "the report"]) == ["+the report"]
    assert changed(["begins", *["saved"] * 4, "the run", "the report"]) == ["+saved"]
    assert changed([*["progress"] * 4, *ALWAYS]) == ["+progress"]
    assert changed(["begins", "the run", "the report"]) == ["-saved"]
    assert changed(["begins", "saved", "the run", "saved", "the report"]) == [
        "+the run",
        "-the run",
    ]


def test_names_places_and_measured_numbers_vary() -> None:
    """What is the same each time, such as the number of ranks, stays; so do order and columns."""
    text = (
        "15:54:10.023 | \x1b[36mINFO\x1b[0m    | Task run 'train-db3' - attempt 1 on 2 ranks\n\n"
        "15:54:14.054 | INFO    | Flow run 'loose-curassow' - took 6.5 s, 220 kB, 359 samples\n"
        "report      /tmp/home/runs/loose-curassow-5d915b03cb93/report.html\n"
    )
    assert without_what_varies(text, Path("/tmp/home")) == [
        "INFO    | Task run 'train' - attempt 1 on 2 ranks",
        "INFO    | Flow run 'NAME' - took N s, N kB, 359 samples",
        "report      FOLDER/runs/RUN/report.html",
    ]


def test_a_newcomer_has_none_of_the_tests_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what was exported, and none that is set for the tests, for pytest or by a developer."""
    monkeypatch.setenv("PREFECT_PROFILE", "mine")
    given = newcomers_environment(tmp_path, tmp_path / "bin", PREFECT_API_URL="http://a:1/api")
    ours = ("PREFECT_", "DASK_", "PYTEST_", "MALLOC_", "OMP_", "PYTHONPATH")
    assert [name for name in given if name.startswith(ours)] == ["PREFECT_API_URL"]
    assert given["HOME"] == str(tmp_path)
    assert given["PATH"].startswith(f"{tmp_path}/bin:")
