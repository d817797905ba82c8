"""A run leaves its record in the storage and its events on Prefect's bus."""

import os
import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import yaml
from distributed import Client, LocalCluster, Status, get_worker
from prefect import flow
from prefect.events.schemas.events import ResourceSpecification
from prefect.runtime import flow_run
from prefect_dask import DaskTaskRunner

from prefect_torch_ddp import (
    GangCancelledError,
    NotEnoughWorkersError,
    RankContext,
    RankFailedError,
    TrainParams,
    ddp_task,
    gang_report,
    list_runs,
    read_metrics,
    run_gang,
    train_flow,
)
from prefect_torch_ddp.cli.runs import facts
from prefect_torch_ddp.errors import SupervisorLostError, TaskCancelled
from prefect_torch_ddp.protocol.metric_names import is_validation
from prefect_torch_ddp.records.run_record import RunRecord, list_run_records
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.tasks.publish import failure_published
from prefect_torch_ddp.tasks.report import markdown
from prefect_torch_ddp.tasks.report.artifacts import key
from prefect_torch_ddp.tasks.train import draft_of
from prefect_torch_ddp.tasks.train_run import Run
from prefect_torch_ddp.tracking.digest import value_digest
from prefect_torch_ddp.tracking.recorder import RunRecorder
from tests.integration.tasks.test_recovery import params_of
from tests.support.runs import artifacts_of, events_of, flow_run_id_of, logs_of, report_of
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.timeout(400), pytest.mark.usefixtures("prefect_api")]

ROOT = Path(__file__).parents[3]
KILLED = {"how": "SIGKILL", "step": 12, "rank": 1, "attempts": [1]}
LOST = "Dask worker a died"


def names_of(events: list[dict[str, Any]]) -> list[str]:
    """Return what happened, without the beginning that all events share."""
    return [event["event"].removeprefix("prefect-torch-ddp.") for event in events]


def last_values(store: Path, run_id: str) -> dict[str, float]:
    """Work out each metric's last value by hand: the mean over the ranks at its last step."""
    frame, found = read_metrics(store, run_id), {}
    for name in frame.columns[frame.columns.get_loc("num_samples") + 1 :]:
        rows = frame[frame[name].notna()]
        rows = rows[rows["step"] == rows["step"].max()]
        weights = rows["num_samples"] * (0 if is_validation(name) else 1)
        weights = weights if weights.sum() else weights + 1
        found[name] = (rows[name] * weights).sum() / weights.sum()
    return found


def check_metrics(store: Path, record: RunRecord, page: str) -> None:
    """Compare the record's metrics with the ranks' records, `list_runs` and the page.

    There with its table, and with its headline, which has scores instead once there are some.
    """
    assert record.metrics == pytest.approx(last_values(store, record.run_id))
    row = list_runs(store).iloc[0]
    assert {name: row[f"train.{name}"] for name in record.metrics} == record.metrics
    for name, value in record.metrics.items():
        assert f"| {name} | {markdown.number(value)} |" in page
    headline, evaluated = page.splitlines()[2].split(" · "), record.evaluation
    shown = record.metrics if evaluated is None else {}
    assert shown or evaluated
    for name, value in shown.items():
        assert f"{name} {markdown.number(value)}" in headline
    if evaluated is not None and evaluated.accuracy is not None:
        assert headline[0].startswith(f"accuracy {markdown.percent(evaluated.accuracy)}")


def only_record(store: Path) -> RunRecord:
    """Return the only record of a storage."""
    (record,) = list_run_records(DirectoryStorage(store))
    return record


