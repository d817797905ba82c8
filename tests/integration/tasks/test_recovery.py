"""A training of train_flow that fails, hangs or is broken off continues in every possible way."""

import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from distributed import LocalCluster, get_worker, wait
from distributed.core import Status
from prefect import flow
from prefect_dask import DaskTaskRunner
from safetensors.torch import load

from prefect_torch_ddp import (
    CheckpointParams,
    ClusterParams,
    RankFailedError,
    TrainParams,
    TrainReport,
    ddp_task,
    read_goodput,
    train_flow,
)
from prefect_torch_ddp.checkpoint.attempts import newest_attempt
from prefect_torch_ddp.checkpoint.manifest import read_manifest
from prefect_torch_ddp.checkpoint.state.objects import read_states
from prefect_torch_ddp.gang.liveness import own_task_watch, own_worker_leaves
from prefect_torch_ddp.gang.worker import mailbox
from prefect_torch_ddp.records.run_record import list_run_records
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.tasks.cancel.states import or_cancelled
from tests.support.gangs import begun, extra_worker, own_cluster, workers_of
from tests.support.records import assert_adds_up, read_records
from tests.support.runs import (
    flow_run_id_of,
    logs_of,
    newest_flow_run,
    report_of,
    retry_train_flow,
    states_of,
    states_passed,
    task_runs_of,
    train_states,
    wait_until_said,
)
from tests.support.waiting import HANG_S, wait_until
from tests.workloads import hanging

pytestmark = [
    pytest.mark.extended,
    pytest.mark.timeout(400),
    pytest.mark.usefixtures("prefect_api"),
]

Params = Callable[..., TrainParams]
KILLED = {"how": "SIGKILL", "step": 12, "rank": 1, "attempts": [1]}


def params_of(store: Path, scheduler: str, **changes: Any) -> TrainParams:
    """Describe the tiny workload on the shared cluster: a checkpoint every five steps, one
    attempt."""
    given = {
        "workload": "tests.workloads.tiny",
        "storage": str(store),
        "seed": 3,
        "retries": 0,
        "retry_delay_s": 0.1,
        "max_restarts": 0,
        "cluster": ClusterParams(address=scheduler),
        "checkpoint": CheckpointParams(every_s=None, every_steps=5),
    }
    return TrainParams(**{**given, **changes})


@pytest.fixture
def params(dask_cluster: LocalCluster, tmp_path: Path) -> Params:
    """Return a maker of parameters."""
    return partial(params_of, tmp_path / "store", dask_cluster.scheduler_address)


@pytest.fixture(scope="module")
def undisturbed(
    prefect_server: str, dask_cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory
) -> TrainReport:
    """Train as the others do, and nothing happens."""
    from prefect.settings import PREFECT_API_URL, temporary_settings

    with temporary_settings({PREFECT_API_URL: prefect_server}):
        return train_flow(
            params_of(tmp_path_factory.mktemp("undisturbed"), dask_cluster.scheduler_address)
        )


def weights(report: TrainReport) -> bytes:
    """Return the exported model."""
    assert report.model_uri is not None
    return Path(report.model_uri).read_bytes()


