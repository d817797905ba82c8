"""The user's own code: its folders, in order, and the libraries that it imports."""

import gc
import site
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from prefect_torch_ddp.gang.caller.code import own_code_paths, preload_of


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


SOURCES = {
    "job/__init__.py": "import os\n",
    "job/train.py": "from . import model\nfrom .data import load\nimport torch, psutil\n"
    "if True:\n    import pydantic\n"
    "def train():\n    import numpy.fft\n    return pytest\n"
    "import os\nos.environ['A'] = 'b'\nimport hypothesis\n",
    "job/model.py": "import dask.array as da\nfrom prefect_torch_ddp import Params\n",
    "job/data/__init__.py": "from ..missing import x\nfrom pydantic import (\n    BaseModel,\n)\n",
    "broken.py": "import (\n",
}


def test_libraries_are_read_from_the_sources_of_own_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of the imports, without those in functions, or below a change of them."""
    for name, text in SOURCES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    imports = (
        "import dask.array",
        "from prefect_torch_ddp import Params",
        "from pydantic import BaseModel",
        "import psutil",
    )
    assert preload_of("job.train:train", own_code_paths()).imports == imports
    assert preload_of(str(tmp_path / "job/model.py"), own_code_paths()).imports == imports[:2]
    assert (
        preload_of("broken:train", own_code_paths()).imports
        == preload_of("absent:train", own_code_paths()).imports
        == ()
    )
    assert "job" not in sys.modules


def test_folders_without_modules_stand_in_no_librarys_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a caller on another Dask worker, which has a folder of its own on its path, would ask
    for other libraries, and they would be loaded anew."""
    for name in ("of-worker-1", "of-worker-2"):
        (tmp_path / name / "storage").mkdir(parents=True)
        monkeypatch.syspath_prepend(str(tmp_path / name))
    assert not any(
        str(tmp_path) in folder for folder in preload_of(max, own_code_paths()).shadowed_by
    )
    uploaded = tmp_path / "of-worker-2"
    (uploaded / "psutil.py").touch()
    assert str(uploaded) in preload_of(max, own_code_paths()).shadowed_by


def test_libraries_of_a_function_that_travels_whole_are_those_it_names() -> None:
    """Its module isn't imported in the rank, but what its global names stand for is."""

    def helper() -> object:
        return pytest.approx

    def train() -> object:
        return helper() or sysconfig

    assert preload_of(train, own_code_paths()).imports == ()
    assert preload_of(helper, own_code_paths()).imports == ("import pytest",)
    assert preload_of(max, own_code_paths()).imports == ()


def test_sources_are_read_in_threads(tmp_path: Path) -> None:
    """As for gangs that are run at once, beside Dask, which follows the garbage collector."""
    script = tmp_path / "deep.py"
    script.write_text(f"x = {'[' * 40}1{']' * 40}\n" * 100)
    threshold = gc.get_threshold()
    gc.set_threshold(20)
    gc.callbacks.append(_let_others_in)
    try:
        with ThreadPoolExecutor(6) as pool:
            assert len(set(pool.map(preload_of, [str(script)] * 20, [own_code_paths()] * 20))) == 1
    finally:
        gc.callbacks.remove(_let_others_in)
        gc.set_threshold(*threshold)


def _let_others_in(*_: object) -> None:
    time.sleep(1e-5)
