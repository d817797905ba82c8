"""Artifacts on a real Prefect server are updated in place, published whole, and hold up no
training."""

import json
import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import pytest
from prefect import flow, task
from prefect.client.orchestration import get_client
from prefect.client.schemas.sorting import ArtifactSort
from prefect.context import TaskRunContext
from prefect.settings import PREFECT_API_URL, temporary_settings

from prefect_torch_ddp.errors import StorageError
from prefect_torch_ddp.params import TrainParams
from prefect_torch_ddp.protocol.events import (
    AttemptBegan,
    CheckpointCommitted,
    FailureRecord,
    Progress,
)
from prefect_torch_ddp.records import run_record
from prefect_torch_ddp.records.run_record import RunRecord, list_run_records
from prefect_torch_ddp.results import TrainReport
from prefect_torch_ddp.storage.formats import LEDGER, METRICS
from prefect_torch_ddp.tasks.publish import publish
from prefect_torch_ddp.tasks.report import live, report_file
from prefect_torch_ddp.tasks.report.artifacts import key
from prefect_torch_ddp.tasks.report.live import LiveReport
from prefect_torch_ddp.tasks.report.page.links import runs_key
from prefect_torch_ddp.tasks.report.progress import TrainingProgress
from prefect_torch_ddp.tasks.train_run import Run
from prefect_torch_ddp.tracking.description import draft_record
from prefect_torch_ddp.tracking.recorder import RunRecorder
from tests.support.formats import head
from tests.support.pages import RUN, evaluation, report
from tests.support.records import Shelf, record
from tests.support.runs import artifacts_of, logs_of, report_of
from tests.support.s3_server import Fault, Wire, lose_the_answer
from tests.support.waiting import HANG_S, wait_until

DIGITS = "prefect_torch_ddp.examples.digits"
EXPERIMENT = f"train-ddp/{DIGITS}"
PROGRESS, PAGE = key("progress", EXPERIMENT), key("report", EXPERIMENT)


def records() -> dict[str, bytes]:
    """Write what two ranks would have written in four epochs."""
    held_out = {"validation_accuracy": 0.9, "a": 1, "b": 2, "c": 3}
    parts = {}
    for rank in range(2):
        lines = []
        for number in range(1, 41):
            metrics = {"loss": {25: "nan", 35: "inf"}.get(number, 1 / number + rank)}
            metrics |= held_out if number % 10 == 0 else {}
            epoch = (number - 1) // 10 + 1
            lines.append(vars(record(number, rank, epoch=epoch, num_samples=8, **metrics)))
        content = head(METRICS) + "\n".join(map(json.dumps, lines)).encode()
        parts[f"runs/{RUN}/metrics/rank-{rank:05d}/000001-000001.jsonl"] = content
    return parts


def live_report(
    run_id: str = RUN, attempt: int = 1, interval_s: float = 0.3, storage: Any = None
) -> LiveReport:
    """Make a live report with a short interval, of a run whose ranks wrote records."""
    storage = storage or Shelf(records())
    draft = draft_record(None, run_id, EXPERIMENT, storage, workload=DIGITS)
    shown, recorder = TrainingProgress(2, attempt), RunRecorder(storage, draft)
    return LiveReport(storage, shown, recorder, is_published=True, interval_s=interval_s)


