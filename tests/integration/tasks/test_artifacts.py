"""Artifacts on a real Prefect server: live and updated in place, published whole, never in the
training's way."""

import json
import logging
import math
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from prefect import flow, task
from prefect.client.orchestration import get_client
from prefect.client.schemas.sorting import ArtifactSort
from prefect.context import TaskRunContext
from prefect.settings import PREFECT_API_URL, temporary_settings

from prefect_torch_ddp.params import TrainParams
from prefect_torch_ddp.protocol.events import AttemptBegan, Progress
from prefect_torch_ddp.results import (
    CheckpointRef,
    ClassScore,
    DatasetReport,
    Report,
    TrainingSummary,
    TrainReport,
)
from prefect_torch_ddp.storage.protocol import StoredObject
from prefect_torch_ddp.tasks.record.draft import draft_record
from prefect_torch_ddp.tasks.record.recorder import RunRecorder
from prefect_torch_ddp.tasks.report.artifacts import key
from prefect_torch_ddp.tasks.report.live import LiveReport
from prefect_torch_ddp.tasks.report.progress import TrainingProgress
from prefect_torch_ddp.tasks.stages import publish
from tests.support.runs import artifacts_of, logs_of
from tests.support.s3_server import Fault, Wire, lose_the_answer
from tests.support.waiting import wait_until

RUN = "calm-otter-12345678"
SECRET = "hunter2-do-not-show"
DIGITS = "prefect_torch_ddp.examples.digits"
EXPERIMENT = f"train-ddp/{DIGITS}"
PROGRESS, PAGE = key("progress", EXPERIMENT), key("report", EXPERIMENT)


