"""The user's own code: its folders, in order, and the libraries that are loaded for it."""

import gc
import json
import site
import sys
import sysconfig
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from prefect_torch_ddp import ddp_script
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.gang.caller.sent.code import own_code_paths
from prefect_torch_ddp.gang.caller.sent.preload import preload_of
from prefect_torch_ddp.protocol.rank import Preload, is_installed
from prefect_torch_ddp.tasks.train_run import RUN_TASK


def test_the_callers_order_holds_at_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script's folder and its sub-folder stay before installed packages, others after them."""
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


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (f"{sys.prefix}/bin/prefect", True),
        (json.__file__, True),
        (pytest.__file__, True),
        (f"{sys.prefix}/src/app/main.py", False),
        (f"{sys.base_prefix}/src/app/main.py", False),
    ],
    ids=["a command", "Python's own", "a package", "below an environment", "/usr/src/app"],
)
def test_only_some_folders_of_a_prefix_are_not_the_users(path: str, expected: bool) -> None:
    """The prefix of Debian's Python is /usr, and containers often have their code below it."""
    assert is_installed(path) == expected


@pytest.fixture
def write_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[dict[str, str]], None]:
    """Return a function that writes code by a module's path, on the interpreter's path."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(modules: dict[str, str]) -> None:
        for name, code in modules.items():
            path = tmp_path / f"{name}.py"
            path.parent.mkdir(exist_ok=True)
            path.write_text(code, encoding="utf-8")

    return write


BEFORE = {
    "only imports": ("import os, sys\nfrom pathlib import Path\n", True),
    "docstring and constants": ('"""Words."""\nimport os\nLR = 0.1\nNAMES: list = ["a"]\n', True),
    "definitions": ("def f(x=1):\n    g()\nclass A:\n    y = 2\n    def m(self): f()\n", True),
    "load_dotenv()": ("from pydantic import BaseModel\nload_dotenv()\n", False),
    "this package": ("from prefect_torch_ddp import RankContext\n", True),
    "setup() of an own module": ("from job_settings import setup\n", False),
    "an own module": ("import job_settings\n", False),
    "an environment variable": ("import os\nos.environ['A'] = 'b'\n", False),
    "a called default": ("def f(x=g()):\n    pass\n", False),
    "a decorator": ("@g\ndef f():\n    pass\n", False),
    "a class that calls": ("class A:\n    g()\n", False),
    "an assigned call": ("X = g()\n", False),
    "a condition": ("if True:\n    pass\n", False),
}


@pytest.mark.parametrize(("before", "loads"), BEFORE.values(), ids=BEFORE)
def test_a_library_is_loaded_ahead_only_if_nothing_runs_before_it(
    tmp_path: Path, write_modules: Callable[[dict[str, str]], None], before: str, *, loads: bool
) -> None:
    """Code above an import may prepare it, as `load_dotenv()` does."""
    job = tmp_path / "job"
    write_modules(
        {
            "job/__init__": "import os\n",
            "job/train": f"{before}import torch, torchvision\ndef train(): pass\n",
            "job_settings": "",
        }
    )
    wanted = ("torchvision",) if loads else ()
    assert preload_of("job.train:train").libraries == wanted
    assert preload_of(str(job / "train.py")).libraries == wanted
    (job / "__init__.py").write_text("import os\nprint()\n")
    assert preload_of("job.train:train").libraries == ()
    assert "job" not in sys.modules


def test_only_safe_libraries_are_loaded_by_default(
    write_modules: Callable[[dict[str, str]], None],
) -> None:
    """Others are loaded if the user names them; a module of the user's own is refused."""
    write_modules({"own": "from PIL import Image\nimport psutil\n"})
    assert preload_of("own:train").libraries == ("PIL",)
    assert preload_of("own:train", ["psutil"]).libraries == ("psutil",)
    assert preload_of("own:train", []).libraries == ()
    assert preload_of("absent:train").libraries == ()
    with pytest.raises(InvalidParamsError, match="'own', which is your own module"):
        preload_of("own:train", ["own"])


def test_a_script_as_a_task_has_the_libraries_of_its_file(
    tmp_path: Path, write_modules: Callable[[dict[str, str]], None]
) -> None:
    """As `run_gang` has them for it, also of a module."""
    write_modules({"job/__init__": "", "job/train": "import torch, torchvision\n"})
    for script in (str(tmp_path / "job" / "train.py"), "-m job.train"):
        task: Any = ddp_script(script)
        call = RUN_TASK.with_arguments((None, task.fn, ()), {})
        assert preload_of(call.code).libraries == ("torchvision",)


def test_a_library_in_whose_place_the_user_has_a_module_is_not_loaded(
    write_modules: Callable[[dict[str, str]], None],
) -> None:
    """Nor may a server have it that another gang's ranks were forked from."""
    write_modules({"own": "import torchvision\n", "torchvision": ""})
    preload = preload_of("own:train")
    assert preload == Preload((), ("torchvision",))
    allowed = {name: preload.allows(name) for name in ("PIL", "torchvision", "psutil")}
    assert allowed == {"PIL": True, "torchvision": False, "psutil": False}


def test_sources_are_read_in_threads(tmp_path: Path) -> None:
    """Threads of several gangs read sources while Dask follows the garbage collector."""
    script = tmp_path / "deep.py"
    script.write_text(f"x = {'[' * 40}1{']' * 40}\n" * 100, encoding="utf-8")
    threshold = gc.get_threshold()
    gc.set_threshold(20)
    gc.callbacks.append(_let_others_in)
    try:
        with ThreadPoolExecutor(6) as pool:
            assert len(set(pool.map(preload_of, [str(script)] * 20))) == 1
    finally:
        gc.callbacks.remove(_let_others_in)
        gc.set_threshold(*threshold)


def _let_others_in(*_: object) -> None:
    time.sleep(1e-5)
