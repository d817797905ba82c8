"""The manual's site in a real browser: its search finds answers, and pages fit on a phone."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tests.support.browser import Page, browser

pytestmark = [pytest.mark.extended, pytest.mark.timeout(200)]

ROOT = Path(__file__).parents[2]
IS_LOADED = "document.readyState === 'complete' && !!document.querySelector('h1')"
PHONE = 400
ANSWERS = {
    "cancel a run": "resume.html#cancelling",
    "continue with a different number of ranks": (
        "resume.html#continue-on-a-different-number-of-ranks"
    ),
    "move a run to another storage": "storage.html#moving-a-run-to-another-storage",
    "How do I resume last night's run on S3?": "faq.html#how-do-i-resume-last-nights-run-on-s3",
    "which file do I back up": "faq.html#which-file-do-i-back-up",
    "what is a gang": "faq.html#what-is-a-gang-an-attempt-an-agent",
    "run_gang": "api.html#prefect_torch_ddp.run_gang",
    "how often is a checkpoint written": (
        "faq.html#how-often-is-a-checkpoint-written-and-how-do-i-change-that"
    ),
    "wandb": "trackers.html#weights-biases",
    "early stopping": "recipes/early_stopping.html",
    "use 4 GPUs on one machine": (
        "faq.html#how-do-i-use-4-gpus-on-one-machine-or-8-on-each-of-two-machines"
    ),
    "breakpoint in a rank": "faq.html#how-do-i-set-a-breakpoint-in-a-rank",
    "loss of each epoch in pandas": "faq.html#how-do-i-read-the-loss-of-each-epoch-in-pandas",
    "loss is nan": "faq.html#my-loss-is-nan-does-the-training-stop",
    "spot instance": "resume.html#spot-instances",
    "RankFailedError: rank 1 on node-a failed in attempt 2: ValueError: boom": (
        "failures.html#rankfailederror-a-rank-failed"
    ),
    'what does "gang does not grow" mean': "faq.html#why-does-the-gang-not-grow",
    "how to log the gradient norm": "records.html#log-a-metric-such-as-the-gradient-norm",
    "unit test my workload with pytest": "recipes/debugging.html#unit-tests-with-pytest",
    "change the port of the prefect server": "faq.html#do-i-need-a-prefect-server",
    "learning rate scheduler resume": (
        "faq.html#can-i-change-the-learning-rate-or-the-batch-size-when-i-resume"
    ),
    "How do I pass secrets for S3?": "security.html#secrets",
    "ModuleNotFoundError on workers": "faq.html#how-does-my-code-get-to-the-workers",
    "how to delete a failed run": "faq.html#may-i-delete-old-runs",
    "train every night": "faq.html#how-do-i-train-every-night-on-a-schedule",
}
"""What people type, and the section that answers it: in the first page that is found."""
NUMBERS = (
    "0 1357 1415 24 278 29 325 38 39 4 409 45 48 537 54 552 578 5816 594 6001 601 628 6405 658 7 "
    "70 7146 78"
)
"""Of these words, lunr as it comes with the theme loses some."""


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Build the site and serve it; return its URL."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=120)
    handler = partial(_Quiet, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """Run a browser for this module."""
    with browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


def test_the_search_finds_the_page_that_answers(page: Page, site: str) -> None:
    """What people type, in their words, leads to the page that answers it as the first one, and to
    the section within it."""
    for words, answer in ANSWERS.items():
        page.open(f"{site}/index.html", "light")
        page.wait_for(IS_LOADED)
        box = "document.querySelector('.md-search__input')"
        page.evaluate("document.querySelector('[data-md-toggle=search]').checked = true")
        page.evaluate(f"{box}.focus(); {box}.value = {json.dumps(words)}")
        page.evaluate(f"{box}.dispatchEvent(new KeyboardEvent('keyup', {{bubbles: true}}))")
        links = "[...document.querySelectorAll('.md-search-result__link')]"
        page.wait_for(f"{links}.length > 0")
        found = page.evaluate(
            f"{links}.map(a => new URL(a.href)).map(url => url.pathname.slice(1) + url.hash)"
        )
        first = answer.partition("#")[0]
        assert found[0] == first, words
        in_first = found[: next(i for i, each in enumerate(found) if not each.startswith(first))]
        assert answer in in_first[:2], (words, in_first)


def test_the_search_finds_any_numbers(page: Page, site: str) -> None:
    """Whatever numbers the pages have, each is found, and by its first digits too."""
    page.open(f"{site}/index.html", "light")
    page.wait_for(IS_LOADED)
    script = page.evaluate("JSON.parse(document.querySelector('#__config').text).search")
    setup = {
        "config": {"separator": " ", "lang": ["en"], "pipeline": [], "fields": {"text": {}}},
        "docs": [{"location": "numbers.html", "title": "", "text": NUMBERS}],
        "options": {},
    }
    words = [*NUMBERS.split(), "71"]
    page.evaluate(f"""
        const worker = new Worker({json.dumps(script)}), words = {json.dumps(words)};
        window.found = [];
        worker.onmessage = ({{data: {{data}}}}) => {{
            if (data) found.push(data.items.length);
            if (found.length < words.length)
                worker.postMessage({{type: 2, data: words[found.length]}});
        }};
        worker.postMessage({{type: 0, data: {json.dumps(setup)}}});
    """)
    page.wait_for(f"found.length === {len(words)}")
    found = page.evaluate("found")
    assert [word for word, count in zip(words, found, strict=True) if not count] == []


@pytest.mark.parametrize("name", ["index", "storage", "resume", "faq", "options", "api"])
def test_a_page_fits_on_a_phone(page: Page, site: str, name: str) -> None:
    """No page is wider than the screen; wide tables scroll by themselves."""
    page.open(f"{site}/{name}.html", "light", PHONE)
    page.wait_for(IS_LOADED)
    assert page.evaluate("document.documentElement.scrollWidth - window.innerWidth") <= 0


def test_the_first_table_of_storages_is_seen_whole(page: Page, site: str) -> None:
    """The table by which one chooses a storage needs no scrolling on a phone."""
    page.open(f"{site}/storage.html", "light", PHONE)
    page.wait_for(f"{IS_LOADED} && !!document.querySelector('.md-typeset__scrollwrap')")
    wide = "(each => each.scrollWidth - each.clientWidth)"
    assert page.evaluate(f"{wide}(document.querySelector('.md-typeset__scrollwrap'))") <= 0


def test_the_site_follows_the_system(page: Page, site: str) -> None:
    """Who changes the system from light to dark, and back, sees the site so too."""
    for scheme, shown in (("light", "default"), ("dark", "slate"), ("light", "default")):
        page.open(f"{site}/glossary.html", scheme)
        page.wait_for(IS_LOADED)
        page.wait_for(f"document.body.dataset.mdColorScheme === '{shown}'")
