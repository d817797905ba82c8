"""What a workload imports, read from its source."""

from pathlib import Path

import pytest

from prefect_torch_ddp.tracking.imports import imported_packages


@pytest.mark.parametrize("folder", ["site-packages", "dist-packages", "target"])
def test_packages_of_another_prefix_are_named_and_not_read(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package on the import path that is another Python's is no module of the user's own."""
    packages, own = tmp_path / "apps" / folder, tmp_path / "own"
    for name, imports in (("far", "import further"), ("further", "")):
        (packages / name).mkdir(parents=True)
        (packages / name / "__init__.py").write_text(imports, encoding="utf-8")
    if folder == "target":  # as `pip install --target` leaves it
        (packages / "far-1.0.dist-info").mkdir()
    own.mkdir()
    (own / "helping.py").write_text("import far.deep\n")
    source = own / "trains.py"
    source.write_text("import helping\n")
    monkeypatch.syspath_prepend(packages)
    monkeypatch.syspath_prepend(own)
    assert imported_packages(source, "trains") == {"far"}
