"""What a Prefect run leaves, read through the real API."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterName,
    LogFilter,
    LogFilterFlowRunId,
)
from prefect.client.schemas.objects import Artifact, FlowRun, Log, TaskRun
from prefect.client.schemas.sorting import FlowRunSort

import prefect_torch_ddp.flow
from prefect_torch_ddp import CheckpointParams, TrainParams
from tests.support.gangs import by_rank
from tests.support.waiting import wait_until


def steered(folder: Path, **changes: Any) -> TrainParams:
    """Describe a training that continues until the folder, made here, has a file `enough`:
    see `tiny:Steered`. The storage is `store` in it; nothing is saved before the end."""
    folder.mkdir(exist_ok=True)
    given = {
        "workload": "tests.workloads.tiny:Steered",
        "storage": str(folder / "store"),
        "options": {"folder": str(folder)},
        "checkpoint": CheckpointParams(every_s=None),
    }
    return TrainParams(**{**given, **changes})


def flow_run_id_of(url: str | None) -> UUID:
    """Return the id at the end of a flow run's URL."""
    assert url is not None
    return UUID(url.rsplit("/", 1)[-1])


def newest_flow_run() -> FlowRun:
    """Return the flow run that began last; runs that a schedule has made haven't begun."""
    with get_client(sync_client=True) as client:
        runs = client.read_flow_runs(sort=FlowRunSort.START_TIME_DESC)
    return next(run for run in runs if run.start_time is not None)


def logs_of(flow_run_id: UUID) -> list[Log]:
    """Return the flow run's log with its tasks' lines."""
    lines: list[Log] = []
    with get_client(sync_client=True) as client:
        where = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[flow_run_id]))
        while page := client.read_logs(where, limit=200, offset=len(lines)):
            lines += page
    return lines


def report_of(flow_run_id: UUID) -> str:
    """Return the page of a flow run's only training as it is now; empty if there is none."""
    found = artifacts_of(flow_run_id)
    pages = [str(one.data) for name, one in found.items() if name.endswith("-report")]
    assert len(pages) <= 1, found.keys()
    return "".join(pages)


def events_of(
    flow_run_id: UUID, last: str = "training.finished", num_last: int = 1
) -> list[dict[str, Any]]:
    """Return a flow run's events of ours in their order, once as many of the last are there."""
    related = {"id": [f"prefect.flow-run.{flow_run_id}"]}
    body = {"filter": {"related": related, "event": {"prefix": ["prefect-torch-ddp."]}}}

    def read() -> list[dict[str, Any]]:
        with get_client(sync_client=True) as client:
            answer = client.request("POST", "/events/filter", json={**body, "limit": 50})
        found: list[dict[str, Any]] = answer.json()["events"]
        return sorted(found, key=lambda event: event["occurred"])

    name = f"prefect-torch-ddp.{last}"
    wait_until(
        lambda: sum(event["event"] == name for event in read()) >= num_last,
        what=f"{num_last} x the event {name}",
    )
    return read()


def wait_until_said(flow_run_id: UUID, *texts: str) -> None:
    """Wait for a line in the flow run's log that has all the texts.

    Dask workers send their lines in batches, on their own time.
    """
    wait_until(
        lambda: any(
            all(text in line for text in texts)
            for line in by_rank(line.message for line in logs_of(flow_run_id))
        ),
        what=f"a line with {texts}",
    )


def task_runs_of(flow_run_id: UUID, *expected: str) -> dict[str, TaskRun]:
    """Return the flow run's task runs by the task's name.

    Processes tell a Prefect server of task runs by events, which it writes down on its own time,
    and of flow runs at once. So those that are expected in an ended flow run may come late.
    """

    def read() -> dict[str, TaskRun]:
        with get_client(sync_client=True) as client:
            where = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id]))
            runs = client.read_task_runs(flow_run_filter=where)
        return {run.name.rsplit("-", 1)[0]: run for run in runs}

    def have_ended() -> bool:
        runs = read()
        states = [runs[name].state for name in expected if name in runs]
        return len(states) == len(expected) and all(state and state.is_final() for state in states)

    wait_until(have_ended, what=f"the end of {', '.join(expected)}")
    return read()


def states_of(task_run: TaskRun) -> list[tuple[str, str]]:
    """Return name and message of all states a task run went through."""
    with get_client(sync_client=True) as client:
        answer = client.request(
            "GET", "/task_run_states/", params={"task_run_id": str(task_run.id)}
        )
    states: list[dict[str, Any]] = sorted(answer.json(), key=lambda state: state["timestamp"])
    return [(state["name"], state["message"] or "") for state in states]


def states_passed(flow_run_id: UUID, task: str = "train") -> list[str]:
    """Return the states that a task went through, but for those of any task run."""
    states = states_of(task_runs_of(flow_run_id)[task])
    return [name for name, _ in states if name not in ("Pending", "Running")]


def train_states(flow_run_id: UUID, task: str = "train") -> list[str]:
    """Return the last states of all task runs of train, or of another task."""
    with get_client(sync_client=True) as client:
        where = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id]))
        runs = client.read_task_runs(flow_run_filter=where)
    return sorted(run.state_name or "" for run in runs if run.name.startswith(task))


def artifacts_of(flow_run_id: UUID) -> dict[str, Artifact]:
    """Return the flow run's artifacts by key, each of which may be there once."""
    with get_client(sync_client=True) as client:
        where = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run_id]))
        found = client.read_artifacts(artifact_filter=where)
    by_key = {str(artifact.key): artifact for artifact in found}
    assert len(by_key) == len(found), "an artifact was made twice"
    return by_key


def flow_run_of(run_id: str) -> FlowRun:
    """Return the flow run of one of our runs, whose id is the flow run's name and the end of its
    id."""
    name, _, end = run_id.rpartition("-")
    with get_client(sync_client=True) as client:
        named = client.read_flow_runs(
            flow_run_filter=FlowRunFilter(name=FlowRunFilterName(any_=[name]))
        )
    (found,) = (run for run in named if str(run.id).endswith(end))
    return found


def retry_train_flow(api_url: str, run_id: str, home: Path, ends: str = "Completed") -> UUID:
    """Have `prefect flow-run retry` run a train_flow again, see below.

    Return its flow run's id.
    """
    flow_run_id = flow_run_of(run_id).id
    entrypoint = f"{prefect_torch_ddp.flow.__file__}:train_flow"
    where = {"PREFECT_HOME": str(home), "PREFECT_API_URL": api_url}
    retry_from_the_cli(flow_run_id, entrypoint, ends, **where)
    return flow_run_id


def retry_from_the_cli(
    flow_run_id: UUID, entrypoint: str, ends: str = "Completed", **variables: str
) -> str:
    """Have `prefect flow-run retry` run a flow again in another process, which has to end so.

    Return what it prints.
    """
    command = f"-m prefect flow-run retry {flow_run_id} --entrypoint {entrypoint}".split()
    run = {"env": {**os.environ, **variables}, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, *command], **run, timeout=300, check=False)
    printed = done.stdout + done.stderr
    with get_client(sync_client=True) as client:
        assert client.read_flow_run(flow_run_id).state_name == ends, printed[-6000:]
    return printed
