"""The keys of artifacts, which Prefect wants to be plain."""

import re

import pytest

from prefect_torch_ddp.tasks.report.artifacts import key


@pytest.mark.parametrize(
    ("experiment", "expected"),
    [
        ("fit", "report-fit"),
        ("train-ddp tests.workloads.tiny", "report-train-ddp-tests-workloads-tiny-"),
        ("ä", "report-"),
    ],
)
def test_keys_are_lowercase_letters_digits_and_dashes(experiment: str, expected: str) -> None:
    """Whatever the name holds; a name that isn't its own key gets a digest."""
    made = key("report", experiment)
    assert re.fullmatch(expected + "[0-9a-f]{6}" * expected.endswith("-"), made)


def test_no_two_experiments_have_one_key() -> None:
    """Similar and long names get different keys."""
    names = ["fit_a", "fit-a", "fit a", "Fit-a", "ä", "ö", *("x" * length for length in (99, 100))]
    assert len({key("report", name) for name in names}) == len(names)
