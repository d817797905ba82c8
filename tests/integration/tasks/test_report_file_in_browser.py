"""A real browser shows the report's file on a phone and a wide screen, light and dark."""

import contextlib
import math
from pathlib import Path

import psutil
import pytest

from prefect_torch_ddp.results import Goodput
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.tasks.report.curves import Curves
from prefect_torch_ddp.tasks.report.page.headline import RunView
from prefect_torch_ddp.tasks.report.page.links import Links
from prefect_torch_ddp.tasks.report.progress import TrainingProgress
from prefect_torch_ddp.tasks.report.report_file import ReportFile
from tests.support.browser import Page, Scheme, browser
from tests.support.pages import RECORD, evaluation, hostile_view, report
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.extended, pytest.mark.timeout(200)]

SHOTS = Path(__file__).parents[3] / "build" / "screenshots"
WIDTHS = {"phone": 390, "wide": 1280}
SCHEMES: tuple[Scheme, ...] = ("light", "dark")
NAMES = [f"class {i}" for i in range(10)]
MATRIX = tuple(tuple(90 if i == j else (i * j) % 4 for j in range(10)) for i in range(10))
EVIL = (
    "<script>document.title='hacked'</script><img src=x onerror=\"document.title='hacked'\">"
    "<svg onload=\"document.title='hacked'\"> [a](javascript:document.title='hacked')"
    " ![i](//evil.example/i.png) http://evil.example | ` ** ~~~"
)
DRAWN = "[...document.images].every(i => i.complete && i.naturalWidth > 300)"
OVERFLOW = "document.documentElement.scrollWidth - window.innerWidth"
IS_LOADED = "document.readyState === 'complete' && !!document.querySelector('h1')"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory):
    """Run a browser for this module."""
    with browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


def views() -> dict[str, RunView]:
    """Make pages of a run that finished and of one that failed."""
    steps = range(1, 401)
    noise = {step: 0.1 * math.sin(step * 12.9898) for step in steps}
    curves = Curves(
        {
            "loss": [(step, 2.3 * math.exp(-step / 80) + noise[step]) for step in steps],
            "val_loss": [(40 * k, 2.2 * math.exp(-k / 2) + 0.2) for k in range(1, 11)],
            "val_accuracy": [(40 * k, 1 - 0.9 * math.exp(-k / 3)) for k in range(1, 11)],
            "learning_rate": [(step, 0.1 * (1 - step / 400)) for step in steps],
            "samples/s": [(step, 900 + 400 * noise[step]) for step in steps],
        },
        epoch_ends=[40 * k for k in range(1, 11)],
        resumes={2: 200},
        last={"loss": 0.12, "val_loss": 0.21, "val_accuracy": 0.97},
    )
    old = [
        RECORD.model_copy(
            update={
                "run_id": f"brave-heron-{i}2345678",
                "state": "completed" if i else "failed",
                "began": RECORD.began.replace(day=21 - i),
                "evaluation": evaluation(accuracy=0.86 + i % 3 / 100),
                "metrics": {"val_accuracy": 0.95},
            }
        )
        for i in range(9)
    ]
    saved = report().checkpoint
    record = RECORD.model_copy(update={"checkpoint": saved})
    parts = {f"{name}_s": 20.0 for name in ("redone", "starting", "restoring", "checkpoints")}
    parts |= {f"{name}_s": 9.0 for name in ("validation", "queueing", "data", "other")}
    more = {
        "curves": curves,
        "previous": old[1],
        "earlier": old,
        "logs": f"{RECORD.storage}/runs/{RECORD.run_id}/logs",
        "links": Links("http://127.0.0.1:4200"),
        "goodput": Goodput(run_id="r", num_attempts=2, wall_s=300.0, steps_s=184.0, **parts),
    }
    found = report(evaluation=evaluation(NAMES, MATRIX))
    done = RECORD.model_copy(update={"state": "completed", "evaluation": found.evaluation})
    failed = TrainingProgress(4, 2, "failed", "RankFailedError: rank 1 on node-7 failed\n  boom")
    failed.settle(400, 10)
    failed.metrics = dict(curves.last)
    stopped = record.model_copy(update={"state": "failed"})
    return {
        "finished": RunView(done, TrainingProgress(4, 2, "finished"), train_report=found, **more),
        "failed": RunView(stopped, failed, **more),
    }