def test_a_killed_rank_costs_no_retry(params: Params, undisturbed: TrainReport) -> None:
    """Attempt 2 resumes in the same task run to the same weights, and the report names both."""
    report = train_flow(params(options={"fault": KILLED}, max_restarts=2, ledger=True))
    training = report.training
    assert (training.attempt, training.world_size) == (2, 2)
    assert training.resumed_from_step in (5, 10)
    (failure,) = training.failures
    assert (failure.attempt, failure.world_size, failure.step) == (1, 2, 12)
    assert "rank 1 on 127.0.0.1 failed in attempt 1: was killed by SIGKILL (9)" in failure.summary
    flow_run_id = flow_run_id_of(report.flow_run_url)
    assert states_passed(flow_run_id) == ["Completed"]
    wait_until_said(flow_run_id, "was killed by SIGKILL (9)", "restart 1 of 2")
    for attempt in (1, 2):
        wait_until_said(flow_run_id, f"attempt {attempt} trains tests.workloads.tiny on 2 ranks")
    page = report_of(flow_run_id)
    assert "## Attempts" in page
    assert "failed in attempt 1: was killed by SIGKILL" in page
    assert report.ledger is not None
    assert report.ledger.is_clean
    assert len(report.ledger.epochs) == report.training.num_epochs
    assert "## Ledger" in page
    assert "samples, each once" in page
    assert "not clean" not in page
    wait_until_said(flow_run_id, "the ledger of", "is clean")
    assert weights(report) == weights(undisturbed)
    assert report.epochs == undisturbed.epochs
    assert undisturbed.training.failures == ()
    assert undisturbed.ledger is None


def test_prefects_retries_come_after_the_restarts(
    params: Params, undisturbed: TrainReport, tmp_path: Path
) -> None:
    """A second kill uses up the restart, and Prefect's retry resumes the training."""
    fault = {**KILLED, "attempts": [1, 2]}
    began_s = time.monotonic()
    report = train_flow(params(options={"fault": fault}, retries=1, max_restarts=1))
    assert report.training.attempt == 3
    assert report.training.resumed_from_step in (5, 10)
    assert [failure.attempt for failure in report.training.failures] == [1, 2]
    flow_run_id = flow_run_id_of(report.flow_run_url)
    assert states_passed(flow_run_id) == ["AwaitingRetry", "Retrying", "Completed"]
    cause = "rank 1 on 127.0.0.1 failed in attempt 2: was killed by SIGKILL (9)"
    wait_until_said(flow_run_id, cause, "Retry 1/1 will start")
    goodput = read_goodput(tmp_path / "store", report.run_id)
    assert_adds_up(goodput, num_attempts=3, at_most_s=time.monotonic() - began_s)
    assert goodput.redone_s > 0
    page = report_of(flow_run_id)
    assert "in 3 attempts, went into useful steps" in page
    assert "| lost: done again after a failure |" in page
    assert "## Ranks" in page
    assert weights(report) == weights(undisturbed)
    assert report.epochs == undisturbed.epochs


@pytest.mark.parametrize(("max_restarts", "between"), [(3, []), (0, ["AwaitingRetry", "Retrying"])])
def test_an_error_that_comes_back_is_not_tried_a_third_time(
    params: Params, max_restarts: int, between: list[str]
) -> None:
    """The same error at the same step ends the run after the second attempt."""
    fault = {"how": "raise", "step": 7, "rank": 0, "attempts": list(range(1, 9))}
    says = "rank 0 on 127.0.0.1 failed in attempt 2: ValueError: told to fail"
    with pytest.raises(RankFailedError, match=says) as caught:
        train_flow(params(options={"fault": fault}, retries=3, max_restarts=max_restarts))
    assert isinstance(caught.value.__cause__, ValueError)
    flow_run_id = newest_flow_run().id
    assert states_passed(flow_run_id) == [*between, "Failed"]
    _, message = states_of(task_runs_of(flow_run_id)["train"])[-1]
    for said in (says, "not tried again: the same ValueError at step 7 ended attempt 1 too"):
        assert said in str(caught.value)
        assert said in message


def test_a_hang_is_tried_again_and_resumed(params: Params) -> None:
    """The log has rank, step, line and all stacks, and a retry resumes from the checkpoint."""
    given = params(
        options={"fault": {"how": "hang", "rank": 1, "step": 6, "attempts": [1]}},
        checkpoint=CheckpointParams(every_steps=2, every_s=None),
        retries=1,
        progress_timeout_s=4.0,
    )
    report = train_flow(given)
    assert report.training.attempt == 2
    assert report.training.resumed_from_step in (2, 4)
    flow_run_id = flow_run_id_of(report.flow_run_url)
    assert "Retrying" in states_passed(flow_run_id)
    for rank in (0, 1):
        begin = f"[rank {rank}] is at, the innermost call first:"
        wait_until_said(flow_run_id, begin, "in train")
    hung = r"hung in attempt 1: rank 1 on 127\.0\.0\.1 did not arrive"
    where = rf"{hung}: for \d+ s it has been in step 6 at tiny\.py:\d+ in fail"
    wait_until(lambda: any(re.search(where, line.message) for line in logs_of(flow_run_id)))


