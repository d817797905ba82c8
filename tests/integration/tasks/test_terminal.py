"""The terminal of a flow shows a bar, plain lines in a pipe, and why a task has not begun."""

import logging
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import nbformat
import pytest
import torch
from distributed import Client, Event, LocalCluster
from nbclient import NotebookClient
from prefect import flow
from prefect_dask import DaskTaskRunner
from safetensors.torch import load_file

from prefect_torch_ddp.tasks.ddp_task import GangTask
from prefect_torch_ddp.tasks.watch.terminal import Display
from tests.integration.tasks.test_cancel import check_cancelled, wait_until_gone
from tests.support.gangs import pids_in
from tests.support.runs import newest_flow_run, report_of
from tests.support.terminals import environment_with, in_terminal, seen_in
from tests.support.waiting import HANG_S, wait_until

TRAIN = """
import sys
from prefect_torch_ddp import TrainParams, train_flow
from prefect_torch_ddp.tasks.watch import terminal

if __name__ == "__main__":
    (folder,) = sys.argv[1:]
    terminal.LINE_EVERY_S = 0.0
    params = TrainParams(
        workload="tests.workloads.tiny:Steered",
        storage=folder + "/store",
        options={"folder": folder},
    )
    print("begins")
    report = train_flow(params)
    print(type(report).__name__, report.evaluation.num_samples, report.model_uri)
"""
TASK = """
import sys
from pathlib import Path
from prefect import flow
from prefect_dask import DaskTaskRunner
from prefect_torch_ddp import ddp_task
from tests.workloads.flows import fit

@flow(task_runner=DaskTaskRunner(address=sys.argv[2]))
def nightly():
    task = ddp_task(world_size=2, storage=sys.argv[1] + "/store")(fit)
    print(task.submit(epochs=250).result()["attempt"], task(epochs=240)["attempt"])

if __name__ == "__main__":
    nightly()
"""
PREPARE = """
import sys
from prefect_torch_ddp import ClusterParams, TrainParams, train_flow

if __name__ == "__main__":
    folder, address = sys.argv[1:]
    params = TrainParams(
        workload="tests.workloads.dask_table",
        storage=folder + "/store",
        data_options={"hold": folder},
        cluster=ClusterParams(address=address),
    )
    train_flow(params)
"""
LINE = re.compile(r"\d\d:\d\d:\d\d\.\d{3} \| [A-Z]+ +\| .* - .*|")
"""As Prefect writes a record, or nothing."""
TRAINS = r"epoch [\d,]+/100,?000 · step [\d,]+/700,000 · loss \S+ · .*left"
LOUD = {"PREFECT_LOGGING_LEVEL": "INFO"}


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Write a script that runs train_flow until its folder has `enough`."""
    (tmp_path / "train.py").write_text(TRAIN, encoding="utf-8")
    return tmp_path / "train.py"


@pytest.mark.long
@pytest.mark.usefixtures("prefect_api")
def test_ctrl_c_under_a_bar_with_whole_log_lines_above_it(script: Path, tmp_path: Path) -> None:
    """Log lines stay whole above the bar, and Ctrl-C stops the run with a checkpoint."""
    # Wide enough for whatever time a loaded machine has left.
    with in_terminal(script, str(tmp_path), columns=140, **LOUD) as terminal:
        wait_until(lambda: re.search(TRAINS, terminal.text), what="a bar with its position")
        ranks = pids_in(tmp_path, 2)
        terminal.press_ctrl_c()
        wait_until_gone(ranks)
        assert terminal.wait() != 0
    assert "CancelledRun" in terminal.text
    check_cancelled(tmp_path)
    lines, erased = seen_in(terminal.text.replace("^C", ""))
    bars = [line for line in erased if "━" in line]
    assert {"cluster", "train"} <= {line.split()[0] for line in bars}
    assert any(re.match(rf"train ━\S+ +0 % {TRAINS}", line) for line in bars)
    assert max(map(len, bars)) <= 140
    assert not [line for line in lines if "━" in line]
    assert terminal.text.rfind("\x1b[?25h") > terminal.text.rfind("\x1b[?25l") > 0
    said = lines[lines.index("begins") + 1 :]
    traceback = next((i for i, line in enumerate(said) if line.startswith("Traceback")), None)
    torn = [line for line in said[:traceback] if not LINE.fullmatch(line)]
    assert not torn
    of_train = [line for line in said if "Task run 'train-" in line]
    assert any("attempt 1 trains" in line for line in of_train)
    assert any("stopped" in line for line in of_train), of_train


@pytest.mark.long
@pytest.mark.usefixtures("prefect_api")
def test_how_far_dask_is_with_a_dataset_is_in_the_bar_and_on_the_page(
    tmp_path: Path, dask_cluster: LocalCluster
) -> None:
    """With the time left; the training then takes over the page."""
    (tmp_path / "prepare.py").write_text(PREPARE, encoding="utf-8")
    for i in range(5):  # one is held, with its worker: the other worker writes what it computes
        (tmp_path / f"let-{i}").touch()
    far = r"prepared [1-5] of 6 partitions, [\d.]+ \w+, .*\d s left"
    arguments = str(tmp_path), dask_cluster.scheduler_address
    with in_terminal(tmp_path / "prepare.py", *arguments, **LOUD) as terminal:
        try:
            wait_until(lambda: re.search(rf" [1-9]\d % {far}", terminal.text), what="a bar")
            flow_run_id = newest_flow_run().id
            wait_until(lambda: re.search(far, report_of(flow_run_id)), what="a page")
        finally:
            (tmp_path / "release").touch()
        assert terminal.wait() == 0, terminal.text
    assert any(
        re.match(rf"prepare ━\S+ +[1-9]\d % {far}", line) for line in seen_in(terminal.text)[1]
    )
    page = report_of(flow_run_id)
    assert "of 6 partitions" not in page
    assert "## Ranks" in page


@pytest.mark.long
def test_nothing_configured(script: Path, tmp_path: Path) -> None:
    """Without configuration a run uses an embedded server, a local cluster and local storage."""
    said: list[str] = []
    with subprocess.Popen(
        [sys.executable, str(script), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment_with({"NO_COLOR": None, **LOUD}),
        text=True,
    ) as process:
        for line in process.stdout or ():
            said.append(line)
            if re.search(rf"Flow run '.*' - train: 0 % · {TRAINS}", line):
                (tmp_path / "enough").touch()
    assert process.returncode == 0, "".join(said)
    (ended,) = (line for line in said if line.startswith("TrainReport 21 "))
    torch.nn.Linear(2, 2).load_state_dict(load_file(ended.split()[2]))
    assert "\x1b" not in "".join(said)
    assert "━" not in "".join(said)


@pytest.mark.long
@pytest.mark.usefixtures("prefect_api")
def test_a_ddp_task_has_the_bar_submitted_or_called(
    tmp_path: Path, dask_cluster: LocalCluster
) -> None:
    """The user's flow shows the bar, on a shared cluster."""
    (tmp_path / "nightly.py").write_text(TASK, encoding="utf-8")
    arguments = str(tmp_path), dask_cluster.scheduler_address
    with in_terminal(tmp_path / "nightly.py", *arguments, **LOUD) as terminal:
        assert terminal.wait() == 0, terminal.text
    lines, erased = seen_in(terminal.text)
    bars = [line for line in erased if "━" in line]
    for epochs in (250, 240):  # submitted, and called
        assert any(re.match(rf"fit ━\S+ .*epoch \d+/{epochs}", line) for line in bars), bars
    assert "1 1" in lines
    assert not [line for line in lines if "━" in line]


