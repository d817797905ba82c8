"""Both UIs of a real Prefect server show the report, light and dark."""

import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings

from prefect_torch_ddp import (
    CheckpointParams,
    ClusterParams,
    RankFailedError,
    TrainParams,
    train_flow,
)
from prefect_torch_ddp.protocol.events import Progress
from prefect_torch_ddp.records.run_record import RunRecord
from prefect_torch_ddp.tasks.clusters.local_cluster import local_cluster
from prefect_torch_ddp.tasks.report.artifacts import ArtifactWriter, key
from prefect_torch_ddp.tasks.report.curves import Curves
from prefect_torch_ddp.tasks.report.page.headline import RunView
from prefect_torch_ddp.tasks.report.page.sections import render_page
from prefect_torch_ddp.tasks.report.progress import TrainingProgress
from tests.support.browser import Page, Scheme, browser
from tests.support.runs import steered
from tests.support.servers import prefect_server_in
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]

SHOTS = Path(__file__).parents[3] / "build" / "screenshots"
UIS = {"v1": "", "v2": "/v2"}
SCHEMES: tuple[Scheme, ...] = ("light", "dark")
HOSTILE = (
    "<script>document.title='hacked'</script> <img src=//evil.example/i.png> ![i](//evil.example/i)"
    " [e](//evil.example) http://evil.example www.evil.example me@evil.example <http://evil.example>"
)
LINKS = "[...document.querySelectorAll('a')].map(a => a.href).filter(a => a.includes('evil'))"
IMAGES = "[...document.images].map(i => i.src).filter(i => !i.startsWith('data:image/svg+xml'))"
PICTURES = "[...document.images].filter(i => i.src.startsWith('data:image/svg+xml'))"
# A page with a block of code is there, and hidden, while the newer UI loads what shows code.
IS_SHOWN = "document.querySelector('h1')?.getClientRects().length > 0"
ARE_DRAWN = f"{PICTURES}.every(i => i.complete && i.naturalWidth > 300)"


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run a server with its UIs, for flows of this module; gives its API URL."""
    with (
        prefect_server_in(tmp_path_factory.mktemp("server"), ui=True) as url,
        pytest.MonkeyPatch.context() as patch,
        temporary_settings({PREFECT_API_URL: url}),
    ):
        patch.setenv("PREFECT_API_URL", url)
        yield url


@pytest.fixture(scope="module")
def params(api: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Run a cluster for the flows of this module; give the parameters of training and
    storage. The cluster isn't shared: Prefect's events go from a Dask worker to the first
    server that it had."""
    with local_cluster(n_workers=2) as cluster:
        at = ClusterParams(address=cluster.scheduler_address)
        yield {"storage": str(tmp_path_factory.mktemp("store")), "cluster": at}


@pytest.fixture
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """Run a browser, for one test: its processes come and go."""
    with browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


def look(page: Page, api: str, artifact_id: UUID, name: str, *words: str) -> None:
    """Open an artifact in both UIs, light and dark; each shows its headline and its curves."""
    for ui, path in UIS.items():
        for scheme in SCHEMES:
            url = f"{api.removesuffix('/api')}{path}/artifacts/artifact/{artifact_id}"
            page.open("about:blank", scheme)
            page.open(url, scheme)
            page.wait_for(f"{IS_SHOWN} && {PICTURES}.length > 0 && {ARE_DRAWN}")
            shows = f"{json.dumps(words)}.every(word => document.body.innerText.includes(word))"
            try:
                page.wait_for(shows)
            finally:
                page.screenshot(SHOTS / f"{name}-{ui}-{scheme}.png")
            assert page.evaluate(f"document.documentElement.classList.contains('{scheme}')")


def pages_of(workload: str) -> list[Any]:
    """Return the report of a workload's training, if it is there."""
    with get_client(sync_client=True) as client:
        found = client.read_artifacts()
    return [one for one in found if one.key == key("report", f"train-ddp/{workload}")]


def test_a_run_is_seen_while_it_trains_and_at_its_end(
    api: str, page: Page, params: dict[str, Any], tmp_path: Path
) -> None:
    """The page shows headline, curves, ranks and the model's place."""
    workload, saves = "tests.workloads.tiny:Steered", CheckpointParams(every_s=None, every_steps=50)

    def train() -> None:
        with temporary_settings({PREFECT_API_URL: api}):
            train_flow(steered(tmp_path / "steered", checkpoint=saves, **params))

    thread = threading.Thread(target=train)
    thread.start()
    try:
        wait_until(lambda: any("data:image/svg" in str(one.data) for one in pages_of(workload)))
        (live,) = pages_of(workload)
        look(page, api, live.id, "training", "tiny:Steered: training", "Ranks", "Metrics")
    finally:
        (tmp_path / "steered" / "enough").touch()
        thread.join()
    (last,) = pages_of(workload)
    assert last.id == live.id
    seen = "Epochs", "Classes", "Ranks", "Model and checkpoints", "Parameters and options"
    look(page, api, last.id, "finished", "tiny:Steered: finished", "accuracy", *seen)


def test_a_run_that_failed_for_good_shows_the_users_exception(
    api: str, page: Page, params: dict[str, Any]
) -> None:
    """Headline and failures have the exception with its rank, attempt and step."""
    workload = "tests.workloads.tiny"
    fault = {"how": "raise", "step": 5, "rank": 1, "attempts": [1, 2]}
    given = {"workload": workload, "max_restarts": 1, "options": {"fault": fault}}
    with pytest.raises(RankFailedError, match="told to fail"):
        train_flow(TrainParams(**given, **params))
    (last,) = pages_of(workload)
    error = "RankFailedError: rank 1 on", "failed in attempt 2: ValueError: told to fail"
    look(
        page,
        api,
        last.id,
        "failed",
        "tiny: failed in step 5",
        "4 of 21 steps done",
        *error,
        "Attempts",
    )


def test_hostile_names_put_nothing_into_the_page(api: str, page: Page) -> None:
    """Names appear as text in both UIs, without links, outside images or scripts."""
    values = {HOSTILE: [(1, 1.0), (5, 3.0), (9, 2.0)], "loss": [(1, 1.0), (5, 0.7), (9, 0.5)]}
    shown = TrainingProgress(
        status="failed",
        cause=f"```\n{HOSTILE}",
        newest=Progress(9, 1, 10, trouble=HOSTILE),
        metrics={HOSTILE: 1.0},
    )
    record = RunRecord(
        run_id="calm-otter",
        experiment=HOSTILE,
        workload=HOSTILE,
        began=datetime.now(UTC),
        storage=HOSTILE,
        options={HOSTILE: HOSTILE},
    )
    view = RunView(record, shown, curves=Curves(values, holes={HOSTILE: 1}))
    with get_client(sync_client=True) as client:
        writer = ArtifactWriter(client, None, None)
        made = writer.put("markdown", key("report", "hostile"), render_page(view), HOSTILE[:0])
    for scheme, path in zip(SCHEMES, UIS.values(), strict=True):
        page.open(f"{api.removesuffix('/api')}{path}/artifacts/artifact/{made}", scheme)
        page.wait_for(f"document.querySelector('h1') && {PICTURES}.length > 0 && {ARE_DRAWN}")
        page.screenshot(SHOTS / f"hostile-{path.strip('/') or 'v1'}-{scheme}.png")
        assert page.evaluate(LINKS) == []
        assert page.evaluate(IMAGES) == []
        assert page.evaluate("document.title") != "hacked"
        assert "<script>" in page.evaluate("document.body.innerText")
