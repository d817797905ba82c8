"""Runs are cancelled by Ctrl-C, SIGTERM or Prefect, early, late or twice.

All ranks stop after one step with its checkpoint, the state is Cancelled, no retry follows, and
nothing remains.
"""

import logging
import os
import re
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast
from uuid import UUID

import psutil
import pytest
from distributed import Client, LocalCluster, Worker
from prefect import flow, task
from prefect.client.orchestration import get_client
from prefect.exceptions import CancelledRun, PrefectHTTPStatusError, TerminationSignal
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import AwaitingRetry, Cancelling, Running
from prefect_dask.task_runners import PrefectDaskFuture

from prefect_torch_ddp import CheckpointParams, ClusterParams, TrainParams, train_flow
from prefect_torch_ddp.checkpoint.manifest import list_manifests
from prefect_torch_ddp.errors import GangCancelledError
from prefect_torch_ddp.records.run_record import list_run_records
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.tasks.cancel.left_tasks import stop_task
from prefect_torch_ddp.tasks.cancel.states import or_cancelled
from prefect_torch_ddp.tasks.train_run import run_id_of
from tests.support.gangs import alive, pids_in
from tests.support.runs import (
    events_of,
    logs_of,
    newest_flow_run,
    report_of,
    states_of,
    states_passed,
    task_runs_of,
    train_states,
)
from tests.support.s3_server import Wire
from tests.support.waiting import HANG_S, wait_until

pytestmark = pytest.mark.usefixtures("prefect_api")

MAX_LINES = 10
"""Of the traceback of a cancelled script, and Prefect's word that its server stops."""
RESTS_PERCENT = 10.0
"""Of a core: what a flow uses at most that only waits for its task."""

FLOW = """
import sys
from prefect_torch_ddp import TrainParams, train_flow
if __name__ == "__main__":
    training = train_flow(TrainParams.model_validate_json(sys.argv[1])).training
    print("attempt", training.attempt, training.resumed_from_step)
"""
EVALUATION = """
import sys
from prefect_torch_ddp import evaluate_flow
if __name__ == "__main__":
    evaluate_flow(sys.argv[1])
"""
USER_FLOW = """
import sys
from pathlib import Path
from prefect import flow
from prefect.context import FlowRunContext
from prefect.states import Suspended
from prefect_dask import DaskTaskRunner
from prefect_torch_ddp import CheckpointParams, ddp_task
from tests.support.waiting import wait_until
from tests.workloads import hanging

train = ddp_task(
    world_size=2,
    storage=sys.argv[2],
    checkpoint=CheckpointParams(every_steps=50, every_s=None),
    retries=3,
)(hanging.train_until_enough).with_options(name="train")

CLUSTER = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": ":0"}

@flow(name="of-a-user", task_runner=DaskTaskRunner(cluster_kwargs=CLUSTER))
def of_a_user(folder: str) -> None:
    future = train.submit(folder)
    if sys.argv[3] == "suspended":  # what Prefect does where the run is a deployment's
        wait_until(lambda: any(Path(sys.argv[2]).rglob("manifest.json")))
        FlowRunContext.get().flow_run_suspension_request.mark_requested(Suspended())
    future.result()

if __name__ == "__main__":
    of_a_user(sys.argv[1])
"""

MAPPED = """
import sys
from pathlib import Path
from prefect import flow
from prefect.futures import wait
from prefect_dask import DaskTaskRunner
from prefect_torch_ddp import CheckpointParams, ddp_task
from tests.workloads import hanging

train = ddp_task(
    world_size=1,
    storage=sys.argv[2],
    checkpoint=CheckpointParams(every_steps=50, every_s=None),
    stop_grace_s=250.0,
    progress_timeout_s=None,
)(hanging.train_or_hang).with_options(name="train")

CLUSTER = {"n_workers": 3, "threads_per_worker": 1, "dashboard_address": ":0"}

@flow(name="mapped", task_runner=DaskTaskRunner(cluster_kwargs=CLUSTER))
def mapped(folders: list[str]) -> None:
    wait(train.map(folders))

if __name__ == "__main__":
    mapped(sorted(map(str, Path(sys.argv[1]).iterdir())))
"""