def records() -> dict[str, bytes]:
    """Write what two ranks would have written in four epochs."""

    def line(number: int, rank: int) -> bytes:
        loss: float | str = {25: "nan", 35: "inf"}.get(number, 1 / number + rank)
        held_out = {"validation_accuracy": 0.9, "a": 1, "b": 2, "c": 3}
        metrics = {"loss": loss} | (held_out if number % 10 == 0 else {})
        where = {"step": number, "epoch": (number - 1) // 10 + 1, "rank": rank, "attempt": 1}
        more = {"time": float(number), "num_samples": 8, "metrics": metrics}
        return json.dumps(where | more).encode() + b"\n"

    return {
        f"runs/{RUN}/metrics/rank-{rank:05d}/000001-000001.jsonl": b"".join(
            line(number, rank) for number in range(1, 41)
        )
        for rank in range(2)
    }


@dataclass(frozen=True)
class Shelf:
    """A storage in memory, as far as a report needs one."""

    uri: str = "s3://bucket/prefix"
    secret_key: str = field(default=SECRET, repr=False)
    objects: dict[str, bytes] = field(default_factory=records, repr=False)

    def list(self, prefix: str = "") -> Iterator[StoredObject]:
        """Yield what is there, in key order."""
        for name in sorted(self.objects):
            if name.startswith(prefix):
                yield StoredObject(name, len(self.objects[name]))

    def read(self, name: str) -> bytes:
        return self.objects[name]

    def write(self, name: str, data: bytes) -> None:
        self.objects[name] = data


def live_report(run_id: str = RUN, attempt: int = 1, interval_s: float = 0.3) -> LiveReport:
    """Make a live report with a short interval, of a run whose ranks wrote records."""
    storage: Any = Shelf()
    draft = draft_record(None, run_id, EXPERIMENT, storage, workload=DIGITS)
    shown, recorder = TrainingProgress(2, attempt), RunRecorder(storage, draft)
    return LiveReport(storage, shown, recorder, is_published=True, interval_s=interval_s)


def step(number: int, **more: Any) -> Progress:
    """Make the progress of one step."""
    loss = {"metrics": {"loss": 1 / number}}
    return Progress(step=number, epoch=(number - 1) // 10 + 1, total_steps=40, **loss | more)


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


def page_of(flow_run_id: Any) -> str:
    """Return the text of the report as it is now, if it is there."""
    found = artifacts_of(flow_run_id).get(PAGE)
    return "" if found is None else str(found.data)


@pytest.mark.parametrize(
    ("experiment", "expected"),
    [
        ("fit", "report-fit"),
        ("train-ddp tests.workloads.tiny", "report-train-ddp-tests-workloads-tiny-"),
        ("ä", "report-"),
    ],
)
def test_keys_are_lowercase_letters_digits_and_dashes(experiment: str, expected: str) -> None:
    """Whatever the name holds; a name that isn't its own key gets a digest."""
    made = key("report", experiment)
    assert re.fullmatch(expected + "[0-9a-f]{6}" * expected.endswith("-"), made)


def test_no_two_experiments_have_one_key() -> None:
    """However alike they are, and however long."""
    names = ["fit_a", "fit-a", "fit a", "Fit-a", "ä", "ö", *("x" * length for length in (99, 100))]
    assert len({key("report", name) for name in names}) == len(names)


def test_the_live_report_is_two_artifacts_updated_in_place(prefect_api):
    """A progress bar and a page with the curves of the records."""
    seen: list[dict[str, Any]] = []

    def train(run: Any) -> str:
        with live_report() as live:
            for last in (10, 20):
                for number in range(last - 9, last + 1):
                    live.receive(step(number))
                wait_until(lambda last=last: f"step {last}/40" in page_of(run.flow_run_id))
                seen.append(artifacts_of(run.flow_run_id))
        return str(run.id)

    flow_run_id, task_run_id = run_in_a_task(train)
    first, second, last = *seen, artifacts_of(flow_run_id)
    assert set(last) == {PROGRESS, PAGE}
    for name, artifact in last.items():
        assert first[name].id == second[name].id == artifact.id
        assert first[name].data != second[name].data != artifact.data
        assert str(artifact.task_run_id) == task_run_id
    assert [found[PROGRESS].data for found in (first, second, last)] == [25.0, 50.0, 100.0]
    assert first[PROGRESS].description.startswith("epoch 1 · step 10/40 · loss 0.1")
    assert last[PROGRESS].description == "epoch 2 · step 20/40 · loss 0.05 · trained"
    assert "](data:image/svg+xml;base64," in last[PAGE].data
    assert RUN in last[PAGE].data


def test_a_flood_of_progress_waits_for_the_interval_and_the_end_does_not(prefect_api):
    """Of 5,000 updates within an interval nothing is written before the end, which is at once."""

    def train(run: Any) -> None:
        with live_report(interval_s=600.0) as live:
            wait_until(lambda: page_of(run.flow_run_id))
            for number in range(1, 5001):
                live.receive(step(number % 40 + 1))
            assert "no step yet" in page_of(run.flow_run_id).splitlines()[0]

    flow_run_id, _ = run_in_a_task(train)
    assert "trained" in artifacts_of(flow_run_id)[PROGRESS].description


def test_a_retry_and_a_restart_update_the_same_artifacts(prefect_api):
    """What failed shows where it stopped; what follows has its own attempt and number of ranks."""
    stopped: list[Any] = []

    def train(run: Any) -> None:
        with live_report(attempt=run.run_count) as live:
            if run.run_count == 1:
                live.receive(step(13))
                msg = "boom"
                raise ValueError(msg)
            stopped.append(artifacts_of(run.flow_run_id)[PROGRESS])
            live.receive(step(26))
            live.receive(AttemptBegan(3, 1))
            live.receive(step(20))

    flow_run_id, _ = run_in_a_task(train, retries=1)
    last = artifacts_of(flow_run_id)
    assert [found.id for found in stopped] == [last[PROGRESS].id]
    assert stopped[0].description == "epoch 2 · step 13/40 · loss 0.07692 · failed"
    assert last[PROGRESS].description == "epoch 2 · step 20/40 · loss 0.05 · trained"
    assert "| Attempt | 3 |" in last[PAGE].data
    assert "| World size | 1 ranks |" in last[PAGE].data


def test_an_api_that_is_down_costs_one_warning_and_gets_the_report_when_it_is_back(
    prefect_server, caplog
):
    """However often the report is tried again."""
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


def publish_inputs(**changes: Any) -> dict[str, Any]:
    """Make the results of the tasks before."""
    last = CheckpointRef(step=40, attempt=1, uri="s3://bucket/prefix/manifest.json")
    scores = (("a|b", 1.0, 0.75, 6 / 7, 4), ("dog", 0.8, 1.0, 8 / 9, 4), ("never seen", 0, 0, 0, 0))
    names = ("name", "precision", "recall", "f1", "support")
    return {
        "params": TrainParams(workload=DIGITS),
        "storage": Shelf(),
        "experiment": EXPERIMENT,
        "dataset": DatasetReport(
            dataset_id="d", uri="s3://bucket/data/d", num_files=1, num_bytes=10, digest="9f2c"
        ),
        "training": TrainingSummary(
            run_id=RUN,
            attempt=1,
            world_size=2,
            num_steps=40,
            num_epochs=4,
            duration_s=1.0,
            value={},
            last_checkpoint=last,
            model_uris={"model": "s3://bucket/prefix/model.pt"},
        ),
        "evaluation": Report(
            num_samples=8,
            accuracy=0.875,
            loss=0.25,
            classes=tuple(ClassScore(**dict(zip(names, row, strict=True))) for row in scores),
            confusion_matrix=((3, 1, 0), (0, 4, 0), (0, 0, 0)),
        ),
        "checkpoint": last,
    } | changes


def section_of(page: str, title: str) -> list[str]:
    """Return the lines of a section."""
    return page.partition(f"\n## {title}\n\n")[2].partition("\n\n## ")[0].splitlines()


def test_publish_shows_the_whole_run_and_returns_it(prefect_api):
    """Each artifact once, though Dask runs a task again whose worker is lost; what isn't a
    number is a word; no secret is shown."""

    def twice(_run: Any) -> TrainReport:
        publish.fn(**publish_inputs())
        return publish.fn(**publish_inputs())

    flow_run_id, report = run_in_a_task(twice)
    assert [row.epoch for row in report.epochs] == [1, 2, 3, 4]
    mean = sum(1 / number for number in range(1, 11)) / 10 + 0.5
    assert report.epochs[0].metrics["loss"] == pytest.approx(mean)
    assert math.isnan(report.epochs[2].metrics["loss"])
    shown = artifacts_of(flow_run_id)
    assert {name: artifact.type for name, artifact in shown.items()} == {PAGE: "markdown"}
    page = str(shown[PAGE].data)
    assert "`s3://bucket/prefix/manifest.json`" in page
    assert "| a\\|b | **3** | 1 | 0 |" in page
    assert "accuracy 87.50 %, loss 0.25, 8 samples" in page
    assert SECRET not in str(shown[PAGE])
    epochs = section_of(page, "Epochs")
    assert epochs[0] == "| epoch | steps | samples | loss | validation_accuracy | a | b | c |"
    assert [row.split(" | ")[3] for row in epochs[2:]] == ["0.7929", "0.5669", "nan", "inf"]
    scores = section_of(page, "Classes")
    assert scores[0] == "| class | precision | recall | F1 | support |"
    assert scores[2] == "| a\\|b | 1.000 | 0.750 | 0.857 | 4 |"


def test_a_ledger_that_is_not_clean_is_an_error_in_the_runs_log(prefect_api):
    """With what is wrong, which the report begins with."""
    place = {"step": 1, "epoch": 1, "loop": 0, "offset": 0, "rank": 0, "attempt": 1}
    loop = place | {"num_samples": 4, "global_batch_size": 2, "drop_last": False, "world_size": 1}
    steps = place | {"num_global": 2, "is_last": False, "samples": [0, 1]}
    last = steps | {"step": 2, "offset": 2, "is_last": True, "samples": [3, 1]}
    part = "\n".join(map(json.dumps, (loop, steps, last))).encode()
    shelf = Shelf(objects=records() | {f"runs/{RUN}/ledger/rank-00000/000001-000001.jsonl": part})
    inputs = publish_inputs(storage=shelf, params=TrainParams(workload=DIGITS, ledger=True))
    flow_run_id, report = run_in_a_task(lambda _: publish.fn(**inputs))
    line = "epoch 1: 3 samples; 1 missing (2); 1 repeated (1 in step 2)"
    assert str(report.ledger) == line
    assert line in page_of(flow_run_id).split("## ")[0]
    says = f"is not clean:\n{line}"
    wait_until(
        lambda: any(
            log.level == logging.ERROR and says in log.message for log in logs_of(flow_run_id)
        )
    )
