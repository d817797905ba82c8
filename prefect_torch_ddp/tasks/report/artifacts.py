"""Prefect's artifacts: their keys, and the one writer that updates them in place."""

import hashlib
import re
from typing import Literal
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    ArtifactFilterKey,
    ArtifactFilterTaskRunId,
)
from prefect.settings import PREFECT_UI_URL

from prefect_torch_ddp.tasks.report.markdown import text
from prefect_torch_ddp.tasks.report.page.headline import RunView, about
from prefect_torch_ddp.tasks.report.page.run_list import render_runs
from prefect_torch_ddp.tasks.report.page.sections import render_page

MAX_KEY_NAME = 60
REQUEST_TIMEOUT_S = 5.0
KEEPALIVE_S = 2.0
"""How long an idle connection is used again. Prefect's server closes it after 5 s, also our
interval: a request that meets the closing fails by a ReadError."""
FLOW = "train-ddp"
EXAMPLES = ("digits",)
EXAMPLE_FOLDER = "prefect_torch_ddp.examples."
ArtifactType = Literal["markdown", "progress"]


def key(kind: str, experiment: str) -> str:
    """Return the key of an experiment's artifact: `digits-nightly-report`.

    That is the workload or task without its package, the deployment or flow, and the kind, in
    lowercase letters, digits and dashes. A digest is added where another experiment may have the
    same short name, so that no two have one key.
    """
    # A task's name may have its run_key after a colon, with any characters in it.
    whole, *run_key = experiment.split(":", maxsplit=1)
    names = whole.split("/")
    is_ours = names[0] == FLOW and len(names) in (2, 3)
    last = ":".join([names[-1].rpartition(".")[2], *run_key])
    others = names[1:-1] if is_ours else names[:-1]
    short = "-".join([last, *others[:1]])
    plain = re.sub(r"[^a-z0-9]+", "-", short.lower()).strip("-")
    digest = hashlib.sha256(experiment.encode(errors="replace")).hexdigest()[:6]
    alone = is_ours and plain == short and len(plain) <= MAX_KEY_NAME and _names_its_own(names[-1])
    return "-".join(filter(None, [plain[:MAX_KEY_NAME].strip("-"), "" if alone else digest, kind]))


def _names_its_own(workload: str) -> bool:
    """Tell whether no other workload has the same short name, which then has no dash either."""
    if workload.startswith(EXAMPLE_FOLDER):
        return workload.removeprefix(EXAMPLE_FOLDER) in EXAMPLES
    return re.fullmatch(r"[a-z0-9]+", workload) is not None and workload not in EXAMPLES


def put_page(writer: "ArtifactWriter", view: RunView) -> None:
    """Show a run's page."""
    page = render_page(view)
    writer.put("markdown", key("report", view.record.experiment), page, about(view))


def put_runs(writer: "ArtifactWriter", view: RunView) -> None:
    """Show the last runs of a run's experiment."""
    runs, experiment = render_runs([view.record, *view.earlier], view.links), view.record.experiment
    says = f"{about(view)}: the last runs of {text(experiment)}"
    writer.put("markdown", key("runs", experiment), runs, says)


def ui_url() -> str:
    """Return the address of Prefect's UI as browsers open it; empty if there is none."""
    return PREFECT_UI_URL.value() or ""


def artifact_client() -> SyncPrefectClient:
    """Return a client for whoever enters it: not the one that the task's thread uses."""
    limits = httpx.Limits(keepalive_expiry=KEEPALIVE_S)
    settings = {"timeout": REQUEST_TIMEOUT_S, "limits": limits}
    return get_client(sync_client=True, httpx_settings=settings)


class ArtifactWriter:
    """Writes artifacts, each key once for a flow run, or for a task run: others are updated."""

    def __init__(
        self,
        client: SyncPrefectClient,
        task_run_id: UUID | None,
        flow_run_id: UUID | None,
        *,
        per_task: bool = False,
    ) -> None:
        self._client = client
        self._task_run_id = task_run_id
        self._flow_run_id = flow_run_id
        self._per_task = per_task
        self._ids: dict[str, UUID] = {}

    def put(
        self, type_: ArtifactType, key: str, data: object, description: str | None = None
    ) -> UUID:
        """Create the artifact, or update it if this flow run has it; return its id."""
        artifact_id = self._ids.get(key) or self._find(key)
        if artifact_id is None:
            request = ArtifactCreate(
                type=type_,
                key=key,
                data=data,
                description=description,
                task_run_id=self._task_run_id,
                flow_run_id=self._flow_run_id,
            )
            artifact_id = self._client.create_artifact(request).id
        else:
            update = ArtifactUpdate(data=data, description=description)
            self._client.update_artifact(artifact_id, update)
        self._ids[key] = artifact_id
        return artifact_id

    def _find(self, key: str) -> UUID | None:
        mine = ArtifactFilter(key=ArtifactFilterKey(any_=[key]))
        if self._flow_run_id is not None and not self._per_task:
            mine.flow_run_id = ArtifactFilterFlowRunId(any_=[self._flow_run_id])
        elif self._task_run_id is not None:
            mine.task_run_id = ArtifactFilterTaskRunId(any_=[self._task_run_id])
        else:
            return None
        found = self._client.read_artifacts(artifact_filter=mine, limit=1)
        return found[0].id if found else None