SLOW_CLUSTER = """
import threading
from pathlib import Path
from dask_jobqueue import SLURMCluster

class Slow(SLURMCluster):
    def __init__(self, starts: str) -> None:
        Path(starts).touch()
        threading.Event().wait()
"""
OF_A_SLOW_CLUSTER = """
import sys
from prefect import flow
from prefect_dask import DaskTaskRunner
from prefect_torch_ddp import ddp_task

@ddp_task(world_size=1, storage=sys.argv[1])
def train(ctx) -> None: ...

RUNNER = DaskTaskRunner(cluster_class="slow.Slow", cluster_kwargs={"starts": sys.argv[2]})

@flow(name="of-a-slow-cluster", task_runner=RUNNER)
def of_a_slow_cluster() -> None:
    train() if sys.argv[3] == "called" else train.submit()

if __name__ == "__main__":
    of_a_slow_cluster()
"""

WITHIN_A_TASK = """
import sys
from prefect import flow, task
from prefect_dask import DaskTaskRunner
from prefect_torch_ddp import CheckpointParams, ddp_task
from tests.workloads import hanging

train = ddp_task(
    world_size=1,
    storage=sys.argv[2],
    checkpoint=CheckpointParams(every_steps=50, every_s=None),
)(hanging.train_until_enough).with_options(name="train")

@task
def outer(folder: str) -> None:
    train.submit(folder).result()

@flow(name="within-a-task", task_runner=DaskTaskRunner(address=sys.argv[3]))
def within_a_task(folder: str) -> None:
    outer.submit(folder).result()

if __name__ == "__main__":
    within_a_task(sys.argv[1])
"""


def params_of(folder: Path, **more: object) -> TrainParams:
    """Train for ever, with a checkpoint every 50 steps."""
    (folder / "pids").mkdir()
    return TrainParams(
        workload="tests.workloads.tiny",
        storage=str(folder / "store"),
        options={"pid_folder": str(folder / "pids"), "epochs": 1_000_000},
        checkpoint=CheckpointParams(every_steps=50, every_s=None),
        **more,
    )


@contextmanager
def flow_process(
    folder: Path, *arguments: str, text: str = FLOW
) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a flow's script in a separate process group; its output is in the file `said`."""
    (folder / "flow.py").write_text(text, encoding="utf-8")
    command = [sys.executable, str(folder / "flow.py"), *arguments]
    with (folder / "said").open("wb") as said:
        process = subprocess.Popen(
            command, start_new_session=True, stdout=said, stderr=subprocess.STDOUT
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            sys.stderr.write((folder / "said").read_text(errors="replace"))  # if the test fails


def ranks_of(folder: Path, num_ranks: int = 2) -> list[int]:
    """Wait until the ranks have begun."""
    return pids_in(folder / "pids", num_ranks, timeout_s=HANG_S)


def newest_run() -> tuple[UUID, str]:
    """Return the flow run that began last, and its id in the storage."""
    run = newest_flow_run()
    return run.id, run_id_of(run.name, run.id)


def steps_saved(folder: Path, run_id: str) -> list[int]:
    """Return the steps of the run's checkpoints."""
    storage = DirectoryStorage(folder / "store")
    return [manifest.step for manifest in list_manifests(storage, run_id)]


def wait_for_checkpoint(folder: Path) -> None:
    """Wait until the newest run has a checkpoint."""
    wait_until(lambda: bool(steps_saved(folder, newest_run()[1])))


def wait_until_gone(pids: list[int]) -> None:
    """Wait until no such process is there."""
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids))


def check_flow_cancelled(message: str = "") -> UUID:
    """Expect the newest flow run in state Cancelled with these words; return its id."""
    flow_run_id, _ = newest_run()
    with get_client(sync_client=True) as client:
        wait_until(lambda: client.read_flow_run(flow_run_id).state_name == "Cancelled")
        state = client.read_flow_run(flow_run_id).state
    assert state is not None
    assert message in (state.message or "")
    return flow_run_id


