"""Which differences between versions break a gang, and how they are reported."""

import pytest

from prefect_torch_ddp.gang.versions import conflicts, versions

HERE = {"python": "3.11.7", "prefect-torch-ddp": "0.1.0", "torch": "2.15.0", "numpy": "2.4.6"}


@pytest.mark.parametrize(
    ("package", "theirs", "breaks"),
    [
        ("python", "3.11.9", False),
        ("python", "3.12.7", True),
        ("prefect-torch-ddp", "0.1.1", True),
        ("numpy", "2.1.0", False),
        ("numpy", "1.26.4", True),
        ("torch", "2.14.1+cpu", False),  # the caller may have another, or none
        ("dask", "2025.1", False),
    ],
)
def test_between_caller_and_workers(package: str, theirs: str, breaks: bool) -> None:
    """Each package counts down to the part of its version that decides."""
    found = conflicts(HERE, {"tcp://a": {**HERE, package: theirs}})
    assert set(found) == ({package} if breaks else set())
    if breaks:
        assert f"{HERE[package]} here" in found[package]
        assert f"{theirs} on tcp://a" in found[package]


def test_between_workers() -> None:
    """Ranks with another release of torch may not understand each other; a build may differ. Of
    many workers the first is named."""
    workers = {f"tcp://{i}": {**HERE, "torch": f"2.1{i}.0+cpu"} for i in (4, 5)}
    (text,) = conflicts(HERE, workers).values()
    assert "2.14.0+cpu on tcp://4, 2.15.0+cpu on tcp://5" in text
    builds = {"tcp://0": HERE, "tcp://1": {**HERE, "torch": "2.15.1+cpu"}}
    assert not conflicts(HERE, builds)
    many = {f"tcp://{i}": {**HERE, "python": "3.13.1"} for i in range(9)}
    assert "3.13.1 on tcp://0 and 8 more" in conflicts(HERE, many)["python"]


def test_what_is_lacking_is_no_conflict() -> None:
    """Who imports it says so."""
    assert not conflicts({"python": "3.11.7"}, {"tcp://a": HERE})


def test_own_versions() -> None:
    """This process has them."""
    assert {"python", "torch", "prefect-torch-ddp"} <= set(versions())