def test_a_flow_retry_resumes_and_trains_no_more_than_needed(
    params: Params, undisturbed: TrainReport, tmp_path: Path
) -> None:
    """A flow retry resumes from the checkpoint, and a later one finds the training Cached."""
    options = {"fault": KILLED, "fail_evaluation_once": str(tmp_path / "failed")}
    report = train_flow.with_options(retries=2)(params(options=options))
    assert report.training.attempt == 2
    assert report.training.resumed_from_step in (5, 10)
    assert report.evaluation.num_samples == 21
    assert weights(report) == weights(undisturbed)
    flow_run_id = flow_run_id_of(report.flow_run_url)
    assert train_states(flow_run_id) == ["Cached", "Completed", "Failed"]


@pytest.mark.long
def test_a_failed_run_is_resumed(
    prefect_api: str, params: Params, undisturbed: TrainReport, tmp_path: Path
) -> None:
    """A new run with `resume_from` and `prefect flow-run retry` both resume a failed run."""
    store, retried = tmp_path / "store", str(tmp_path / "retried")
    options = {"fault": KILLED, "fail_evaluation_once": retried}
    with pytest.raises(RankFailedError, match="SIGKILL"):
        # The command line loads the flow from its file, which workers of others don't know.
        train_flow(params(options=options, cluster=ClusterParams()))
    (failed,) = (path.name for path in (store / "runs").iterdir())
    elsewhere = str(tmp_path / "elsewhere")
    for reference, where in ((failed, str(store)), (f"{store}/runs/{failed}", elsewhere)):
        report = train_flow(params(storage=where, resume_from=reference))
        assert report.training.resumed_from_step in (5, 10)
        assert (report.training.attempt, report.run_id != failed) == (1, True)
        assert weights(report) == weights(undisturbed)
    storage, homes = DirectoryStorage(store), (tmp_path / "home", tmp_path / "other-home")
    flow_run_id = retry_train_flow(prefect_api, failed, homes[0], ends="Failed")
    wait_until_said(flow_run_id, "resuming from the checkpoint of step", f"of run {failed}")
    wait_until_said(flow_run_id, "told to fail once")
    before = read_records(storage, failed)
    retry_train_flow(prefect_api, failed, homes[1])
    wait_until_said(flow_run_id, "the training has finished already, in attempt 2")
    assert newest_attempt(storage, failed) == 2
    assert read_records(storage, failed) == before
    exported = store / "runs" / failed / "models/000002/model.safetensors"
    assert exported.read_bytes() == weights(undisturbed)