def check_task_cancelled(flow_run_id: UUID, stage: str = "train") -> str:
    """Expect its task run Cancelled, and no retry; return the message.

    Prefect's server records states of task runs some time after they were sent.
    """
    wait_until(lambda: states_of(task_runs_of(flow_run_id)[stage])[-1][0] == "Cancelled")
    _, message = states_of(task_runs_of(flow_run_id)[stage])[-1]
    assert not {"AwaitingRetry", "Retrying"} & set(states_passed(flow_run_id, stage))
    return message


def check_cancelled(folder: Path) -> None:
    """Expect both Cancelled, with the step that all ranks agreed on, and that step's checkpoint."""
    flow_run_id = check_flow_cancelled()
    message = check_task_cancelled(flow_run_id)
    words = r"all ranks stopped after step (\d+); the newest checkpoint is of step (\d+)"
    found = re.search(words, message)
    assert found is not None, (message, [line.message for line in logs_of(flow_run_id)][-40:])
    assert found[1] == found[2]
    assert int(found[1]) in steps_saved(folder, newest_run()[1])


@pytest.mark.long
def test_sigterm_of_a_flow_on_the_cluster_of_others(tmp_path: Path, shared: ClusterParams) -> None:
    """The shared cluster survives, and the next run on it works."""
    with flow_process(tmp_path, params_of(tmp_path, cluster=shared).model_dump_json()) as process:
        ranks = ranks_of(tmp_path)
        wait_for_checkpoint(tmp_path)
        process.terminate()
        wait_until_gone(ranks)
        process.wait(HANG_S)
    check_cancelled(tmp_path)
    check_flow_cancelled("cancelled by SIGTERM: all ranks stopped after step")
    given = {"workload": "tests.workloads.tiny", "storage": str(tmp_path / "store")}
    assert train_flow(TrainParams(**given, cluster=shared)).training.num_steps == 21


@pytest.mark.extended
@pytest.mark.parametrize("whose", ["train_flow", "a user"])
def test_ctrl_c_of_a_flow_that_imports_dask_jobqueue(
    tmp_path: Path, shared: ClusterParams, whose: str
) -> None:
    """It has Ctrl-C raise SystemExit: the flow crashed, and its ranks were killed unsaved."""
    if whose == "train_flow":
        given, text = [params_of(tmp_path, cluster=shared).model_dump_json()], FLOW
    else:
        given, text = [str(tmp_path / "pids"), str(tmp_path / "store"), "ctrl-c"], USER_FLOW
        (tmp_path / "pids").mkdir()
    with flow_process(tmp_path, *given, text=f"import dask_jobqueue{text}") as process:
        ranks = ranks_of(tmp_path)
        wait_until(lambda: list((tmp_path / "store").rglob("manifest.json")))
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(HANG_S) != 0
    wait_until_gone(ranks)
    assert "all ranks stopped after step" in check_task_cancelled(newest_run()[0])


@pytest.mark.extended
@pytest.mark.parametrize("whose", ["train_flow", "called", "submitted"])
def test_ctrl_c_while_a_cluster_of_dask_jobqueue_starts(tmp_path: Path, whose: str) -> None:
    """A script that it ended said 0, success, and the run of `train_flow` had crashed."""
    (tmp_path / "slow.py").write_text(SLOW_CLUSTER, encoding="utf-8")
    starts = tmp_path / "starts"
    given, text = [str(tmp_path), str(starts), whose], OF_A_SLOW_CLUSTER
    if whose == "train_flow":
        slow = ClusterParams(cluster_class="slow.Slow", cluster_kwargs={"starts": str(starts)})
        given, text = [params_of(tmp_path, cluster=slow).model_dump_json()], FLOW
    with flow_process(tmp_path, *given, text=text) as process:
        wait_until(starts.exists)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(HANG_S) != 0
    if whose == "train_flow":
        check_flow_cancelled("cancelled by Ctrl-C (SIGINT)")
    else:
        assert "\nKeyboardInterrupt" in (tmp_path / "said").read_text()