def hold(name: str) -> None:
    """Keep the worker busy until the event is set."""
    Event(f"{name}-let-go").wait()


def begin() -> str:
    """Be a task that tells nothing, and ends when its event is set."""
    hold("begin")
    return "begun"


@contextmanager
def when_said(text: str, do: Callable[[], object]) -> Iterator[list[str]]:
    """Do it once a flow run logs the text; give everything that flow runs log."""
    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())
            if text in said[-1]:
                do()

    listener = Listener()
    logging.getLogger("prefect.flow_runs").addHandler(listener)
    try:
        yield said
    finally:
        logging.getLogger("prefect.flow_runs").removeHandler(listener)


@pytest.mark.extended
@pytest.mark.usefixtures("prefect_api")
def test_a_task_that_has_not_begun_says_what_it_waits_for() -> None:
    """The line names late workers, or the task that keeps a worker busy."""
    options = {"n_workers": 0, "threads_per_worker": 1, "dashboard_address": ":0"}
    with LocalCluster(**options) as cluster, Client(cluster) as client:
        begin_it = GangTask(begin)

        @flow(task_runner=DaskTaskRunner(address=cluster.scheduler_address))
        def waiting() -> object:
            return begin_it.submit().result()

        def line_of_a_task_that_runs() -> str:
            """Let it end once its display shows no wait any more; return what it shows."""
            try:
                wait_until(lambda: any(client.processing().values()), what="the task begins")
                wait_until(lambda: "waiting" not in Display.current._as_line(), what="another line")
                return Display.current._as_line()
            finally:
                Event("begin-let-go", client=client).set()

        with (
            ThreadPoolExecutor() as beside,
            when_said("the cluster has none yet after", lambda: cluster.scale(1)) as said,
        ):
            line = beside.submit(line_of_a_task_that_runs)
            assert waiting() == "begun"
            assert re.match(r"begin: (\d+ min )?\d+ s$", line.result())
        assert any(re.match(r"waiting for workers: the cluster has none", text) for text in said)
        client.wait_for_workers(1, timeout=HANG_S)
        held = client.submit(hold, "slot", pure=False, key="hold-the-night")
        let_go = Event("slot-let-go", client=client)
        wait_until(lambda: any(client.processing().values()))
        with when_said("has hold-the-night", let_go.set) as said:
            assert waiting() == "begun"
        assert any(re.match(r"waiting for a worker after \d+ s \(no limit\): ", s) for s in said)
        held.result(timeout=HANG_S)


NOTEBOOK = """
from prefect import flow
from prefect_dask import DaskTaskRunner
from prefect_torch_ddp import ddp_task
from tests.workloads.flows import fit

@flow(task_runner=DaskTaskRunner(address={address!r}))
def nightly():
    return ddp_task(world_size=2, storage={folder!r})(fit).submit(epochs=250).result()["attempt"]

nightly()
"""


@pytest.mark.long
@pytest.mark.usefixtures("prefect_api")
def test_a_notebook_shows_it_in_the_cell(tmp_path: Path, dask_cluster: LocalCluster) -> None:
    """One output changes, is empty at the end, and needs no ipywidgets."""
    cell = nbformat.v4.new_code_cell(
        NOTEBOOK.format(address=dask_cluster.scheduler_address, folder=str(tmp_path / "store"))
    )
    shown: list[str] = []

    class Watched(NotebookClient):
        def process_message(self, msg, *args):  # type: ignore[no-untyped-def]
            if msg["msg_type"] == "update_display_data":
                shown.append(msg["content"]["data"].get("text/plain", ""))
            return super().process_message(msg, *args)

    Watched(nbformat.v4.new_notebook(cells=[cell]), timeout=HANG_S, kernel_name="python3").execute()
    assert any(re.match(r"fit: \d+ % · epoch \d+/250", text) for text in shown), shown
    assert not shown[-1]
