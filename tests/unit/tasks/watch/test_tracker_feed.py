"""A flow run feeds its trackers once for each task, and only as long as it lives."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from prefect_dask import DaskTaskRunner

from prefect_torch_ddp.params import ContextParams
from prefect_torch_ddp.tasks.watch import tracker_feed
from prefect_torch_ddp.tasks.watch.tracker_feed import _Feeds
from tests.support.records import Shelf


def test_each_flow_run_has_its_own_feeds_and_each_of_them_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two flow runs may be open in a process; each ends its own."""
    said, params = [], ContextParams(trackers=["tensorboard"])

    @contextmanager
    def fed(_: ContextParams, storage: Shelf, experiment: str) -> Iterator[None]:
        said.append(f"begin {storage.uri} {experiment}")
        yield
        said.append(f"end {storage.uri} {experiment}")

    monkeypatch.setattr(tracker_feed, "trackers_fed", fed)
    with DaskTaskRunner() as outer:
        _Feeds.of(outer).begin(params, Shelf(uri="s3://a"), "fit")
        _Feeds.of(outer).begin(params, Shelf(uri="s3://a"), "fit")
        with outer.duplicate() as inner:
            _Feeds.of(inner).begin(params, Shelf(uri="s3://a"), "fit")
            _Feeds.of(inner).begin(params, Shelf(uri="s3://b"), "fit")
        _Feeds.of(outer).begin(params, Shelf(uri="s3://a"), "score")
    begun, ended = [f"begin s3://a {each}" for each in ("fit", "score")], ["end s3://a fit"]
    inner_said = ["begin s3://a fit", "begin s3://b fit", "end s3://b fit", "end s3://a fit"]
    assert said == [begun[0], *inner_said, begun[1], "end s3://a score", *ended]
    with outer:
        _Feeds.of(outer).begin(params, Shelf(uri="s3://a"), "fit")
    assert said[-2:] == [begun[0], *ended]