@pytest.mark.extended
@pytest.mark.parametrize("whose", ["train_flow", "a user"])
def test_a_cancel_in_prefect_of_a_run_without_a_deployment(
    tmp_path: Path, shared: ClusterParams, whose: str
) -> None:
    """It has no runner that would stop it: the flow itself sees the cancel, and ends Cancelled."""
    given, text = [params_of(tmp_path, cluster=shared).model_dump_json()], FLOW
    if whose == "a user":
        given, text = [str(tmp_path / "pids"), str(tmp_path / "store"), "waits"], USER_FLOW
    with flow_process(tmp_path, *given, text=text) as process:
        ranks = ranks_of(tmp_path)
        wait_until(lambda: list((tmp_path / "store").rglob("manifest.json")))
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(newest_run()[0], Cancelling())
        wait_until_gone(ranks)
        assert process.wait(HANG_S) != 0
    check_flow_cancelled()
    message = check_task_cancelled(newest_run()[0])
    assert "all ranks stopped after step" in message
    assert "CancelledRun" in (tmp_path / "said").read_text()


@pytest.mark.extended
@pytest.mark.parametrize(
    ("stage", "num_ranks", "how"),
    [("prepare", 1, "sigterm"), ("evaluate", 2, "sigterm"), ("evaluate", 2, "prefect")],
)
def test_cancel_of_a_run_that_does_not_train(
    tmp_path: Path, shared: ClusterParams, stage: str, num_ranks: int, how: str
) -> None:
    """Ranks that prepare or evaluate end at once, and the states are Cancelled.

    So are the page and the record of the run.
    """
    (tmp_path / "pids").mkdir()
    params = TrainParams(
        workload="tests.workloads.tiny",
        storage=str(tmp_path / "store"),
        data_options={"linger": {"stage": stage, "pids": str(tmp_path / "pids")}},
        cluster=shared,
    )
    with flow_process(tmp_path, params.model_dump_json()) as process:
        ranks = ranks_of(tmp_path, num_ranks)
        if how == "sigterm":
            process.terminate()
        else:
            with get_client(sync_client=True) as client:
                client.set_flow_run_state(newest_run()[0], Cancelling())
        wait_until_gone(ranks)
        process.wait(HANG_S)
    said = (tmp_path / "said").read_text()
    assert "CancelledRun" in said
    flow_run_id, run_id = newest_run()
    check_task_cancelled(check_flow_cancelled(), stage)
    (record,) = list_run_records(DirectoryStorage(tmp_path / "store"))
    num_steps = 21 if stage == "evaluate" else None
    assert (record.state, record.num_steps, record.is_tried_again) == (
        "cancelled",
        num_steps,
        False,
    )
    assert record.cause.startswith("TaskCancelled: ")
    top = report_of(flow_run_id).partition("\n## ")[0]
    if stage == "prepare":
        assert top.startswith("# tiny: cancelled before the training\n")
        assert "run it again. It begins from the start" in top
        return
    assert top.startswith("# tiny: cancelled after the training\n")
    assert f'resume_from="{run_id}"' in top
    assert f'to continue: resume_from="{run_id}"' in said
    *_, last = (
        each["payload"]
        for each in events_of(flow_run_id, num_last=2)
        if each["event"].endswith("training.finished")
    )
    assert (last["state"], last["resume_from"]) == ("cancelled", run_id)


@pytest.mark.long
def test_cancel_of_an_evaluation(tmp_path: Path, shared: ClusterParams) -> None:
    """An evaluate_flow that is cancelled is Cancelled, as a train_flow is. It was Crashed."""
    (tmp_path / "pids").mkdir()
    linger = {"stage": "evaluate", "pids": str(tmp_path / "pids"), "while": str(tmp_path / "now")}
    given = {"workload": "tests.workloads.tiny", "storage": str(tmp_path / "store")}
    trained = train_flow(TrainParams(**given, data_options={"linger": linger}, cluster=shared))
    (tmp_path / "now").touch()
    with flow_process(tmp_path, trained.checkpoint.uri, text=EVALUATION) as process:
        ranks = ranks_of(tmp_path)
        process.terminate()
        wait_until_gone(ranks)
        assert process.wait(HANG_S) != 0
    check_task_cancelled(check_flow_cancelled("cancelled by SIGTERM"), "evaluate")
    assert "CancelledRun" in (tmp_path / "said").read_text()


