"""Owns how integration tests read what a Prefect run left behind, through the real API."""

import socket
from typing import Any
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    FlowRunFilter,
    FlowRunFilterId,
    LogFilter,
    LogFilterFlowRunId,
)
from prefect.client.schemas.objects import Artifact, Log, TaskRun


def free_port() -> int:
    """Return a port that nobody listens at now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def flow_run_id_of(url: str | None) -> UUID:
    """Return the id at the end of a flow run's URL."""
    assert url is not None
    return UUID(url.rsplit("/", 1)[-1])


def logs_of(flow_run_id: UUID) -> list[Log]:
    """Return the flow run's log with its tasks' lines."""
    lines: list[Log] = []
    with get_client(sync_client=True) as client:
        where = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[flow_run_id]))
        while page := client.read_logs(where, limit=200, offset=len(lines)):
            lines += page
    return lines


def task_runs_of(flow_run_id: UUID) -> dict[str, TaskRun]:
    """Return the flow run's task runs by the task's name."""
    with get_client(sync_client=True) as client:
        runs = client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id])))
    return {run.name.rsplit("-", 1)[0]: run for run in runs}


def states_of(task_run: TaskRun) -> list[tuple[str, str]]:
    """Return name and message of all states a task run went through."""
    with get_client(sync_client=True) as client:
        answer = client.request("GET", "/task_run_states/", params={"task_run_id": str(task_run.id)})
    states: list[dict[str, Any]] = sorted(answer.json(), key=lambda state: state["timestamp"])
    return [(state["name"], state["message"] or "") for state in states]


def artifacts_of(flow_run_id: UUID) -> dict[str, Artifact]:
    """Return the flow run's artifacts by key."""
    with get_client(sync_client=True) as client:
        where = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run_id]))
        return {str(found.key): found for found in client.read_artifacts(artifact_filter=where)}