def test_a_run_that_lost_a_rank_is_on_record_and_on_the_bus(
    dask_cluster: LocalCluster, tmp_path: Path
) -> None:
    """Record and events have code, data, ranks, each attempt with its end, and the results."""
    store = tmp_path / "store"
    options = {"fault": KILLED, "api_key": "s3cr3t"}
    address = dask_cluster.scheduler_address
    report = train_flow(params_of(store, address, max_restarts=1, options=options))
    record = only_record(store)
    assert (record.run_id, record.state, record.cause) == (report.run_id, "completed", "")
    assert record.experiment == "train-ddp/tests.workloads.tiny"
    assert (record.seed, record.storage) == (3, str(store))
    assert record.options == {"fault": KILLED, "api_key": "(hidden)"}
    assert record.parameters["checkpoint"]["every_steps"] == 5
    git = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    commit = subprocess.run(git, check=True, capture_output=True, text=True).stdout.strip()
    assert record.commit == commit
    assert {"python", "torch", "prefect", "prefect-torch-ddp"} <= set(record.versions)
    assert record.dataset == report.dataset
    first, second = record.attempts
    assert (first.attempt, first.world_size, len(first.hosts)) == (1, 2, 2)
    assert first.step == 12
    assert "SIGKILL" in first.cause
    assert (second.attempt, second.cause, second.step) == (2, "", report.training.num_steps)
    ends = [each.ended for each in record.attempts]
    assert None not in ends
    assert first.began < first.ended <= second.began < second.ended  # type: ignore[operator]
    assert second.devices == ("cpu", "cpu")
    assert record.num_steps == report.training.num_steps
    assert record.checkpoint == report.checkpoint
    assert record.evaluation is not None
    assert record.evaluation.accuracy == report.evaluation.accuracy
    page = report_of(flow_run_id_of(report.flow_run_url))
    check_hours(record, page)
    check_metrics(store, record, page)

    events = events_of(flow_run_id_of(report.flow_run_url))
    names = names_of(events)
    assert names[0] == "training.started"
    assert names[-1] == "training.finished"
    assert names.count("rank.failed") == names.count("training.resumed") == 1
    assert names.index("rank.failed") < names.index("training.resumed")
    assert {"epoch.completed", "checkpoint.committed"} <= set(names)
    for event in events:
        payload = event["payload"]
        assert (payload["run_id"], payload["world_size"]) == (report.run_id, 2)
        assert {"step", "attempt"} <= payload.keys()
        roles = {each["prefect.resource.role"] for each in event["related"]}
        assert {"flow-run", "task-run"} <= roles
        assert "s3cr3t" not in str(event)
    last = events[len(names) - 1 - names[::-1].index("checkpoint.committed")]["payload"]
    assert last["checkpoint"] == report.training.last_checkpoint.uri  # type: ignore[union-attr]
    assert last["step"] == report.training.num_steps
    assert events[-1]["resource"]["prefect-torch-ddp.state"] == "completed"
    assert all(evaluates(event["resource"]) for event in events)


def evaluates(resource: dict[str, str]) -> bool:
    """Whether the automation that evaluates checkpoints matches events of a resource."""
    text = (ROOT / "deployments" / "on_checkpoint.yaml").read_text("utf-8")
    (trigger,) = yaml.safe_load(text)["deployments"][0]["triggers"]
    return bool(ResourceSpecification.model_validate(trigger["match"]).matches(resource))


def check_hours(record: RunRecord, page: str) -> None:
    """Check that the record and the page have the core hours of a training on this machine."""
    assert record.goodput is not None
    # Both ranks may use the same processors, which count once.
    cores_s = 3600 * record.goodput.core_hours / len(os.sched_getaffinity(0))
    assert 0 < record.goodput.steps_s < cores_s < record.goodput.wall_s
    assert re.search(r"The ranks had [\d.e-]+ core hours\.", page)


def fail_in_step_three(ctx: RankContext, rate: float, data: object) -> None:
    """Raise in the third step."""
    import torch
    from torch.utils.data import TensorDataset

    loader = ctx.loader(TensorDataset(torch.arange(8.0)), global_batch_size=2)
    for number, _ in enumerate(ctx.steps(loader, epochs=1), 1):
        ctx.report(loss=rate / number)
        if number == 3:
            msg = "out of luck"
            raise ValueError(msg)


@pytest.mark.extended
def test_a_ddp_task_that_fails_is_on_record_and_told_of_once_it_is_final(
    dask_cluster: LocalCluster, tmp_path: Path
) -> None:
    """Prefect's retry is an attempt of the same record, and the last event follows it."""
    runner: Any = DaskTaskRunner(address=dask_cluster.scheduler_address)
    ids: list[str] = []

    @flow(task_runner=runner)
    def trains() -> None:
        ids.append(str(flow_run.id))
        task = ddp_task(world_size=2, storage=str(tmp_path), retries=1)(fail_in_step_three)
        task.submit(0.5, data=object()).result()

    with pytest.raises(RankFailedError, match="out of luck"):
        trains()
    record = only_record(tmp_path)
    assert (record.state, record.experiment) == (
        "failed",
        f"trains/{__name__}/fail_in_step_three",
    )
    assert record.workload.endswith("test_run_record:fail_in_step_three")
    check_metrics(tmp_path, record, report_of(UUID(ids[0])))
    digest = value_digest(object())[:8]
    assert record.arguments == {"rate": 0.5, "data": f"(not on record: object, {digest})"}
    assert "out of luck" in record.cause
    assert [each.attempt for each in record.attempts] == [1, 2]
    assert all("out of luck" in each.cause and each.ended for each in record.attempts)
    assert record.commit is not None
    events = events_of(UUID(ids[0]))
    names = names_of(events)
    assert names.count("rank.failed") == 2
    assert names.count("training.finished") == 1
    assert events[-1]["resource"]["prefect-torch-ddp.state"] == "failed"
    assert "out of luck" in events[-1]["payload"]["cause"]
    assert not any(evaluates(event["resource"]) for event in events), "it isn't one of train_flow"