@pytest.mark.extended
def test_cancel_while_dask_computes_what_prepare_returned(
    tmp_path: Path, shared: ClusterParams, dask_client: Client
) -> None:
    """No further partition begins, the workers are idle, and there is no dataset."""
    params = TrainParams(
        workload="tests.workloads.dask_table",
        storage=str(tmp_path / "store"),
        data_options={"hold": str(tmp_path)},
        cluster=shared,
    )
    try:
        with flow_process(tmp_path, params.model_dump_json()) as process:
            wait_until(
                lambda: len(list(tmp_path.glob("begun-*[0-9]"))) == len(dask_client.nthreads())
            )
            begun = set(tmp_path.glob("begun-*[0-9]"))
            process.terminate()
            process.wait(HANG_S)
        message = check_task_cancelled(check_flow_cancelled(), "prepare")
    finally:
        (tmp_path / "release").touch()
    assert message.startswith("the preparation of the dataset was stopped by the cancellation")
    wait_until(lambda: not any(dask_client.run(_executing).values()))
    assert not dask_client.run_on_scheduler(_unready)
    assert set(tmp_path.glob("begun-*[0-9]")) == begun
    assert not list((tmp_path / "store" / "datasets").rglob("manifest.json"))


def _executing(dask_worker: Worker) -> int:
    return len(dask_worker.state.executing) + len(dask_worker.state.ready)


def slow_cluster(mark: str) -> None:
    """Stand for a cluster class that takes its time to start: a batch system's queue, say."""
    Path(mark).touch()
    while True:
        signal.pause()


def test_while_the_cluster_starts(tmp_path: Path) -> None:
    """The flow is Cancelled at once, since nothing has begun.

    Its script prints one traceback, without Prefect's frames.
    """
    mark = tmp_path / "mark"
    cluster = ClusterParams(
        cluster_class=f"{__name__}.slow_cluster", cluster_kwargs={"mark": str(mark)}
    )
    params = params_of(tmp_path, cluster=cluster)
    with flow_process(tmp_path, params.model_dump_json()) as process:
        wait_until(mark.exists)
        process.send_signal(signal.SIGINT)
        assert process.wait(HANG_S) != 0
    assert not task_runs_of(check_flow_cancelled("cancelled"))
    _, *traceback = (tmp_path / "said").read_text().split("Traceback (most recent call last):")
    (shown,) = traceback
    assert "prefect.exceptions.CancelledRun: cancelled" in shown
    assert "site-packages" not in shown
    assert shown.count("\n") <= MAX_LINES, shown


@pytest.mark.extended
def test_before_the_task_has_begun(
    tmp_path: Path, shared: ClusterParams, dask_client: Client
) -> None:
    """A task that still waits for busy workers is withdrawn and never runs."""
    release = str(tmp_path / "release")
    busy = [
        dask_client.submit(_until_there, release, i, workers=[address], pure=False)
        for i, address in enumerate(dask_client.nthreads())
    ]
    try:
        params = params_of(tmp_path, cluster=shared)
        with flow_process(tmp_path, params.model_dump_json()) as process:
            wait_until(lambda: len(dask_client.run_on_scheduler(_unready)) > len(busy))
            # The scheduler hears of a task before the flow's `submit` returns and it waits.
            flow = psutil.Process(process.pid)
            wait_until(lambda: flow.cpu_percent(interval=1.0) < RESTS_PERCENT)
            process.terminate()
            assert process.wait(HANG_S) != 0
        flow_run_id = check_flow_cancelled("its task had not begun")
    finally:
        Path(release).touch()
    dask_client.gather(busy)
    wait_until(lambda: not dask_client.run_on_scheduler(_unready))
    assert not task_runs_of(flow_run_id)


def _until_there(path: str, _number: int) -> None:
    wait_until(Path(path).exists, 2 * HANG_S)


def _unready(dask_scheduler: object) -> list[str]:
    over = ("memory", "forgotten", "erred", "released")
    tasks = dask_scheduler.tasks  # type: ignore[attr-defined]
    return [str(key) for key, task in tasks.items() if task.state not in over]


