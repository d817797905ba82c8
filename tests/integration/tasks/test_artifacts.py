"""Artifacts on a real Prefect server: live and updated in place, published whole, never in the
training's way."""

import contextlib
import dataclasses
import json
import logging
import math
import re
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import pytest
from prefect import flow, task
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId
from prefect.client.schemas.objects import Artifact
from prefect.client.schemas.sorting import ArtifactSort
from prefect.context import FlowRunContext, TaskRunContext
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
from prefect_torch_ddp.tasks.publish import publish
from prefect_torch_ddp.tasks.report.artifacts import ArtifactWriter, key
from prefect_torch_ddp.tasks.report.live import LiveReport
from prefect_torch_ddp.tasks.report.progress import TrainingProgress
from tests.support.runs import logs_of
from tests.support.waiting import wait_until

RUN = "calm-otter-12345678"
SECRET = "hunter2-do-not-show"
INTERVAL_S = 0.3


@dataclass(frozen=True)
class Shelf:
    """A storage in memory, as far as reading goes."""

    uri: str = "s3://bucket/prefix"
    secret_key: str = field(default=SECRET, repr=False)
    objects: dict[str, bytes] = field(default_factory=dict, repr=False)

    def list(self, prefix: str = "") -> Iterator[StoredObject]:
        """Yield what is there, in key order."""
        for name in sorted(self.objects):
            if name.startswith(prefix):
                yield StoredObject(name, len(self.objects[name]))

    def read(self, name: str) -> bytes:
        """Return the whole object."""
        return self.objects[name]


def live_report(
    run_id: str = RUN, world_size: int = 2, attempt: int = 1, interval_s: float = INTERVAL_S
) -> LiveReport:
    """Make a live report with a short interval, of a run whose ranks wrote records."""
    shown = TrainingProgress(run_id, "prefect_torch_ddp.examples.digits", world_size, attempt)
    return LiveReport(Shelf(objects=records()), shown, interval_s=interval_s)


def step(number: int, loss: float = 0.5) -> Progress:
    """Make the progress of one step."""
    return Progress(
        step=number, epoch=(number - 1) // 10 + 1, total_steps=40, metrics={"loss": loss}
    )


def artifacts_of(flow_run_id: Any) -> list[Artifact]:
    """Ask the API for all artifacts of a flow run."""
    with get_client(sync_client=True) as client:
        found = client.read_artifacts(
            artifact_filter=ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run_id])),
            limit=200,
        )
    return sorted(found, key=lambda artifact: artifact.created)


def by_key(flow_run_id: Any) -> dict[str, Artifact]:
    """Return a flow run's artifacts by key, each of which may be there once."""
    found = artifacts_of(flow_run_id)
    assert len({artifact.key for artifact in found}) == len(found), "an artifact was made twice"
    return {artifact.key: artifact for artifact in found}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("report", "train-ddp-report"),
        ("Confusion Matrix", "train-ddp-confusion-matrix"),
        ("ä_b.c/", "train-ddp-b-c"),
    ],
)
def test_keys_are_lowercase_letters_digits_and_dashes(name, expected):
    """Whatever the name holds."""
    assert key(name) == expected
    assert key("report", kind="My_Flow 2") == "my-flow-2-report"


def test_the_live_report_is_two_artifacts_updated_in_place(prefect_api):
    """A progress bar and a page with the curves of the records."""
    seen: list[dict[str, Artifact]] = []

    @task
    def train() -> str:
        run_id = TaskRunContext.get().task_run.flow_run_id
        with live_report() as live:
            for last in (10, 20):
                for number in range(last - 9, last + 1):
                    live.update(step(number, loss=1 / number))
                wait_until(
                    lambda last=last: (
                        f"step {last}/40"
                        in by_key(run_id).get("train-ddp-report", Artifact(data="")).data
                    )
                )
                seen.append(by_key(run_id))
        return str(TaskRunContext.get().task_run.id)

    @flow
    def run() -> tuple[str, str]:
        return str(FlowRunContext.get().flow_run.id), train()

    flow_run_id, task_run_id = run()
    first, second, last = *seen, by_key(flow_run_id)
    assert set(last) == {"train-ddp-progress", "train-ddp-report"}
    for name, artifact in last.items():
        assert first[name].id == second[name].id == artifact.id
        assert first[name].data != second[name].data != artifact.data
        assert str(artifact.task_run_id) == task_run_id
    assert (first["train-ddp-progress"].data, second["train-ddp-progress"].data) == (25.0, 50.0)
    assert first["train-ddp-progress"].description.startswith("epoch 1, step 10/40, loss 0.1")
    assert last["train-ddp-progress"].data == 100.0
    assert last["train-ddp-progress"].description == "epoch 2, step 20/40, loss 0.05, finished"
    assert "](data:image/svg+xml;base64," in last["train-ddp-report"].data
    assert RUN in last["train-ddp-report"].data