def write(folder: Path, view: RunView) -> Path:
    """Write a report as a run does; return the file."""
    file = ReportFile(DirectoryStorage(folder), view).start()
    assert file.join() == ""
    return Path(file.uri)


@pytest.mark.parametrize("name", ["finished", "failed"])
def test_a_report_is_read_on_any_screen(page: Page, tmp_path: Path, name: str) -> None:
    """All pictures are drawn, only tables and code are wide, and a phone shows the cause first."""
    view = views()[name]
    path = write(tmp_path, view)
    brightness = {}
    for size, width in WIDTHS.items():
        for scheme in SCHEMES:
            page.open(path.as_uri(), scheme, width)
            page.wait_for(f"{IS_LOADED} && document.images.length >= 4 && {DRAWN}")
            page.screenshot(SHOTS / f"file-{name}-{size}-{scheme}.png", is_whole=True)
            assert page.evaluate(OVERFLOW) <= 0
            assert page.evaluate("window.innerWidth") == width
            colour = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"
            brightness[scheme] = sum(page.evaluate(colour))
    assert brightness["light"] > 700
    assert brightness["dark"] < 150
    if name == "failed":
        page.open(path.as_uri(), "light", WIDTHS["phone"])
        page.wait_for(IS_LOADED)
        top = "[...document.querySelectorAll('pre')][1].getBoundingClientRect().bottom"
        assert page.evaluate(top) < 800
    links = page.evaluate("[...document.links].map(link => link.getAttribute('href'))")
    assert "logs/" not in links, "another storage's places are no links"
    assert any(link.startswith("../../run-records/") for link in links)
    target = next(link for link in links if link.startswith("../../run-records/"))
    assert (path.parent / target).resolve().is_file()
    page.open((path.parent / target).resolve().as_uri(), "light", WIDTHS["phone"])
    page.wait_for(f"{IS_LOADED} && document.querySelectorAll('tr').length === 11")
    page.screenshot(SHOTS / f"runs-{name}.png", is_whole=True)
    assert page.evaluate(OVERFLOW) <= 0


def test_a_hostile_report_runs_nothing(page: Page, tmp_path: Path) -> None:
    """The page has no foreign script, event, link or picture."""
    view = hostile_view(EVIL)
    plain = view.record.model_copy(update={"run_id": "calm-otter"})
    changes = {"record": plain, "links": Links(), "previous": None, "earlier": ()}
    path = write(tmp_path, RunView(**{**vars(view), **changes}))
    page.open(path.as_uri(), "dark")
    page.wait_for(f"{IS_LOADED} && {DRAWN}")
    page.screenshot(SHOTS / "file-hostile.png", is_whole=True)
    assert page.evaluate("document.title") != "hacked"
    assert page.evaluate("document.scripts.length") == 0
    links = "[...document.links].filter(l => /evil|javascript/.test(l.protocol + l.host)).length"
    assert page.evaluate(links) == 0
    outside = "[...document.images].filter(i => !i.src.startsWith('data:image/svg+xml')).length"
    assert page.evaluate(outside) == 0
    assert "document.title='hacked'" in page.evaluate("document.body.innerText")


def test_a_browser_may_start_its_services_in_a_test(page: Page, tmp_path: Path) -> None:
    """A service that a shared browser starts late, as on a slow machine, is no leak of a test."""

    def services() -> set[psutil.Process]:
        found = psutil.Process().children(recursive=True)
        return {each for each in found if "network.mojom.NetworkService" in " ".join(command(each))}

    def command(process: psutil.Process) -> list[str]:
        with contextlib.suppress(psutil.Error):
            return process.cmdline()
        return []

    wait_until(services)
    before = services()
    for service in before:
        service.kill()
    page.open(write(tmp_path, views()["finished"]).as_uri(), "light")
    page.wait_for(IS_LOADED)
    wait_until(lambda: services() - before)
