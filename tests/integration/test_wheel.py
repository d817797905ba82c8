"""The installed wheel is the whole product, with the checkout on no path."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from collections.abc import Iterable
from importlib.metadata import distribution
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.long,
    pytest.mark.usefixtures("prefect_api"),
]

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXAMPLES = re.findall(
    r"^```python\n(.*?)^```$",
    (ROOT / "README.md").read_text(encoding="utf-8"),
    re.MULTILINE | re.DOTALL,
)
LIMIT_S = 150
INSTALL_S = 900


def built_wheel(folder: Path) -> Path:
    """Build the wheel, as `pip install .` does."""
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT))
    (built,) = folder.glob("*.whl")
    return built


def installed(wheel: Path, folder: Path, *beside: str) -> Path:
    """Install the wheel into an environment of its own; give the Python.

    What it requires without extras is linked from the packages installed here, and nothing else
    is there: installing that anew takes minutes and gigabytes, which `make wheel` does.

    Args:
        wheel: the package's.
        folder: of the environment.
        beside: other distributions that are linked too, with what they require.
    """
    venv.create(folder, symlinks=True)
    there = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))
    for name in required([*PROJECT["dependencies"], *beside]):
        package = distribution(name)
        for file in package.files or ():
            if ".." not in file.parts and "__pycache__" not in file.parts:
                (there / file).parent.mkdir(parents=True, exist_ok=True)
                link(package.locate_file(file), there / file)
    pip(folder / "bin" / "python", "install", "--no-deps", str(wheel))
    pip(folder / "bin" / "python", "check")
    return folder / "bin" / "python"


def required(requirements: Iterable[str]) -> dict[str, set[str]]:
    """Return the distributions that requirements need here, each with the extras it is needed
    with."""
    found: dict[str, set[str]] = {}
    left = [(Requirement(each), "") for each in requirements]
    while left:
        needed, of_extra = left.pop()
        if needed.marker and not needed.marker.evaluate({"extra": of_extra}):
            continue
        name = canonicalize_name(needed.name)
        more = {"", *needed.extras} - found.get(name, set())
        found.setdefault(name, set()).update(more)
        for extra in more:
            left += [(Requirement(each), extra) for each in distribution(name).requires or ()]
    return found


def link(source: str | os.PathLike[str], target: Path) -> None:
    """Link a file, or copy it to another file system."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def pip(python: Path, *command: str) -> None:
    """Run this environment's pip for another."""
    run(sys.executable, "-m", "pip", "--python", str(python), *command, timeout_s=INSTALL_S)


def run(*command: str, folder: Path | None = None, timeout_s: float = LIMIT_S) -> str:
    """Run a command, in a folder that is also its home, and return the last line it prints."""
    changed = {"HOME": str(folder), "PREFECT_HOME": f"{folder}/prefect"} if folder else {}
    environment = {**os.environ, **changed}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout.strip().rpartition("\n")[2]


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


def check_examples(python: Path, home: Path, timeout_s: float = LIMIT_S) -> None:
    """Run each of the README's Python examples unchanged in a separate folder; it ends well
    and prints what the README promises."""
    for example in EXAMPLES:
        folder = home / name_of(example).removesuffix(".py")
        folder.mkdir()
        (folder / name_of(example)).write_text(example, encoding="utf-8")
        script = str(folder / name_of(example))
        result = run(str(python), script, folder=folder, timeout_s=timeout_s)
        print(script, result)
        if "run_gang" in example:
            assert result == "[3.0, 3.0]"
        elif "model_uri" in example:
            assert Path(result).is_relative_to(folder / "prefect-torch-ddp")
            assert Path(result).is_file()
        elif "ddp_task" in example:
            assert float(result) < 0.1
        else:
            assert float(result) >= 0.9


def check_deployed(python: Path, folder: Path) -> None:
    """In an empty folder, `prefect deploy` takes the flow by its module, and a worker runs it: the
    default workload, on ranks that see no checkout."""
    folder.mkdir()

    def do(*command: str) -> str:
        return run(str(python), "-m", "prefect", "--no-prompt", *command, folder=folder)

    entrypoint = "prefect_torch_ddp.flow:train_flow"
    do("work-pool", "create", "of-the-wheel", "--type", "process")
    do("deploy", entrypoint, "--name", "of-the-wheel", "--pool", "of-the-wheel")
    do("deployment", "run", "train-ddp/of-the-wheel", "-p", 'params={"options": {"epochs": 1}}')
    do("worker", "start", "--pool", "of-the-wheel", "--run-once")
    models = folder / "prefect-torch-ddp"
    wait_until(lambda: [*models.glob("runs/*/**/model.safetensors")], what="a model")


@pytest.mark.timeout(INSTALL_S + 8 * LIMIT_S)
def test_what_is_installed_is_the_product(tmp_path: Path) -> None:
    """The wheel installs no generic name; with what it requires, no extra, the README's examples
    run from it, and the command trains the digits."""
    wheel = built_wheel(tmp_path)
    tops = {name.partition("/")[0] for name in ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"prefect_torch_ddp"}
    python = installed(wheel, tmp_path / "installed")
    seen = (
        "import prefect_torch_ddp as ours; from importlib.util import find_spec;"
        "print(ours.__file__, find_spec('flows'))"
    )
    home, flows = run(str(python), "-c", seen, folder=tmp_path).split()
    assert Path(home).is_relative_to(python.parents[1])
    assert flows == "None"
    command = str(python.parent / "prefect-torch-ddp")
    assert "prefect-torch-ddp resume" in run(command, "train", folder=tmp_path)
    check_examples(python, tmp_path)
    check_deployed(python, tmp_path / "deployed")