@pytest.mark.long
def test_tonight_goes_on_with_yesterday(
    params: Params, undisturbed: TrainReport, tmp_path: Path
) -> None:
    """With "latest" a run resumes what didn't finish; with "best" it starts only from the
    best run's weights."""

    def tonight(reference: str, **options: Any) -> TrainReport:
        checkpoint = CheckpointParams(
            every_s=None, every_steps=5, best_metric="loss", best_mode="min"
        )
        given = {"resume_from": reference, "options": options, "checkpoint": checkpoint}
        return train_flow(params(**given))

    with pytest.raises(RankFailedError, match="SIGKILL"):  # there is none to continue
        tonight("latest", fault=KILLED)
    first = list_run_records(DirectoryStorage(tmp_path / "store"))[0]
    resumed = tonight("latest")
    second = list_run_records(DirectoryStorage(tmp_path / "store"))[0]
    assert (first.began_from, second.began_from) == (None, first.run_id)
    assert resumed.training.resumed_from_step in (5, 10)
    assert weights(resumed) == weights(undisturbed)
    assert tonight("latest", epochs=1).training.resumed_from_step is None
    wait_until_said(newest_flow_run().id, "has no such run in")
    tuned = tonight("best", epochs=0)
    best = resumed.training.best_checkpoint
    assert best is not None
    storage = DirectoryStorage(tmp_path / "store")
    manifest = read_manifest(storage, resumed.run_id, best.step, best.attempt)
    expected = read_states(storage, manifest, manifest.objects)["model"]
    found = load(weights(tuned))
    assert {name: value.tolist() for name, value in found.items()} == {
        name: value.tolist() for name, value in expected.items()
    }
    assert (tuned.training.resumed_from_step, tuned.training.num_steps) == (None, 0)
    page = report_of(newest_flow_run().id)  # the run in between is newer, and no better
    (row,) = [line for line in page.splitlines() if "its weights are from" in line]
    assert resumed.run_id in row


def _is_stopping() -> bool:
    """Tell whether a gang's caller has told the ranks of this worker to stop."""
    return any("stop" in box.orders for box in mailbox.MAILBOXES.values())


@pytest.mark.long
@pytest.mark.parametrize("when", ["while its ranks stop", "after its gang has ended"])
def test_a_task_continues_on_a_worker_that_was_to_leave_and_stays(
    tmp_path: Path, when: str
) -> None:
    """Dask doesn't retire a worker if nobody can take its values: its task resumes there.

    The task ended as Cancelled, or waited for ever, when Dask had looked for such a worker first.
    """
    train = ddp_task(world_size=1, storage=tmp_path / "store")(hanging.train_until_enough)
    marks = tmp_path / "marks"
    marks.mkdir()
    with ThreadPoolExecutor(2) as pool, own_cluster(1) as (cluster, client):

        @flow(task_runner=DaskTaskRunner(address=cluster.scheduler_address))
        def user_flow() -> int:
            return train.with_options(name="train").submit(str(marks)).result()

        (worker,) = workers_of(client)
        held = client.submit(bytes, 9, workers=[worker])
        wait(held)
        trained = pool.submit(copy_context().run, user_flow)
        pid, _ = begun(marks, 1, 0)
        rank = psutil.Process(pid)
        with extra_worker(cluster, 2) as other:
            other.suspend()  # Dask goes on trying to move the value there
            if when == "while its ranks stop":
                rank.suspend()
            retired = pool.submit(client.retire_workers, [worker])
            if when == "while its ranks stop":
                wait_until(lambda: client.run(_is_stopping, workers=[worker])[worker])
            else:
                wait_until_said(newest_flow_run().id, "by the closing of worker")
            other.kill()
        assert retired.result(HANG_S) == {}
        if rank.is_running():
            rank.resume()
        wait_until(lambda: len(list(marks.glob("*-0-from-*[0-9]"))) == 2)
        (marks / "enough").touch()
        trained.result(HANG_S)
    assert states_passed(newest_flow_run().id) == ["Completed"]


def _tried_again_after_its_worker_was_to_leave() -> tuple[bool, bool]:
    """Be a task that Prefect tries again in its thread; return what each try takes for true."""
    worker, watch = get_worker(), own_task_watch()
    worker.status = Status.closing_gracefully  # as the scheduler does when it retires one
    assert watch()
    worker.status = Status.running  # as it does when nobody can take its values
    return own_worker_leaves(), or_cancelled(own_worker_leaves)


def test_a_retry_begins_on_a_worker_that_was_to_leave_and_stays() -> None:
    """A user's cancel of the retry counted as the worker's leave: the task trained on."""
    with own_cluster(1) as (_, client):
        tried = client.submit(_tried_again_after_its_worker_was_to_leave)
        assert tried.result(HANG_S) == (True, False)