def test_a_flood_of_progress_waits_for_the_interval_and_the_end_does_not(prefect_api):
    """Of 5,000 updates within an interval nothing is written before the end, which is at once."""

    @task
    def train() -> None:
        run_id = TaskRunContext.get().task_run.flow_run_id
        with live_report(interval_s=600.0) as live:
            wait_until(lambda: "train-ddp-report" in by_key(run_id))
            for number in range(1, 5001):
                live.update(step(number % 40 + 1))
            assert "no step yet" in by_key(run_id)["train-ddp-report"].data.splitlines()[0]

    @flow
    def run() -> str:
        train()
        return str(FlowRunContext.get().flow_run.id)

    assert "finished" in by_key(run())["train-ddp-progress"].description


def test_a_training_that_fails_shows_where_it_stopped_and_its_retry_updates_the_same_artifacts(
    prefect_api,
):
    """A training that fails shows where it stopped and its retry updates the same artifacts."""
    descriptions: list[tuple[Any, str]] = []

    @task(retries=1)
    def train() -> None:
        context = TaskRunContext.get().task_run
        with live_report(attempt=context.run_count) as live:
            if context.run_count == 2:
                found = by_key(context.flow_run_id)["train-ddp-progress"]
                descriptions.append((found.id, found.description))
            live.update(step(13 * context.run_count))
            if context.run_count == 1:
                msg = "boom"
                raise ValueError(msg)

    @flow
    def run() -> str:
        train()
        return str(FlowRunContext.get().flow_run.id)

    last = by_key(run())
    assert descriptions == [
        (last["train-ddp-progress"].id, "epoch 2, step 13/40, loss 0.5, stopped")
    ]
    assert last["train-ddp-progress"].description == "epoch 3, step 26/40, loss 0.5, finished"
    assert "| Attempt | 2 |" in last["train-ddp-report"].data


def test_a_restart_shows_its_attempt_and_its_size(prefect_api):
    """A restart within the task goes on in the same report, with its own attempt and number of
    ranks."""

    @flow
    def run() -> str:
        with live_report(attempt=1, world_size=4) as live:
            live.begin_attempt(AttemptBegan(1, 4))
            live.update(step(13))
            live.begin_attempt(AttemptBegan(2, 3))
            live.update(step(12))
        return str(FlowRunContext.get().flow_run.id)

    page = by_key(run())["train-ddp-report"].data
    assert "| Attempt | 2 |" in page
    assert "| World size | 3 ranks |" in page


def test_both_artifacts_say_since_when_there_is_no_checkpoint(prefect_api):
    """And stop saying so when there is one again."""
    says = "no checkpoint since step 8: rank 1: runs/run/x.pt: the disk is full"

    @task
    def train() -> None:
        run_id = TaskRunContext.get().task_run.flow_run_id
        with live_report() as live:
            live.update(dataclasses.replace(step(10), trouble=says))
            wait_until(
                lambda: (
                    f"**{says}**" in by_key(run_id).get("train-ddp-report", Artifact(data="")).data
                )
            )
            assert (
                by_key(run_id)["train-ddp-progress"].description
                == f"epoch 1, step 10/40, loss 0.5; {says}"
            )
            live.update(step(11))
            wait_until(lambda: says not in by_key(run_id)["train-ddp-report"].data)
        assert says not in by_key(run_id)["train-ddp-progress"].description

    @flow
    def run() -> None:
        train()

    run()


def test_an_api_that_is_down_costs_one_warning_and_no_error(caplog):
    """However often the report is tried again."""

    def warnings() -> list[str]:
        said = [record.getMessage() for record in caplog.records]
        return [message for message in said if "live report" in message]

    with socket.socket() as listener:
        # Bound and not listening: it refuses, and nobody else takes the port.
        listener.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/api"
        with (
            temporary_settings({PREFECT_API_URL: url}),
            caplog.at_level(logging.WARNING),
            live_report(interval_s=0.01) as live,
        ):
            wait_until(warnings)
            for number in range(1, 11):
                live.update(step(number))
    assert len(warnings()) == 1