@pytest.mark.extended
def test_while_a_retry_waits(tmp_path: Path, shared: ClusterParams) -> None:
    """A cancel between two attempts waits for nothing, and the retry doesn't come."""
    params = params_of(tmp_path, cluster=shared, retries=2, retry_delay_s=200.0, max_restarts=0)
    params.options["fault"] = {"how": "raise", "step": 60, "rank": 1, "attempts": [1]}
    with flow_process(tmp_path, params.model_dump_json()) as process:
        ranks_of(tmp_path)
        flow_run_id, _ = newest_run()
        wait_until(lambda: states_passed(flow_run_id)[-1:] == ["AwaitingRetry"])
        process.terminate()
        assert process.wait(HANG_S) != 0
    assert check_flow_cancelled("its task waited for a retry") == flow_run_id
    assert states_passed(flow_run_id) == ["AwaitingRetry", "Cancelled"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "again"),
    [
        (signal.SIGINT, "Ctrl-C again"),
        pytest.param(signal.SIGTERM, "a second SIGTERM", marks=pytest.mark.more),
    ],
)
def test_ctrl_c_twice(tmp_path: Path, number: signal.Signals, again: str) -> None:
    """A second Ctrl-C, or SIGTERM, doesn't wait for a rank that uses up its grace."""
    params = params_of(tmp_path, stop_grace_s=250.0, progress_timeout_s=None)
    (tmp_path / "marks").mkdir()
    fault = {"how": "hang", "step": 60, "rank": 1, "attempts": [1], "mark": str(tmp_path / "marks")}
    params.options["fault"] = fault
    with flow_process(tmp_path, params.model_dump_json()) as process:
        ranks = ranks_of(tmp_path)
        wait_until((tmp_path / "marks" / "1").exists)
        send = os.killpg if number == signal.SIGINT else os.kill  # a terminal's is for all
        send(process.pid, number)
        wait_until(lambda: f"{again} ends it at once" in (tmp_path / "said").read_text())
        assert all(psutil.pid_exists(pid) for pid in ranks)
        send(process.pid, number)
        process.wait(HANG_S)
    wait_until_gone(ranks)
    by = "Ctrl-C (SIGINT)" if number == signal.SIGINT else "SIGTERM"
    check_task_cancelled(check_flow_cancelled(f"cancelled by {by}"))


@pytest.mark.long
@pytest.mark.parametrize("how", [pytest.param("ctrl-c", marks=pytest.mark.more), "suspended"])
def test_a_users_flow_with_a_ddp_task_is_stopped(tmp_path: Path, how: str) -> None:
    """Ctrl-C or a suspension stops the ranks with a checkpoint before the flow's cluster closes."""
    (tmp_path / "pids").mkdir()
    given = (str(tmp_path / "pids"), str(tmp_path / "store"), how)
    with flow_process(tmp_path, *given, text=USER_FLOW) as process:
        ranks = ranks_of(tmp_path)
        wait_until(lambda: list((tmp_path / "store").rglob("manifest.json")))
        if how == "ctrl-c":
            os.killpg(process.pid, signal.SIGINT)
        assert process.wait(HANG_S) != 0
    wait_until_gone(ranks)
    message = check_task_cancelled(newest_run()[0])
    assert "all ranks stopped after step" in message
    assert "the newest checkpoint is of step" in message
    why = "suspended" if how == "suspended" else "cancelled"
    assert f"{why}: the task gets" in (tmp_path / "said").read_text()


