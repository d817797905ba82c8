"""A page as an HTML file: self-contained, and safe from whatever users or ranks wrote."""

import re
from html.parser import HTMLParser

import pytest

from prefect_torch_ddp.tasks.report.markdown import text
from prefect_torch_ddp.tasks.report.page.document import render_document
from prefect_torch_ddp.tasks.report.page.headline import RunView
from prefect_torch_ddp.tasks.report.page.links import Links, report_key, runs_key
from prefect_torch_ddp.tasks.report.page.plot import render_together
from prefect_torch_ddp.tasks.report.page.run_list import render_runs
from prefect_torch_ddp.tasks.report.page.sections import render_page
from prefect_torch_ddp.tasks.report.progress import TrainingProgress
from tests.support.pages import (
    HOSTILE,
    RECORD,
    RUN,
    evaluation,
    hostile_view,
    metric_curves,
    report,
)

ROOT = "s3://bucket/"
EVIL = (
    f"{HOSTILE} <img src=x onerror=alert(1)> <svg onload=alert(1)> [j](javascript:alert(1))"
    " ![i](http://evil.example/i.png) http://evil.example <http://evil.example> &lt;b&gt;"
    " [d](data:text/html,<script>alert(1)</script>) <style>*{display:none}</style> <!-- --> ]]>"
)
TAGS = {
    *["html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "em", "strong", "a"],
    *["code", "pre", "img", "ul", "li", "br", "div"],
    *["table", "thead", "tbody", "tr", "th", "td"],
}


class Reader(HTMLParser):
    """Reads what a browser would find in a file."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self.feed(document)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words += data

    def values(self, tag: str, name: str) -> list[str]:
        return [str(attrs.get(name)) for each, attrs in self.tags if each == tag]


@pytest.mark.parametrize("name", ["error [0,1)", "loss]", "a`b", "![x](y"])
def test_a_picture_is_shown_whatever_its_metric_is_called(name: str) -> None:
    """Its name is no part of the markdown around it."""
    panel = {"run": [(1, 1.0), (2, 2.0), (3, 1.5)]}
    page = Reader(render_document(render_together(name, panel, []), "a sweep"))
    (source,) = page.values("img", "src")
    assert source.startswith("data:image/svg+xml")
    assert not page.values("a", "href")


@pytest.mark.parametrize("links", [Links("http://ui.example", ROOT, "runs/r/report.html"), Links()])
@pytest.mark.parametrize("is_finished", [True, False])
def test_nothing_that_is_written_becomes_html(links: Links, is_finished: bool) -> None:
    """No script, no attribute that runs one, no outside picture, no link but the page's own; all
    of it stands there as words."""
    found = evaluation((EVIL, f"x{EVIL}"), metrics={EVIL: 1.0})
    done = report({EVIL: f"{ROOT}{EVIL}"}, evaluation=found)
    more = {"train_report": done} if is_finished else {}
    view = hostile_view(EVIL, links=links, **more)
    document = render_document(render_page(view), EVIL)
    page = Reader(document)
    assert {tag for tag, _ in page.tags} <= TAGS
    attributes = {name for _, attrs in page.tags for name in attrs}
    assert not [name for name in attributes if name.startswith("on")]
    pictures = page.values("img", "src")
    assert all(each.startswith("data:image/svg+xml;base64,") for each in pictures)
    allowed = re.compile(r"http://ui\.example/runs/flow-run/[^/:]+|(\.\./)*[^/:][^:]*")
    leads = page.values("a", "href")
    assert all(allowed.fullmatch(each) for each in leads), leads
    assert bool(leads) == bool(links.root)
    assert page.words.count("<script>alert(1)</script>") > 10
    assert "default-src 'none'" in document.partition("<title>")[0]


def test_markdown_itself_brings_no_html_and_no_link_that_runs() -> None:
    """Should an escape ever be forgotten."""
    markdown = f"# a\n\n<div onclick=x>\n\n{EVIL}\n\n[v](VBscript:x) [f](file:///etc/passwd)"
    page = Reader(render_document(markdown, "t"))
    assert {tag for tag, _ in page.tags} <= TAGS
    leads = page.values("a", "href")
    assert all(each.startswith("http") for each in leads), leads
    assert page.values("img", "src") == []


def test_a_file_needs_no_other_file_and_fits_a_phone() -> None:
    """Pictures are in it; a wide table scrolls, the page doesn't; both colour schemes are there."""
    page = render_page(RunView(RECORD, TrainingProgress(), curves=metric_curves(loss=[3, 2, 1])))
    document = render_document(page, "digits: <finished>")
    reader = Reader(document)
    assert document.startswith("<!doctype html>")
    assert "<title>digits: &lt;finished&gt;</title>" in document
    assert 'content="width=device-width, initial-scale=1"' in document
    assert "prefers-color-scheme: dark" in document
    assert not {"script", "link", "iframe"} & {tag for tag, _ in reader.tags}
    assert len(reader.values("img", "src")) == 1
    assert document.count('<div class="table"><table>') == document.count("<table>") > 1
    assert "url(" not in document
    joined = render_document(text("me@x.example at http://x.example"), "t")
    assert "me@x.example at http://x.example" in joined, "what is copied is what was written"


def test_a_page_in_a_storage_leads_to_what_lies_near_it() -> None:
    """To the model, the lines, the last run and the list of runs, by relative paths; a page in
    Prefect's UI leads to the flow runs there."""
    flow_run = "0c8d2f0a-0000-4000-8000-000000000000"
    old = RECORD.model_copy(update={"run_id": "old 1", "flow_run_id": flow_run})
    trains, done = (old.model_copy(update={"state": state}) for state in ("training", "completed"))
    in_file = Links("http://ui/", ROOT, report_key(RUN))
    assert in_file.run(done) == "[old 1](../old%201/report.html)"
    assert in_file.run(trains) == "`old 1`", "it has no report yet"
    place = f"{ROOT}runs/{RUN}/models/000002/a(b).pt"
    assert in_file.location(place) == f"[`{place}`](models/000002/a%28b%29.pt)"
    assert in_file.location(f"{ROOT}runs/{RUN}/logs/").endswith("](logs/)")
    assert in_file.location("s3://other/runs/x") == "`s3://other/runs/x`"
    folder = "run-records/train-ddp-nightly-flows-digits"
    assert in_file.runs(RECORD) == f"../../{folder}/runs.html"
    in_list = Links("", ROOT, runs_key(RECORD))
    assert in_list.run(done) == "[old 1](../../runs/old%201/report.html)"
    in_ui = Links("http://ui/")
    assert in_ui.run(trains) == f"[old 1](http://ui/runs/flow-run/{flow_run})"
    assert (in_ui.location(place), in_ui.runs(RECORD)) == (f"`{place}`", "")
    assert Links().run(done) == "`old 1`"


def test_the_list_of_runs_has_the_last_20_with_their_scores() -> None:
    """Whatever state they are in; the score is the evaluation's, else the training's.

    A failed run's last loss was its score; it had one if it was the best of its checkpoints.
    """
    found = evaluation()
    kept = {"best_metric": "val_loss", "best_value": 1.5}
    failed = RECORD.model_copy(
        update={"run_id": "failed", "state": "failed", "metrics": {"loss": 2.5}}
    )
    records = [
        RECORD.model_copy(update={"run_id": "new", "state": "completed", "evaluation": found}),
        failed,
        failed.model_copy(update={"run_id": "kept", **kept}),
        failed.model_copy(update={"run_id": "task", "state": "completed"}),
        RECORD.model_copy(update={"commit": "0123456789abcdef", "is_dirty": False}),
    ]
    page = render_runs(records, Links())
    assert page.startswith("# Runs of train-ddp/nightly/flows.digits\n")
    rows = [row for row in page.splitlines() if row.startswith("| `")]
    assert rows == [
        "| `new` | completed | accuracy 0.875 | 2026-11-22 02:00 |  | `abc123-dirty` |",
        "| `failed` | failed |  | 2026-11-22 02:00 |  | `abc123-dirty` |",
        "| `kept` | failed | val_loss 1.5 | 2026-11-22 02:00 |  | `abc123-dirty` |",
        "| `task` | completed | loss 2.5 | 2026-11-22 02:00 |  | `abc123-dirty` |",
        f"| `{RUN}` | training |  | 2026-11-22 02:00 |  | `0123456789` |",
    ]
    assert render_runs(records[:1] * 50, Links()).count("\n| `new`") == 20