def step(number: int) -> Progress:
    """Make the progress of one step."""
    return Progress(number, (number - 1) // 10 + 1, 40)


def run_in_a_task(do: Callable[[Any], object], **options: Any) -> tuple[Any, Any]:
    """Run it in a task of a flow, with the task run; return the flow run's id and its value."""

    @task(**options)
    def act() -> Any:
        run = TaskRunContext.get().task_run
        return run.flow_run_id, do(run)

    @flow
    def run() -> Any:
        return act()

    return run()


@pytest.mark.long
def test_the_live_report_is_two_artifacts_updated_in_place(prefect_api):
    """Progress bar and page show all attempts over a retry and a restart, and many updates
    are one write."""
    seen: list[dict[str, Any]] = []

    def train(run: Any) -> str:
        def shows(words: str) -> bool:
            return words in report_of(run.flow_run_id).partition("\n## ")[0].partition("![")[0]

        if run.run_count == 1:
            with live_report() as live:
                for last in (10, 20):
                    for number in range(last - 9, last + 1):
                        live.receive(step(number))
                    wait_until(lambda last=last: shows(f"step {last}/40"))
                    seen.append(artifacts_of(run.flow_run_id))
                msg = "boom"
                raise ValueError(msg)
        seen.append(artifacts_of(run.flow_run_id))
        with live_report(attempt=2, interval_s=600.0) as live:
            wait_until(lambda: shows("no step yet"))
            for number in range(1, 5001):
                live.receive(step(number % 40 + 1))
            assert shows("no step yet")
            live.receive(AttemptBegan(3, 1))
            live.receive(CheckpointCommitted(20, 2, 10, every_s=12.0))
            live.receive(step(20))
        return str(run.id)

    flow_run_id, task_run_id = run_in_a_task(train, retries=1)
    seen.append(artifacts_of(flow_run_id))
    first, _, failed, last = seen
    assert set(last) == {PROGRESS, PAGE}
    for name in last:
        (only,) = {(found[name].id, str(found[name].task_run_id)) for found in seen}
        assert only[1] == task_run_id
    assert len({found[PAGE].data for found in seen}) == 4
    assert [found[PROGRESS].data for found in seen] == [25.0, 50.0, 50.0, 100.0]
    assert first[PROGRESS].description.startswith("epoch 1 · step 10/40 · loss 0.525")
    shown = "loss 0.525 · validation_accuracy 0.9"
    assert failed[PROGRESS].description == f"epoch 2 · 20 of 40 steps done · {shown} · failed"
    assert last[PROGRESS].description == f"epoch 2 · step 20/40 · {shown} · trained"
    assert "](data:image/svg+xml;base64," in last[PAGE].data
    assert RUN in last[PAGE].data
    assert "| Attempt | 3 |" in last[PAGE].data
    assert "| World size | 1 ranks |" in last[PAGE].data
    assert "| Checkpoints | by time, every 12 s |" in last[PAGE].data


def test_an_api_that_is_down_costs_one_warning_and_gets_the_report_when_it_is_back(
    prefect_server, caplog
):
    """There is one warning, however often the report is tried again."""
    run_id = f"comes-back-{time.time_ns()}"
    tries: list[None] = []
    is_down = True

    def outage() -> Fault | None:
        tries.append(None)
        return lose_the_answer if is_down else None

    def warnings() -> list[str]:
        said = [record.getMessage() for record in caplog.records]
        return [message for message in said if "live report" in message]

    with (
        Wire(prefect_server.removesuffix("/api"), outage=outage) as wire,
        temporary_settings({PREFECT_API_URL: f"{wire.endpoint_url}/api"}),
        caplog.at_level(logging.WARNING),
        live_report(run_id=run_id, interval_s=0.05) as live,
    ):
        wait_until(warnings)
        for number in range(1, 8):
            live.receive(step(number))
        num_tries = len(tries)
        wait_until(lambda: len(tries) > num_tries + 2)
        is_down = False
        with (
            temporary_settings({PREFECT_API_URL: prefect_server}),
            get_client(sync_client=True) as client,
        ):

            def pages() -> list[str]:
                # The newest: the server has more, of other tests, than it shows on a page.
                found = client.read_artifacts(sort=ArtifactSort.UPDATED_DESC)
                return [str(one.data) for one in found if run_id in str(one.data)]

            wait_until(lambda: any("step 7/40" in page for page in pages()))
    assert len(warnings()) == 1


@pytest.mark.parametrize("num_lost", [3, None])
def test_the_end_is_tried_again_if_the_server_does_not_take_it(
    prefect_server, caplog, num_lost, monkeypatch
):
    """Until the server answers, or for as long as an end may take, and then the log says so."""
    monkeypatch.setattr(live, "FINISH_TIMEOUT_S", HANG_S if num_lost else 2.0)
    run_id = f"ends-badly-{time.time_ns()}"
    tries: list[None] = []
    is_over = False

    def outage() -> Fault | None:
        if not is_over or len(tries) == num_lost:
            return None
        tries.append(None)
        return lose_the_answer

    def pages() -> list[str]:
        with get_client(sync_client=True) as client:
            found = client.read_artifacts(sort=ArtifactSort.UPDATED_DESC)
        return [str(one.data) for one in found if run_id in str(one.data)]

    with (
        Wire(prefect_server.removesuffix("/api"), outage=outage) as wire,
        temporary_settings({PREFECT_API_URL: f"{wire.endpoint_url}/api"}),
        caplog.at_level(logging.WARNING),
        live_report(run_id=run_id, interval_s=600.0),
    ):
        wait_until(pages)
        is_over = True
    with temporary_settings({PREFECT_API_URL: prefect_server}):
        is_shown = any(page.startswith("# digits: trained") for page in pages())
    said = [each.getMessage() for each in caplog.records]
    assert len([each for each in said if "can't be written now" in each]) == 1
    assert not any("training continues" in each for each in said)
    assert any("may lack the end" in each for each in said) is (num_lost is None)
    assert is_shown is (num_lost is not None)


@dataclass(frozen=True)
class NoReports(Shelf):
    """A storage that doesn't take reports: it refuses them, or never answers."""

    hangs_until: threading.Event | None = None

    def write(self, key: str, data: bytes | memoryview) -> None:
        if key.endswith(".html") and self.hangs_until is not None:
            self.hangs_until.wait()
        if key.endswith(".html"):
            msg = "no HTML here"
            raise StorageError(msg)
        super().write(key, data)


@pytest.mark.parametrize("hangs", [False, True])
def test_a_report_that_cannot_be_written_costs_one_warning(prefect_api, caplog, hangs, monkeypatch):
    """The value and the error of the training stay, and a storage that hangs is given up."""
    monkeypatch.setattr(report_file, "TIMEOUT_S", 0.2)
    released = threading.Event()
    shelf: Any = NoReports(records(), hangs_until=released if hangs else None)

    def train(_run: Any) -> None:
        with live_report(storage=shelf):
            pass
        with live_report(storage=shelf):
            msg = "boom"
            raise ValueError(msg)

    with caplog.at_level(logging.WARNING), pytest.raises(ValueError, match="boom") as caught:
        run_in_a_task(train)
    released.set()
    said = [each.getMessage() for each in caplog.records if "report" in each.getMessage()]
    why = "the storage hasn't taken it" if hangs else "StorageError: no HTML here"
    assert len(said) == 2
    assert all(f"report.html: {why}" in message for message in said), said
    assert str(caught.value) == "boom"
    assert not any("report:" in note for note in getattr(caught.value, "__notes__", ()))


@dataclass(frozen=True)
class SlowRecords(Shelf):
    """A storage that doesn't take run records until it is told to."""

    takes: threading.Event = field(default_factory=threading.Event)

    def write(self, key: str, data: bytes | memoryview) -> None:
        if key.startswith(run_record.PREFIX):
            self.takes.wait(HANG_S)
        super().write(key, data)


def test_an_end_that_is_not_recorded_in_time_is_said(prefect_api, caplog, monkeypatch):
    """A training doesn't wait for a storage that hangs, and its log names what may lack the end."""
    monkeypatch.setattr(live, "FINISH_TIMEOUT_S", 0.5)
    shelf = SlowRecords(records())

    def train(_run: Any) -> str:
        with live_report(storage=shelf):
            return "trained"

    with caplog.at_level(logging.WARNING):
        _, value = run_in_a_task(train)
    shelf.takes.set()
    wait_until(lambda: not any(each.name == "live-report" for each in threading.enumerate()))
    assert value == "trained"
    said = [each.getMessage() for each in caplog.records if "lack the end" in each.getMessage()]
    assert len(said) == 1


@dataclass(frozen=True)
class FailingReads(Shelf):
    """A storage that doesn't give the ranks' records for as many tries as it is told."""

    failures: list[None] = field(default_factory=list)

    def read(self, key: str) -> bytes:
        if "/metrics/" in key and self.failures:
            self.failures.pop()
            msg = "the network is down"
            raise StorageError(msg)
        return super().read(key)


@pytest.mark.parametrize("num_failures", [3, 1_000_000])
def test_metrics_that_cannot_be_read_at_the_end_are_read_again(
    prefect_api, caplog, monkeypatch, num_failures
):
    """Record, page and file get the last values; if they can't be read in time, the log says so."""
    is_lost = num_failures > 3
    monkeypatch.setattr(live, "FINISH_TIMEOUT_S", 2.0 if is_lost else HANG_S)
    shelf = FailingReads(records())
    last = vars(record(41, 0, epoch=5, num_samples=8, final_loss=0.0625))
    part = head(METRICS) + json.dumps(last).encode()

    def train(run: Any) -> None:
        with live_report(storage=shelf, interval_s=600.0):
            wait_until(lambda: PAGE in artifacts_of(run.flow_run_id))
            shelf.failures.extend([None] * num_failures)
            shelf.write(f"runs/{RUN}/metrics/rank-00000/000002-000002.jsonl", part)

    with caplog.at_level(logging.WARNING):
        flow_run_id, _ = run_in_a_task(train)
    found = newest_record(shelf)
    assert found.state == "completed"
    assert found.metrics["loss"] == pytest.approx(0.525)
    assert ("final_loss" in found.metrics) is not is_lost
    assert ("final_loss" in report_of(flow_run_id)) is not is_lost
    assert ("final_loss" in shelf.read(f"runs/{RUN}/report.html").decode()) is not is_lost
    said = [each.getMessage() for each in caplog.records if "lack the end" in each.getMessage()]
    assert len(said) == is_lost
    assert all("its metrics couldn't be read" in each for each in said)


def test_a_failed_run_is_shown_by_its_records(prefect_api):
    """Title, line, record and file show the step of the records, not the rank's last message."""
    shelf: Any = Shelf(records())
    ref = report().checkpoint.model_copy(update={"step": 20})

    def train(_run: Any) -> None:
        with live_report(storage=shelf) as live:
            live.receive(AttemptBegan(1, 2))
            live.receive(step(1))
            live.receive(CheckpointCommitted(ref.step, 2, 10))
            live.receive(FailureRecord(1, 2, "rank 1 failed: ValueError: boom", None, 40))
            msg = "boom"
            raise ValueError(msg)

    with pytest.raises(ValueError, match="boom") as caught:
        run_in_a_task(train)
    flow_run_id = UUID(newest_record(shelf).flow_run_id)
    page = report_of(flow_run_id)
    assert page.startswith(f"# {DIGITS.rpartition('.')[2]}: failed in step 40\n\n")
    line = page.splitlines()[2]
    assert line.startswith("epoch 4 · 40 of 40 steps done · loss 0.525 · validation_accuracy 0.9")
    assert "| loss | 0.525 |" in page
    record = newest_record(shelf)
    assert (record.num_steps, record.num_epochs, record.attempts[-1].step) == (40, 4, 40)
    place = f"the report: {shelf.uri}/runs/{RUN}/report.html"
    *_, resume, link, last = caught.value.__notes__
    assert resume == f'to continue: resume_from="{RUN}"'
    assert link.startswith("the run in Prefect: http")
    assert last == place
    file = shelf.read(f"runs/{RUN}/report.html").decode()
    assert "failed in step 40" in file
    assert f"resume_from=&quot;{RUN}&quot;" in file
    runs = shelf.read(runs_key(record)).decode()
    assert f'<a href="../../runs/{RUN}/report.html">' in runs


def newest_record(shelf: Shelf) -> RunRecord:
    """Return the only run on record."""
    (found,) = list_run_records(shelf)
    return found


def section_of(page: str, title: str) -> list[str]:
    """Return the lines of a section."""
    return page.partition(f"\n## {title}\n\n")[2].partition("\n\n## ")[0].splitlines()


def test_publish_shows_the_whole_run_and_a_ledger_that_is_not_clean_is_an_error(prefect_api):
    """Each artifact exists once, and the report begins with the ledger's errors."""
    place = {"step": 1, "epoch": 1, "loop": 0, "offset": 0, "rank": 0, "attempt": 1}
    loop = place | {"num_samples": 4, "global_batch_size": 2, "drop_last": False, "world_size": 1}
    steps = place | {"num_global": 2, "is_last": False, "samples": [0, 1]}
    last = steps | {"step": 2, "offset": 2, "is_last": True, "samples": [3, 1]}
    part = head(LEDGER) + "\n".join(map(json.dumps, (loop, steps, last))).encode()
    shelf = Shelf(records() | {f"runs/{RUN}/ledger/rank-00000/000001-000001.jsonl": part})
    params, made = TrainParams(workload=DIGITS, ledger=True), report()
    found = evaluation(("a|b", "dog", "never seen"), ((3, 1, 0), (0, 4, 0), (0, 0, 0)))
    run = Run(RUN, params, shelf, made.dataset.dataset_id, EXPERIMENT)
    inputs = run, made.dataset, made.training, found, made.checkpoint

    def twice(_run: Any) -> TrainReport:
        publish.fn(*inputs)
        return publish.fn(*inputs)

    flow_run_id, published = run_in_a_task(twice)
    assert [row.epoch for row in published.epochs] == [1, 2, 3, 4]
    mean = sum(1 / number for number in range(1, 11)) / 10 + 0.5
    assert published.epochs[0].metrics["loss"] == pytest.approx(mean)
    assert math.isnan(published.epochs[2].metrics["loss"])
    shown = artifacts_of(flow_run_id)
    assert {name: artifact.type for name, artifact in shown.items()} == {
        PAGE: "markdown",
        key("runs", EXPERIMENT): "markdown",
    }
    file = shelf.read(f"runs/{RUN}/report.html").decode()
    described = f"accuracy 87.50 %, loss 0.25, 8 samples · finished · run {RUN}"
    assert all(str(each.description).startswith(described) for each in shown.values())
    assert published.report_uri == f"{shelf.uri}/runs/{RUN}/report.html"
    for words in ("accuracy 87.50 %, loss 0.25, 8 samples", "<td", "data:image/svg+xml;base64,"):
        assert words in file
    assert shelf.secret_key not in file
    page = str(shown[PAGE].data)
    assert f"`{made.checkpoint.uri}`" in page
    assert "| a\\|b | dog | 1 | 25.00 % |" in page
    assert "accuracy 87.50 %, loss 0.25, 8 samples" in page
    assert shelf.secret_key not in str(shown[PAGE])
    epochs = section_of(page, "Epochs")
    assert epochs[0] == "| epoch | steps | samples | loss | validation_accuracy | a | b | c |"
    assert [row.split(" | ")[3] for row in epochs[2:]] == ["0.7929", "0.5669", "nan", "inf"]
    scores = section_of(page, "Classes")
    assert scores[0] == "| class | precision | recall | F1 | support |"
    assert scores[2] == "| a\\|b | 1.000 | 0.750 | 0.857 | 4 |"
    line = "epoch 1: 3 samples; 1 missing (2); 1 repeated (1 in step 2)"
    assert str(published.ledger) == line
    assert line in page.partition("## ")[0]

    says = f"is not clean:\n{line}"

    def errors() -> list[str]:
        return [log.message for log in logs_of(flow_run_id) if log.level == logging.ERROR]

    wait_until(lambda: any(says in message for message in errors()))
