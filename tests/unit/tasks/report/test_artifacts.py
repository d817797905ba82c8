"""The keys of artifacts, which Prefect wants to be plain, and people short."""

import re

import pytest

from prefect_torch_ddp.tasks.report.artifacts import key

DIGITS = "prefect_torch_ddp.examples.digits"


@pytest.mark.parametrize(
    ("experiment", "expected"),
    [
        (f"train-ddp/nightly/{DIGITS}", "digits-nightly-report"),
        (f"train-ddp/{DIGITS}", "digits-report"),
        ("train-ddp/big-nightly/birds", "birds-big-nightly-report"),
        ("train-ddp/nightly/flows.land_use", "land-use-nightly-DIGEST-report"),
        ("train-ddp/nightly/digits", "digits-nightly-DIGEST-report"),
        ("line/__main__/fit", "fit-line-DIGEST-report"),
        ("my flow/nightly/tasks.fits/fit:fold 1", "fit-fold-1-my-flow-DIGEST-report"),
        ("cats/tasks.fits/fit:lr-0.05", "fit-lr-0-05-cats-DIGEST-report"),
        ("fit", "fit-DIGEST-report"),
        ("\xe4", "DIGEST-report"),
    ],
)
def test_a_key_is_the_short_name_and_the_kind(experiment: str, expected: str) -> None:
    """The workload, the deployment or flow; a digest if more than one experiment may be so
    called. Lowercase letters, digits and dashes, whatever the name holds."""
    assert re.fullmatch(expected.replace("DIGEST", "[0-9a-f]{6}"), key("report", experiment))


def test_no_two_experiments_have_one_key() -> None:
    """However alike they are, and however long."""
    ends = [
        "fit_a",
        "fit-a",
        "fit a",
        "Fit-a",
        "a.fit",
        "b.fit",
        "fit",
        "\xe4",
        "\xf6",
        DIGITS,
        "digits",
    ]
    ends += ["x" * length for length in (59, 60, 61, 99, 100)]
    names = [
        f"{begin}{end}" for begin in ("", "train-ddp/", "train-ddp/a/", "other/") for end in ends
    ]
    names += [
        "train-ddp/a/b",
        "train-ddp/a-b",
        "train-ddp/b-c/a",
        "train-ddp/b/a-c",
        "train-ddp/b-/a",
    ]
    made = [key("report", name) for name in names]
    assert len(set(made)) == len(names)
    assert all(len(each) < 80 and re.fullmatch("[a-z0-9]+(-[a-z0-9]+)*", each) for each in made)