def test_an_api_that_comes_back_gets_the_report(prefect_server, caplog):
    """A door that first refuses and then leads to the server stands for a server that
    restarts."""
    host, port = re.match(r"http://([^:]+):(\d+)/", prefect_server).groups()
    door = socket.socket()
    door.bind(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{door.getsockname()[1]}/api"
    run_id = f"comes-back-{time.time_ns()}"
    with (
        temporary_settings({PREFECT_API_URL: url}),
        caplog.at_level(logging.WARNING),
        live_report(run_id=run_id, interval_s=0.1) as live,
    ):
        wait_until(lambda: any("live report" in record.getMessage() for record in caplog.records))
        door.listen()
        with _Porter(door, (host, int(port))):
            live.update(step(7))
            with (
                temporary_settings({PREFECT_API_URL: prefect_server}),
                get_client(sync_client=True) as client,
            ):
                # The newest: the server has more artifacts, of other tests, than it shows on a
                # page.
                newest = partial(client.read_artifacts, sort=ArtifactSort.UPDATED_DESC)
                wait_until(
                    lambda: any(
                        run_id in str(found.data) and "step 7/40" in str(found.data)
                        for found in newest()
                    )
                )
            live.finish()


class _Porter:
    """Carries bytes between a listening socket and an address, both ways."""

    def __init__(self, door: socket.socket, address: tuple[str, int]) -> None:
        self._door, self._address = door, address
        self._open: list[socket.socket] = [door]

    def __enter__(self) -> Self:
        def carry(source: socket.socket, target: socket.socket) -> None:
            with contextlib.suppress(OSError):
                while data := source.recv(65536):
                    target.sendall(data)

        def welcome() -> None:
            while True:
                try:
                    guest, _ = self._door.accept()
                except OSError:
                    return
                host = socket.create_connection(self._address)
                self._open += [guest, host]
                for pair in ((guest, host), (host, guest)):
                    threading.Thread(target=carry, args=pair, daemon=True).start()

        threading.Thread(target=welcome, daemon=True).start()
        return self

    def __exit__(self, *_exc: object) -> None:
        for end in self._open:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


def records() -> dict[str, bytes]:
    """Write what two ranks would have written in four epochs."""

    def line(number: int, rank: int) -> bytes:
        loss: float | str = "nan" if number == 25 else "inf" if number == 35 else 1 / number + rank
        metrics: dict[str, Any] = {"loss": loss} | (
            {"validation_accuracy": 0.9, "a": 1, "b": 2, "c": 3} if number % 10 == 0 else {}
        )
        record = {
            "step": number,
            "epoch": (number - 1) // 10 + 1,
            "rank": rank,
            "attempt": 1,
            "time": float(number),
        }
        return json.dumps(record | {"num_samples": 8, "metrics": metrics}).encode() + b"\n"

    return {
        f"runs/{RUN}/metrics/rank-{rank:05d}/000001-000001.jsonl": b"".join(
            line(number, rank) for number in range(1, 41)
        )
        for rank in range(2)
    }


def publish_inputs() -> dict[str, Any]:
    """Make the results of the tasks before."""
    last = CheckpointRef(step=40, attempt=1, uri="s3://bucket/prefix/manifest.json")
    return {
        "params": TrainParams(workload="prefect_torch_ddp.examples.digits"),
        "storage": Shelf(objects=records()),
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
        ),
        "evaluation": Report(
            num_samples=8,
            accuracy=0.875,
            loss=0.25,
            classes=(
                ClassScore(name="a|b", precision=1.0, recall=0.75, f1=6 / 7, support=4),
                ClassScore(name="dog", precision=0.8, recall=1.0, f1=8 / 9, support=4),
                ClassScore(name="never seen", precision=0.0, recall=0.0, f1=0.0, support=0),
            ),
            confusion_matrix=((3, 1, 0), (0, 4, 0), (0, 0, 0)),
        ),
        "checkpoint": last,
        "model_uri": "s3://bucket/prefix/model.pt",
    }


