"""The first hour: newcomers type what the pages say, from a wheel where no checkout is needed.

Each prints how long its first success took. Times aren't asserted; what is printed is, line by
line, but for what varies (see `tests/support/printed`).
clusters/test_batch_page has the newcomer with a batch system.
"""

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.integration.test_manual import blocks_of, terminal
from tests.integration.test_wheel import EXAMPLES, built_wheel, installed
from tests.support.newcomer import newcomers_environment
from tests.support.printed import compared
from tests.support.servers import prefect_server_in
from tests.support.waiting import HANG_S, wait_until
from tests.support.workers import ROOT
from tests.workloads import torchrun_script

pytestmark = pytest.mark.timeout(900)

LIMIT_S = 300
MOST_LINES = {"a first run": 40, "a run": 40, "a script": 40, "a notebook": 30, "a night": 15}


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel; what it requires is linked."""
    folder = tmp_path_factory.mktemp("wheel")
    return installed(built_wheel(folder), folder / "installed", "ipykernel")


@contextmanager
def timed(what: str, folder: Path) -> Iterator[list[str]]:
    """Time a first success and print it; what it printed is put into the list.

    It is as its golden text says, and no longer than a person reads.
    """
    said: list[str] = []
    began_s = time.monotonic()
    yield said
    took_s, lines = time.monotonic() - began_s, "".join(said).splitlines()
    print(f"{what}: {took_s:.1f} s, {len(lines)} lines")
    assert 0 < len(lines) <= MOST_LINES[what], "\n".join(lines)
    golden = Path(__file__).parent / "golden" / f"{what.replace(' ', '_')}.txt"
    differs = compared(golden, "".join(said), folder)
    assert not differs, differs


def typed(command: str, folder: Path, bin_folder: Path, **changes: str) -> str:
    """Type a command in a folder with an environment on PATH; return all that it prints."""
    environment = newcomers_environment(folder, bin_folder, **changes)
    run = {"cwd": folder, "env": environment, "text": True, "timeout": LIMIT_S}
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(["bash", "-ec", command], check=False, **run, **both)
    assert done.returncode == 0, done.stdout[-4000:]
    return str(done.stdout)


def text_of(output: nbformat.NotebookNode) -> str:
    """Return what a cell shows: Prefect draws lines of the kernel's log, others are a stream."""
    return str(output.data["text/plain"] if "data" in output else output.text)


def test_with_a_wheel_and_no_server(python: Path, tmp_path: Path) -> None:
    """The README's first program, under the server that Prefect embeds."""
    program = next(each for each in EXAMPLES if "train_flow" in each and "__main__" in each)
    (tmp_path / "first.py").write_text(program, encoding="utf-8")
    with timed("a first run", tmp_path) as said:
        said.append(typed("python first.py", tmp_path, python.parent))


def test_with_a_wheel_and_a_server(python: Path, tmp_path: Path, prefect_server: str) -> None:
    """The command line trains the digits."""
    server = {"PREFECT_API_URL": prefect_server}
    with timed("a run", tmp_path) as said:
        said.append(typed("prefect-torch-ddp train", tmp_path, python.parent, **server))
    assert "accuracy" in said[0]


def test_with_a_script_for_torchrun(python: Path, tmp_path: Path, prefect_server: str) -> None:
    """A script runs unchanged, with the flags that its author knows."""
    server = {"PREFECT_API_URL": prefect_server}
    shutil.copy(str(torchrun_script.__file__), tmp_path / "train.py")
    command = f"prefect-torch-ddp run-script train.py --nproc-per-node=2 -- {tmp_path} --lr 0.1"
    with timed("a script", tmp_path) as said:
        said.append(typed(command, tmp_path, python.parent, **server))
    assert (tmp_path / "final.pt").exists()


def test_in_a_notebook(
    python: Path, tmp_path: Path, prefect_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cells of the page, then the report's summary, in the newcomer's kernel."""
    kernel = {"argv": [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"]}
    kernel |= {"display_name": "Newcomer", "language": "python"}
    (tmp_path / "kernels/newcomer").mkdir(parents=True)
    (tmp_path / "kernels/newcomer/kernel.json").write_text(json.dumps(kernel), encoding="utf-8")
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    environment = newcomers_environment(tmp_path, python.parent, PREFECT_API_URL=prefect_server)
    cells = [text for language, text in blocks_of(ROOT / "docs/notebooks.md")[:2]]
    cells += ["report", "import prefect_torch_ddp; print(prefect_torch_ddp.__file__)"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells])
    where = {"metadata": {"path": str(tmp_path)}}
    with timed("a notebook", tmp_path) as said:
        client = NotebookClient(notebook, timeout=LIMIT_S, kernel_name="newcomer", resources=where)
        client.execute(env=environment)
        *page, shown, package = notebook.cells
        said += [text_of(output) for cell in page for output in cell.outputs]
    plain = re.sub(r"\x1b\[[\d;]*m", "", "".join(said))
    (accuracy,) = re.findall(r"^[01]\.\d+$", plain, re.MULTILINE)
    assert float(accuracy) > 0.8
    (path,) = re.findall(r"the report: (\S+)", plain)
    summary = shown.outputs[0].data["text/html"]
    (url,) = re.findall(r"the run in Prefect: (\S+)", plain)
    assert f"<th>score</th><td>accuracy {accuracy}" in summary
    assert f"<th>report</th><td>{path}</td>" in summary
    assert f'<a href="{url}">' in summary
    assert Path(package.outputs[0].text).is_relative_to(python.parents[1])


def test_an_operator(tmp_path: Path) -> None:
    """`make nightly` says what to type next; typed, the run completes."""
    (tmp_path / "server").mkdir()
    with prefect_server_in(tmp_path / "server") as url:
        bin_folder = ROOT / ".venv" / "bin"
        environment = newcomers_environment(tmp_path, bin_folder, PREFECT_API_URL=url)
        log = tmp_path / "terminal.log"
        command = f"cd {ROOT} && deployments/nightly.sh"
        with timed("a night", tmp_path) as said, terminal(command, tmp_path, environment):
            wait_until(lambda: "--watch" in log.read_text(), 2 * HANG_S, "what to type next")
            said.append(log.read_text())
            (watch,) = re.findall(r"prefect deployment run .*", said[0])
            ends = typed(watch, tmp_path, bin_folder, PREFECT_API_URL=url)
    assert "Completed" in ends or "success" in ends, ends
