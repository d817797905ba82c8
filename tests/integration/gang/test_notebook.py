"""Ranks run code that a notebook's cells define in `__main__`."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from distributed import LocalCluster
from nbclient import NotebookClient

from tests.support.gangs import by_rank

pytestmark = pytest.mark.extended


DEFINE = """
import torch
import torch.distributed as dist
from dataclasses import dataclass
from distributed import Client
from prefect_torch_ddp import run_gang

@dataclass(frozen=True)
class Score:
    rank: int
    total: float

OFFSET = 10.0

def score(weight: float, *, key: str) -> Score:
    # Uses a global, an import and a class of the notebook.
    total = torch.tensor([weight * (dist.get_rank() + 1) + OFFSET])
    dist.all_reduce(total)
    print("scored", key)
    return Score(dist.get_rank(), float(total))
"""
CONNECT = "client = Client({!r})"
RUN = """
values = run_gang(client, score, args=(2.0,), kwargs={"key": "mine"}, world_size=2)
print(values, all(type(value) is Score for value in values))
"""
CHANGE = """
OFFSET = 0.0
print(run_gang(client, score, args=(1.0,), kwargs={"key": "again"}, world_size=2)[1].total)
"""
FAIL = """
class MyError(Exception): pass

def fail():
    if dist.get_rank() == 1:
        raise MyError("of the notebook")
    dist.barrier()

try:
    run_gang(client, fail, world_size=2)
except Exception as error:
    print(type(error).__name__, error.rank, type(error.__cause__) is MyError, error.__cause__)
"""
WRONG = """
def wrong():
    return torch.nn.Linear(3, 1)(torch.zeros(2, 2))

run_gang(client, wrong, world_size=2)
"""
CLOSE = "client.close()"
PAGE = Path(__file__).parents[3] / "docs/notebooks.md"
REFUSED = """
try:
    train_flow(TrainParams(workload="__main__", storage="store"))
except Exception as error:
    print(type(error).__name__, "%%writefile my_workload.py" in str(error))
"""


def test_functions_and_classes_of_a_notebook_run_on_ranks(
    dask_cluster: LocalCluster, tmp_path: Any
) -> None:
    """Ranks run the current function of a cell, and return values and errors of its classes."""
    connect = CONNECT.format(dask_cluster.scheduler_address)
    sources = [DEFINE + connect, RUN, CHANGE, FAIL, CLOSE]
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    notebook = nbformat.v4.new_notebook(cells=cells)
    where = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=120, kernel_name="python3", resources=where).execute()
    _, ran, changed, failed, _ = [text_of(cell) for cell in notebook.cells]
    assert ran["stdout"] == "[Score(rank=0, total=26.0), Score(rank=1, total=26.0)] True\n"
    assert {f"[rank {rank}] scored mine" for rank in (0, 1)} <= set(
        by_rank(ran["stderr"].splitlines())
    )
    assert changed["stdout"] == "3.0\n"
    assert failed["stdout"] == "RankFailedError 1 True of the notebook\n"


def test_an_uncaught_error_shows_the_frames_of_the_cells_only(
    dask_cluster: LocalCluster, tmp_path: Path
) -> None:
    """IPython would show the source of each frame of Dask, torch and this package: 115 lines."""
    connect = CONNECT.format(dask_cluster.scheduler_address)
    cells = [nbformat.v4.new_code_cell(source) for source in (DEFINE + connect, WRONG, CLOSE)]
    cells[1].metadata["tags"] = ["raises-exception"]
    notebook = nbformat.v4.new_notebook(cells=cells)
    where = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=120, kernel_name="python3", resources=where).execute()
    (shown,) = [each for each in cells[1].outputs if each.output_type == "error"]
    assert shown.ename == "RankFailedError"
    text = "\n".join(shown.traceback)
    assert "    run_gang(client, wrong, world_size=2)\n" in text
    assert ", line 2, in wrong\n" in text  # a rank doesn't have the cell's text
    assert "site-packages" not in text
    assert text.count("\n") <= 15


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.usefixtures("prefect_api")
def test_the_cells_of_the_page_train(tmp_path: Path) -> None:
    """Run in order as the manual shows them, they train a workload and run a function of a cell.

    An edited workload is trained without a restart of the kernel.
    """
    sources = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    write, train, _ = sources
    edited = write.replace('"epochs", 5', '"epochs", 7')
    again = [edited, train, "print(report.training.num_steps)"]
    cells = [nbformat.v4.new_code_cell(source) for source in [*sources, *again, REFUSED]]
    notebook = nbformat.v4.new_notebook(cells=cells)
    where = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources=where).execute()
    printed = ["".join(stdout_of(cell)) for cell in notebook.cells]
    assert printed[0] == "Writing my_workload.py\n"
    assert float(printed[1]) > 0.8
    assert printed[2] == "[3.0, 3.0]\n"
    assert printed[3] == "Overwriting my_workload.py\n"
    assert printed[5:] == ["112\n", "InvalidParamsError True\n"]


def stdout_of(cell: Any) -> Iterator[str]:
    """Yield what a cell printed; Prefect's log may be shown in another way."""
    for output in cell.outputs:
        if output.output_type == "stream" and output.name == "stdout":
            yield output.text


def text_of(cell: Any) -> dict[str, str]:
    """Return what a cell wrote, by stream."""
    streams = {"stdout": "", "stderr": ""}
    for output in cell.outputs:
        assert output.output_type == "stream", output
        streams[output.name] += output.text
    return streams