def fail_once(folder: str) -> int:
    """Raise on rank 1 at the first attempt."""
    import os

    print("said by a rank")
    if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        msg = f"out of luck in {folder}"
        raise OSError(msg)
    return int(os.environ["RANK"])


@pytest.mark.long
def test_a_gang_in_a_flow_of_ones_own_is_shown_if_asked(
    dask_cluster: LocalCluster, tmp_path: Path
) -> None:
    """`gang_report` gives a gang the page, progress, record and events of a ddp_task."""

    @flow
    def sweeps() -> tuple[str, list[int]]:
        with (
            Client(dask_cluster.scheduler_address) as client,
            gang_report("sweep", str(tmp_path)) as shown,
        ):
            values = run_gang(client, fail_once, ("<b>",), None, 2, max_restarts=1, **shown)
        return str(flow_run.id), values

    flow_run_id, values = sweeps()
    assert values == [0, 1]
    record = only_record(tmp_path)
    known = (record.experiment, record.state, record.flow_run_id)
    assert known == ("sweeps/sweep", "completed", flow_run_id)
    assert [(each.attempt, each.world_size) for each in record.attempts] == [(1, 2), (2, 2)]
    assert "out of luck" in record.attempts[0].cause
    shown = artifacts_of(UUID(flow_run_id))
    page = str(shown[key("report", record.experiment)].data)
    assert page.startswith("# sweep: finished")
    assert re.search(r"\| 1 \| 2 \| 127\.0\.0\.1 \| [^|]+ \|  \| rank 1", page)
    assert "out of luck in &lt;b&gt;" in page
    assert shown[key("progress", record.experiment)].data == 100.0
    told = ["training.started", "rank.failed", "training.resumed", "training.finished"]
    assert names_of(events_of(UUID(flow_run_id))) == told
    lines = DirectoryStorage(tmp_path).list(f"runs/{record.run_id}/logs/")
    assert len([each.key for each in lines]) == 4
    wait_until(lambda: any("said by a rank" in log.message for log in logs_of(UUID(flow_run_id))))


def _ends_cancelled(record: RunRecord, storage: DirectoryStorage, *, leaves: bool) -> bool:
    """End a training's record as a task does that isn't wanted; tell whether that was the last."""
    worker = get_worker()
    if leaves:
        worker.status = Status.closing_gracefully  # as the scheduler does when it retires one
    try:
        recorder = RunRecorder(storage, record)
        recorder.end(GangCancelledError("Dask has taken this task"))
        return recorder.is_last
    finally:
        worker.status = Status.running


@pytest.mark.parametrize("leaves", [False, True], ids=["stays", "leaves"])
def test_what_a_leaving_worker_ends_isnt_over(tmp_path: Path, leaves: bool) -> None:
    """Its task is run again elsewhere: it told of a cancelled training, which went on."""
    began = datetime.now(UTC)
    record = RunRecord(run_id="r", experiment="e", workload="w", began=began, storage="s")
    storage = DirectoryStorage(tmp_path)
    with (
        LocalCluster(n_workers=1, processes=False, dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster) as client,
    ):
        ended = client.submit(_ends_cancelled, record, storage, leaves=leaves)
        assert ended.result(60) is not leaves


@pytest.mark.extended
def test_a_run_whose_evaluation_fails_has_failed(
    dask_cluster: LocalCluster, tmp_path: Path
) -> None:
    """Page, report, record, event and error say so, and how to evaluate it without training."""
    store = tmp_path / "store"
    options = {"fail_evaluation_once": str(tmp_path / "failed"), "epochs": 2}
    params = params_of(store, dask_cluster.scheduler_address, options=options)
    with pytest.raises(RankFailedError, match="told to fail once") as raised:
        train_flow(params)
    record = only_record(store)
    assert (record.state, record.num_steps, record.is_tried_again) == ("failed", 14, False)
    assert record.cause.startswith("RankFailedError: rank ")
    line = f'resume_from="{record.run_id}"'
    report = store / "runs" / record.run_id / "report.html"
    assert raised.value.__notes__[-1] == f"the report: {report}"
    assert f"to continue: {line}" in raised.value.__notes__
    assert record.flow_run_id is not None
    flow_run_id = UUID(record.flow_run_id)
    top = report_of(flow_run_id).partition("\n## ")[0]
    title = "# tiny: failed after the training\n\n"
    assert top.startswith(f"{title}epoch 2/2 · 14 of 14 steps done · loss ")
    assert "ValueError: told to fail once" in top
    assert "with this parameter, to evaluate the model without training it again:" in top
    assert line in top
    assert "tiny: failed after the training</h1>" in report.read_text()
    trained, failed = (
        event["payload"]
        for event in events_of(flow_run_id, num_last=2)
        if event["event"].endswith("training.finished")
    )
    assert (trained["state"], failed["state"]) == ("completed", "failed")
    assert (failed["resume_from"], failed["report"]) == (record.run_id, str(report))

    again = train_flow(params.model_copy(update={"resume_from": "latest"}))
    assert (again.training.resumed_from_step, again.training.num_steps) == (14, 14)
    assert list_runs(store).state.tolist() == ["completed", "failed"]