def test_publish_shows_the_whole_run_and_returns_it(prefect_api):
    """Publish shows the whole run and returns it."""

    @flow
    def run() -> tuple[str, TrainReport]:
        return str(FlowRunContext.get().flow_run.id), publish(**publish_inputs())

    flow_run_id, report = run()
    epochs = report.epochs
    assert [row.epoch for row in epochs] == [1, 2, 3, 4]
    assert epochs[0].metrics["loss"] == pytest.approx(
        sum(1 / number for number in range(1, 11)) / 10 + 0.5
    )
    assert math.isnan(epochs[2].metrics["loss"])
    shown = by_key(flow_run_id)
    assert {name: artifact.type for name, artifact in shown.items()} == {
        "train-ddp-report": "markdown",
        "train-ddp-epochs": "table",
        "train-ddp-confusion-matrix": "markdown",
        "train-ddp-class-scores": "table",
        "train-ddp-checkpoints": "markdown",
    }
    assert all(re.fullmatch(r"[a-z0-9-]+", name) for name in shown)
    assert "`s3://bucket/prefix/manifest.json`" in shown["train-ddp-checkpoints"].data
    assert "| a\\|b | **3** | 1 | 0 |" in shown["train-ddp-confusion-matrix"].data
    assert "accuracy 87.50 %, loss 0.25, 8 samples" in shown["train-ddp-report"].data
    assert SECRET not in "".join(str(artifact) for artifact in shown.values())


def test_a_ledger_that_is_not_clean_is_said_first(prefect_api):
    """The report begins with it, and the run's log has an error."""
    place = {"step": 1, "epoch": 1, "loop": 0, "offset": 0}
    loop = place | {"num_samples": 4, "global_batch_size": 2, "drop_last": False}
    of_rank = {"world_size": 1, "rank": 0, "attempt": 1}
    step = place | {"num_global": 2, "is_last": False, "rank": 0, "attempt": 1}
    lines = [
        loop | of_rank,
        step | {"samples": [0, 1]},
        step | {"step": 2, "offset": 2, "is_last": True, "samples": [3, 1]},
    ]
    part = "\n".join(map(json.dumps, lines)).encode()
    inputs = publish_inputs()
    storage = Shelf(objects=records() | {f"runs/{RUN}/ledger/rank-00000/000001-000001.jsonl": part})
    params = inputs["params"].model_copy(update={"ledger": True})

    @flow
    def run() -> tuple[str, TrainReport]:
        return str(FlowRunContext.get().flow_run.id), publish(
            **inputs | {"storage": storage, "params": params}
        )

    flow_run_id, report = run()
    line = "epoch 1: 3 samples; 1 missing (2); 1 repeated (1 in step 2)"
    assert str(report.ledger) == line
    page = by_key(flow_run_id)["train-ddp-report"].data
    assert "**The ledger is not clean**" in page.split("## ")[0]
    assert page.count(line) == 2
    expected = (logging.ERROR, f"is not clean:\n{line}")
    wait_until(
        lambda: any(
            log.level == expected[0] and expected[1] in log.message for log in logs_of(flow_run_id)
        )
    )


def test_tables_have_at_most_five_columns_and_no_number_that_crashes_the_page(prefect_api):
    """Tables have at most five columns and no number that crashes the page."""

    @flow
    def run() -> str:
        publish(**publish_inputs())
        return str(FlowRunContext.get().flow_run.id)

    shown = by_key(run())
    epochs = json.loads(shown["train-ddp-epochs"].data, parse_constant=pytest.fail)
    assert [list(row) for row in epochs] == [["epoch", "loss", "validation_accuracy", "a", "b"]] * 4
    assert [row["loss"] for row in epochs] == [0.7929, 0.5669, "nan", "inf"]
    scores = json.loads(shown["train-ddp-class-scores"].data, parse_constant=pytest.fail)
    assert list(scores[0]) == ["class", "precision", "recall", "F1", "support"]
    assert list(scores[0].values()) == ["a|b", 1.0, 0.75, 0.8571, 4]
    assert list(scores[2].values()) == ["never seen", 0.0, 0.0, 0.0, 0]


def test_publishing_twice_in_one_task_run_makes_nothing_twice(prefect_api):
    """Dask runs a task again when its worker is lost, with the same task run id."""

    @task
    def twice() -> None:
        publish.fn(**publish_inputs())
        publish.fn(**publish_inputs())

    @flow
    def run() -> str:
        twice()
        return str(FlowRunContext.get().flow_run.id)

    assert len(by_key(run())) == 5


def test_a_table_with_nan_is_refused_before_it_is_sent(prefect_api):
    """A table with nan is refused before it is sent."""
    with get_client(sync_client=True) as client, pytest.raises(ValueError, match="JSON"):
        ArtifactWriter(client, None, None).put_table("train-ddp-x", [{"loss": math.nan}])