@pytest.mark.long
def test_all_tasks_that_a_flow_leaves_are_stopped_at_the_same_time(tmp_path: Path) -> None:
    """One that trains saves, though two others use up their grace; a second Ctrl-C ends those."""
    folders = [tmp_path / "each" / name for name in ("0-trains", "1-hangs", "2-hangs")]
    for folder in folders:
        folder.mkdir(parents=True)
    given = str(tmp_path / "each"), str(tmp_path / "store")
    with flow_process(tmp_path, *given, text=MAPPED) as process:
        trains, *hang = [pids_in(folder, 1) for folder in folders]
        wait_until(lambda: list((tmp_path / "store").rglob("manifest.json")))
        os.killpg(process.pid, signal.SIGINT)
        wait_until_gone(trains)
        for pids in hang:
            assert alive(pids) == pids
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(HANG_S) != 0
        wait_until_gone([*hang[0], *hang[1]])
    said = (tmp_path / "said").read_text()
    assert "cancelled: 3 tasks get up to 250 s to end" in said
    assert said.count("Ctrl-C again ends them at once") == 1
    flow_run_id, _ = newest_run()
    wait_until(lambda: train_states(flow_run_id) == ["Cancelled"] * 3)
    (run,) = {each.parents[3].name for each in (tmp_path / "store").rglob("manifest.json")}
    # Where it stopped, not at the last of each fifty: the two are the same step at times.
    step = steps_saved(tmp_path, run)[-1]
    assert f"all ranks stopped after step {step}; the newest checkpoint is of step {step}" in said


@pytest.mark.long
def test_a_training_that_another_task_submitted_is_stopped_with_it(
    tmp_path: Path, shared: ClusterParams
) -> None:
    """Ctrl-C of the flow reaches it through that task, though the cluster is that of others."""
    (tmp_path / "pids").mkdir()
    given = (str(tmp_path / "pids"), str(tmp_path / "store"), str(shared.address))
    with flow_process(tmp_path, *given, text=WITHIN_A_TASK) as process:
        ranks = ranks_of(tmp_path, 1)
        wait_until(lambda: list((tmp_path / "store").rglob("manifest.json")))
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(HANG_S) != 0
        wait_until_gone(ranks)
    message = check_task_cancelled(newest_run()[0])
    assert "all ranks stopped after step" in message


@task
def stopped() -> None:
    """Be a task whose gang was cancelled."""
    return or_cancelled(_raise, GangCancelledError("gang 'fit' was stopped by Ctrl-C", 7, 7))


def _raise(error: Exception) -> None:
    raise error


def test_a_cancelled_task_says_once_what_was_saved() -> None:
    """Its log had that twice: in a line of the gang's, and in Prefect's of the task's state."""

    @flow
    def user_flow() -> str | None:
        return stopped(return_state=True).message

    said = "all ranks stopped after step 7; the newest checkpoint is of step 7"
    assert user_flow() == said
    flow_run_id = newest_run()[0]
    wait_until(lambda: any(said in line.message for line in logs_of(flow_run_id)))
    (line,) = [each for each in logs_of(flow_run_id) if "after step 7" in each.message]
    assert line.message == f"Finished in state Cancelled({said!r})"


@task
def lost() -> None:
    """Be a task."""


@pytest.mark.parametrize(
    ("why", "cause", "again"),
    [
        ("cancelled", KeyboardInterrupt(), "Ctrl-C again"),
        ("cancelled", TerminationSignal(signal.SIGTERM), "a second SIGTERM"),
        ("cancelled", CancelledRun("in Prefect"), "Ctrl-C"),
        ("suspended", None, "Ctrl-C"),
    ],
)
def test_a_task_that_cannot_say_how_it_ended_has_the_reason(
    dask_cluster: LocalCluster,
    caplog: pytest.LogCaptureFixture,
    why: str,
    cause: BaseException | None,
    again: str,
) -> None:
    """The flow closes a task that waits for its retry, and gives the reason.

    The log named Ctrl-C also if the flow got SIGTERM.
    """
    with get_client(sync_client=True) as api, Client(dask_cluster) as client:
        flow_run = api.create_flow_run(flow(lost.fn, name="left"))
        task_run = api.create_task_run(lost, flow_run.id, dynamic_key="0", state=AwaitingRetry())
        future = PrefectDaskFuture[None](task_run.id, client.submit(lost.fn))
        assert stop_task(future, 0.0, why, cause) == "its task waited for a retry"
        state = api.read_task_run(task_run.id).state
    assert state is not None
    assert (state.name, state.message) == ("Cancelled", f"its flow was {why}")
    assert f"; {again} ends it at once" in caplog.text