@pytest.mark.extended
def test_a_run_whose_preparation_fails_has_failed(
    dask_cluster: LocalCluster, tmp_path: Path
) -> None:
    """Page, report, record, list, event and error say so; there is nothing to continue."""
    store = tmp_path / "store"
    params = params_of(store, dask_cluster.scheduler_address)
    params = params.model_copy(update={"data_options": {"num_samples": "many"}})
    with pytest.raises(RankFailedError, match="TypeError") as raised:
        train_flow(params)
    record = only_record(store)
    assert (record.state, record.dataset, record.attempts) == ("failed", None, ())
    assert record.cause.startswith("RankFailedError: rank ")
    assert record.data_options == {"num_samples": "many"}
    assert record.ended is not None
    assert record.duration_s > 0.01  # of the preparation
    assert ("trained", "") in facts(record, "", str(store))
    report = store / "runs" / record.run_id / "report.html"
    assert raised.value.__notes__[-1] == f"the report: {report}"
    assert record.flow_run_id is not None
    flow_run_id = UUID(record.flow_run_id)
    top = report_of(flow_run_id).partition("\n## ")[0]
    assert top.startswith("# tiny: failed before the training\n")
    assert "TypeError" in top
    assert "remove the cause and run it again. It begins from the start" in top
    assert "tiny: failed before the training</h1>" in report.read_text()
    (ended,) = (event["payload"] for event in events_of(flow_run_id))
    assert (ended["state"], ended["report"]) == ("failed", str(report))
    assert "resume_from" not in ended

    repaired = {"data_options": {}, "resume_from": "latest"}
    again = train_flow(params.model_copy(update=repaired))
    assert (again.training.resumed_from_step, again.training.num_steps) == (None, 21)
    assert list_runs(store).state.tolist() == ["completed", "failed"]


@pytest.mark.parametrize("then", ["no worker", "cancelled"])
def test_a_flow_retry_whose_training_never_begins_has_ended(tmp_path: Path, then: str) -> None:
    """The record of the attempt before isn't taken for one that the retry's task has left."""
    ends: dict[str, tuple[BaseException, str]] = {
        "no worker": (NotEnoughWorkersError("the cluster has had no worker"), "failed"),
        "cancelled": (TaskCancelled("the flow run was cancelled"), "cancelled"),
    }
    error, state = ends[then]
    params = TrainParams(workload="tests.workloads.tiny", storage=str(tmp_path))

    @flow(task_runner=DaskTaskRunner(), retries=1)  # type: ignore[arg-type]
    def trains() -> None:
        run = Run.from_params(params)
        with failure_published(run, by_task=True):
            if flow_run.run_count == 1:
                raise SupervisorLostError(LOST)
            first = only_record(tmp_path)
            assert (first.state, first.is_tried_again) == ("failed", True)
            raise error

    with pytest.raises(type(error), match=str(error)):
        trains()
    record = only_record(tmp_path)
    assert (record.state, record.is_tried_again) == (state, False)
    assert record.cause == f"{type(error).__name__}: {error}"
    assert record.flow_run_id is not None
    (ended,) = (event["payload"] for event in events_of(UUID(record.flow_run_id)))
    assert (ended["state"], ended["cause"]) == (state, record.cause)


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (ValueError("out of luck"), "ValueError: out of luck"),
        (None, f"SupervisorLostError: {LOST}"),
    ],
    ids=["failed", "completed"],
)
def test_only_a_failure_that_the_task_has_left_stays(
    tmp_path: Path, error: Exception | None, cause: str
) -> None:
    """The flow's own error replaces no failure, but says why a finished training has no score."""
    params = TrainParams(workload="tests.workloads.tiny", storage=str(tmp_path))

    @flow(task_runner=DaskTaskRunner(), retries=1)  # type: ignore[arg-type]
    def trains() -> None:
        run = Run.from_params(params)
        with failure_published(run, by_task=True):
            if flow_run.run_count == 2:
                recorder = RunRecorder(run.storage, draft_of(run, None))
                recorder.end(error)
                recorder.write()
            raise SupervisorLostError(LOST)

    with pytest.raises(SupervisorLostError):
        trains()
    record = only_record(tmp_path)
    assert (record.state, record.cause) == ("failed", cause)
