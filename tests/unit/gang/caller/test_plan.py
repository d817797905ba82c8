"""What a gang's plan takes from its caller: the folders of the user's own code, in order."""

import site
import sys
import sysconfig
from pathlib import Path

import pytest

from prefect_torch_ddp.gang.caller.code import own_code_paths


def test_the_callers_order_holds_at_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script's folder and its sub-folder stay before installed packages, others behind."""
    script, below, late = tmp_path / "script", tmp_path / "script" / "flows", tmp_path / "late"
    for folder in (below, late):
        folder.mkdir(parents=True)
    installed = [sysconfig.get_path("stdlib"), site.getsitepackages()[0]]
    monkeypatch.setattr(
        sys, "path", [f"{sys.prefix}/bin", str(script), str(below), *installed, str(late)]
    )
    paths = own_code_paths()
    assert (paths.first, paths.last) == ((str(script), str(below)), (str(late),))
    late.rmdir()  # a worker without a shared file system
    at_rank = ["/worker", str(below), "/site-packages"]
    wanted = [str(script), str(below), "/worker", "/site-packages"]
    assert paths.around(at_rank) == wanted
