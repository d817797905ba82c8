"""What the process next to a flow feeds to a tracker: the flow's runs, and no others."""

import threading
from datetime import UTC, datetime, timedelta
from typing import ClassVar

import pytest

from prefect_torch_ddp.errors import TrackerError
from prefect_torch_ddp.records.run_record import RunRecord, write_run_record
from prefect_torch_ddp.tracking.trackers import feed as feeding
from prefect_torch_ddp.tracking.trackers.feed import Feed, Feeder, Told
from prefect_torch_ddp.tracking.trackers.sync import Synced
from tests.support.records import Shelf

BEGAN = datetime(2026, 11, 22, 2, tzinfo=UTC)


class Followed:
    """A run that is followed, as the feeder sees one."""

    troubles: ClassVar[dict[str, str]] = {}

    def __init__(self, storage, run_id, tracker, experiment):
        self.run_id, self.tracker, self.is_whole = run_id, tracker, False

    def look(self, *, is_last=False):
        if trouble := self.troubles.get(self.run_id):
            raise TrackerError(trouble)
        return Synced(0, 0, is_completed=False, is_again=False)


class Page:
    """A tracker that has a page."""

    url = "http://tracker/run"


def say(shelf: Shelf, run_id: str, *, flow: str = "flow", began: datetime = BEGAN, **more) -> None:
    """Write a run's record."""
    about = {"experiment": "e", "workload": "w", "storage": "s", "parameters": {"trackers": ["x"]}}
    record = RunRecord(run_id=run_id, began=began, flow_run_id=flow, **{**about, **more})
    write_run_record(shelf, record)


@pytest.fixture(autouse=True)
def followed(monkeypatch: pytest.MonkeyPatch) -> type[Followed]:
    """Follow nothing; the rest is tested with real trackers."""
    monkeypatch.setattr(feeding, "FollowedRun", Followed)
    monkeypatch.setattr(feeding, "open_tracker", lambda *_: Page())
    monkeypatch.setattr(Followed, "troubles", {})
    return Followed


def feeder(shelf: Shelf, told: list[Told]) -> Feeder:
    """Make one for the flow run `flow`."""
    return Feeder(Feed(("x",), shelf, "e", "flow", BEGAN), "x", told.append)


def test_the_runs_of_the_flow_run_are_fed() -> None:
    """Not those of other flow runs, with other trackers, or from before."""
    shelf, told, over = Shelf(), [], threading.Event()
    say(shelf, "ours")
    say(shelf, "of-another-flow-run", flow="other")
    say(shelf, "with-other-trackers", parameters={"trackers": ["x", "y"]})
    say(shelf, "without", parameters={})
    say(shelf, "from-before", began=BEGAN - timedelta(seconds=1))
    over.set()
    feeder(shelf, told).work(over)
    assert told == [
        Told("x", "ours"),
        Told("x", "", is_last=True),
        Told("x", "ours", is_last=True, url=Page.url),
    ]


def test_a_tracker_that_fails_to_open_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """By an error of its package's own, which the flow is told without a password."""
    shelf, told, over = Shelf(), [], threading.Event()
    say(shelf, "ours")
    opened = []

    def opens(*_: object) -> Page:
        opened.append(1)
        if len(opened) == 1:
            msg = "no answer from http://user:hunter2@tracker"
            raise RuntimeError(msg)
        return Page()

    monkeypatch.setattr(feeding, "open_tracker", opens)
    monkeypatch.setattr(over, "wait", lambda _: over.set())
    feeder(shelf, told).work(over)
    trouble, *later = told
    assert trouble.trouble.startswith("RuntimeError: no answer from http://")
    assert "hunter2" not in trouble.trouble
    assert later == [
        Told("x", "ours"),
        Told("x", "", is_last=True),
        Told("x", "ours", is_last=True, url=Page.url),
    ]


def test_news_are_told_once(followed: type[Followed], monkeypatch: pytest.MonkeyPatch) -> None:
    """A trouble, its end, and the last sync."""
    shelf, told, over = Shelf(), [], threading.Event()
    events = iter([lambda: say(shelf, "one"), None, followed.troubles.clear, None, over.set])

    def wait(_: float) -> None:
        if event := next(events):
            event()

    monkeypatch.setattr(over, "wait", wait)
    followed.troubles["one"] = "it is away"
    feeder(shelf, told).work(over)
    assert told == [
        Told("x", ""),
        Told("x", "one"),
        Told("x", "one", "it is away", url=Page.url),
        Told("x", "one", url=Page.url),
        Told("x", "", is_last=True),
        Told("x", "one", is_last=True, url=Page.url),
    ]


def test_a_cut_line_is_left_out() -> None:
    """The process may be killed while it writes."""
    line = b'{"tracker":"x","run_id":"one","trouble":"","is_last":true,"url":""}\n'
    assert list(Told.read(line + line[:20])) == [Told("x", "one", is_last=True)]
    assert not list(Told.read(b""))