def _press() -> None:
    signal.raise_signal(signal.SIGINT)


def _press_in_a_callback() -> None:
    """Send it where what its handler raises is lost: Python prints it, and goes on."""
    thing = type("Thing", (), {})()
    kept = weakref.ref(thing, lambda _: _press())
    del thing
    assert kept() is None


@pytest.mark.parametrize("press", [_press, _press_in_a_callback])
def test_ctrl_c_again_at_any_point_closes_the_task_run(
    dask_cluster: LocalCluster, caplog: pytest.LogCaptureFixture, press: Callable[[], None]
) -> None:
    """Right after the line that names it, the task run stayed open, or the signal was lost."""

    class Impatient(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "Ctrl-C again" in record.getMessage():
                press()

    caplog.set_level(logging.WARNING)
    impatient, log = Impatient(), logging.getLogger("prefect_torch_ddp")
    # Another test of this process may have imported dask_jobqueue, which has one of its own.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with get_client(sync_client=True) as api, Client(dask_cluster) as client:
        flow_run = api.create_flow_run(flow(lost.fn, name="left"))
        task_run = api.create_task_run(lost, flow_run.id, dynamic_key="0", state=Running())
        future = PrefectDaskFuture[None](task_run.id, client.submit(lost.fn))
        log.addHandler(impatient)
        try:
            with pytest.raises(KeyboardInterrupt):
                stop_task(future, 20.0, "cancelled", KeyboardInterrupt())
        finally:
            log.removeHandler(impatient)
            was = signal.signal(signal.SIGINT, before)
        state = api.read_task_run(task_run.id).state
    assert state is not None
    assert (state.name, state.message) == ("Cancelled", "its flow was cancelled")
    assert was is signal.default_int_handler


class BusyApi(Wire):
    """Prefect's API, but for the first requests to set a state, which it answers by a status."""

    statuses: list[int]

    def _handler(self) -> Any:
        class Handler(super()._handler()):  # type: ignore[misc]  # mypy knows no such base
            def do_POST(self) -> None:  # noqa: N802 - http.server's name
                statuses = cast("BusyApi", self.wire).statuses
                if not self.path.endswith("/set_state") or not statuses:
                    self.do_request()
                    return
                self.rfile.read(int(self.headers["Content-Length"]))
                self.send_response(statuses.pop(0))
                self.send_header("Content-Length", "0")
                self.end_headers()

        return Handler


@pytest.mark.parametrize(
    ("statuses", "state", "is_warned"),
    [
        pytest.param([503, 500], "Cancelled", False, id="busy"),
        pytest.param([429], "Cancelled", False, id="limited"),
        pytest.param([503] * 999, "AwaitingRetry", True, id="away"),
        pytest.param([403], "AwaitingRetry", False, id="refuses"),
    ],
)
def test_a_task_run_is_closed_though_prefect_is_busy(
    dask_cluster: LocalCluster,
    caplog: pytest.LogCaptureFixture,
    statuses: list[int],
    state: str,
    *,
    is_warned: bool,
) -> None:
    """It was asked once, and the task run stayed open for ever; and a refusal counted as away."""
    url = str(PREFECT_API_URL.value())
    with (
        get_client(sync_client=True) as api,
        Client(dask_cluster) as client,
        BusyApi(url.removesuffix("/api")) as wire,
        temporary_settings({PREFECT_API_URL: f"{wire.endpoint_url}/api"}),
    ):
        wire.statuses = list(statuses)
        flow_run = api.create_flow_run(flow(lost.fn, name="left"))
        task_run = api.create_task_run(lost, flow_run.id, dynamic_key="0", state=AwaitingRetry())
        future = PrefectDaskFuture[None](task_run.id, client.submit(lost.fn))
        refuses = pytest.raises(PrefectHTTPStatusError) if 403 in statuses else nullcontext()
        with refuses:
            assert stop_task(future, 0.0) == "its task waited for a retry"
        found = api.read_task_run(task_run.id).state
    assert found is not None
    assert found.name == state
    assert ("Prefect could not be told" in caplog.text) == is_warned
