"""What a tracker is told of a run, and when: each step once, whoever is killed."""

import json
import math
import sys
from collections import defaultdict

import pytest

from prefect_torch_ddp.checkpoint.keys import manifest_key
from prefect_torch_ddp.errors import InvalidParamsError, TrackerError
from prefect_torch_ddp.records.run_record import RunRecord
from prefect_torch_ddp.results import Report
from prefect_torch_ddp.tracking.trackers import mlflow_tracker, sync
from prefect_torch_ddp.tracking.trackers.facts import evaluated, given, series_names
from prefect_torch_ddp.tracking.trackers.follow import follow_run
from prefect_torch_ddp.tracking.trackers.history import HistoryReader, Mark
from prefect_torch_ddp.tracking.trackers.known import open_tracker
from prefect_torch_ddp.tracking.trackers.sync import sync_run
from prefect_torch_ddp.tracking.trackers.tracker import TrackerPosition
from tests.support.records import Shelf, record
from tests.support.reported import BEGAN, RUN, checkpoint, history, put, resume, say, steps_of

ABOUT = {"run_id": RUN, "experiment": "e", "workload": "w", "storage": "s"}


class KilledError(Exception):
    """The process that synced was killed."""


class Book:
    """A tracker in memory that can't delete a point, and a kill before or after a call."""

    name, url, is_written_anew = "the book", "", False

    def __init__(self) -> None:
        self.mark: Mark | None = None
        self.series = defaultdict(list)
        self.set_aside = []
        self.described = []
        self.num_left = sys.maxsize
        """Moments before and after calls until the kill."""
        self.is_away = False

    def open(self, record, metrics):
        self._strike()
        last = {name: max(points)[0] for name, points in self.series.items() if name in metrics}
        return TrackerPosition(self.mark, last)

    def begin_again(self, record):
        self._strike()
        self.set_aside.append(dict(self.series))
        self.series, self.mark = defaultdict(list), None
        self._strike()

    def put_mark(self, mark):
        self._strike()
        self.mark = mark
        self._strike()

    def send(self, points):
        self._strike()
        for each in points:
            self.series[each.metric].append((each.step, each.value))
        self._strike()

    def describe(self, record):
        self._strike()
        self.described.append(record.state)

    def _strike(self) -> None:
        if self.is_away:
            msg = "the book is away"
            raise TrackerError(msg)
        self.num_left -= 1
        if self.num_left < 0:
            raise KilledError


def sent(book: Book) -> list[int]:
    """Return the steps that the book has."""
    return [step for step, _ in book.series["loss"]]


@pytest.fixture
def shelf() -> Shelf:
    """Make a run that trained ten steps, with a checkpoint at the sixth."""
    shelf = Shelf()
    say(shelf)
    put(shelf, 1, *steps_of(1, 1, 10))
    checkpoint(shelf, 6)
    return shelf


@pytest.mark.parametrize("state", ["training", "failed", "cancelled"])
def test_steps_from_the_newest_checkpoint_on_wait(shelf: Shelf, state: str) -> None:
    """A resume may report them again, also of a run that failed; a completed training has none."""
    book = Book()
    say(shelf, state)
    done = sync_run(shelf, RUN, book)
    assert (done.num_sent, done.step, sent(book)) == (10, 5, [1, 2, 3, 4, 5])
    say(shelf, "completed")
    assert sync_run(shelf, RUN, book).step == 10
    assert book.series == history(shelf)
    assert book.described == [state, "completed"]
    assert sync_run(shelf, RUN, book).num_sent == 0


@pytest.mark.parametrize(
    ("position", "last"),
    [
        ({"num_own_numbers": 2}, 3),
        ({"in_own_loop": True, "num_own_numbers": 6}, 0),
        ({"in_own_loop": True, "num_own_numbers": 6, "folder": ""}, 5),
    ],
)
def test_a_checkpoints_number_may_be_none_of_a_step(
    shelf: Shelf, position: dict[str, object], last: int
) -> None:
    """Outside of `ctx.steps` it isn't; `ctx.commit` is given the step."""
    checkpoint(shelf, 6, **position)
    book = Book()
    sync_run(shelf, RUN, book)
    assert sent(book) == list(range(1, last + 1))


def test_what_was_rolled_back_was_never_sent(shelf: Shelf) -> None:
    """Attempt 2 resumes from step 6, where code reports before the first step, and makes the
    steps after it again."""
    book = Book()
    sync_run(shelf, RUN, book)
    resume(shelf, 2, 6, 1)
    put(shelf, 2, record(6, 0, 2, num_samples=0, val_loss=0.5, loss=9.0), *steps_of(2, 7, 12))
    sync_run(shelf, RUN, book)
    assert sent(book) == [1, 2, 3, 4, 5]
    checkpoint(shelf, 12, 2)
    say(shelf, "completed")
    sync_run(shelf, RUN, book)
    assert {name: sorted(points) for name, points in book.series.items()} == history(shelf)
    assert [step for step in sent(book) if step == 6] == [6, 6], "of both attempts"
    assert not book.set_aside


@pytest.mark.parametrize("num_points", [1, 3, 1000])
def test_a_sync_may_be_killed_anywhere(
    shelf: Shelf, num_points: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed before and after each call to the tracker, each time that it gets further."""
    monkeypatch.setattr(sync, "MAX_POINTS", num_points)
    resume(shelf, 2, 6, 1)
    put(shelf, 2, record(6, 0, 2, num_samples=0, loss=9.0), *steps_of(2, 7, 12))
    say(shelf, "completed")
    book, num_kills = Book(), 0
    while True:
        book.num_left = num_kills % 7
        try:
            sync_run(shelf, RUN, book)
        except KilledError:
            num_kills += 1
        else:
            break
    assert num_kills >= 3
    assert {name: sorted(points) for name, points in book.series.items()} == history(shelf)


@pytest.mark.parametrize("num_calls", range(12))
def test_steps_that_are_taken_back_after_all_begin_another_run(
    shelf: Shelf, num_calls: int
) -> None:
    """The newest checkpoint is damaged: a resume from the one before it takes back what was
    final. The tracker's run is set aside, also if that sync is killed."""
    checkpoint(shelf, 3)
    book = Book()
    sync_run(shelf, RUN, book)
    first = dict(book.series)
    shelf.write(manifest_key(RUN, 6, 1), b"{}")
    resume(shelf, 2, 3, 1)
    put(shelf, 2, *steps_of(2, 4, 9))
    checkpoint(shelf, 9, 2)
    book.num_left = num_calls
    try:
        is_again = sync_run(shelf, RUN, book).is_again
    except KilledError:
        is_again = None
    book.num_left = sys.maxsize
    sync_run(shelf, RUN, book)
    assert is_again in (None, True)
    assert book.set_aside == [first]
    assert sent(book) == list(range(1, 9))
    assert all(point in history(shelf)["loss"] for point in book.series["loss"])


def test_a_damaged_checkpoint_alone_takes_nothing_back(shelf: Shelf) -> None:
    """Until a training resumes from an older one, the history is as it was."""
    book = Book()
    sync_run(shelf, RUN, book)
    shelf.write(manifest_key(RUN, 6, 1), b"{}")
    done = sync_run(shelf, RUN, book)
    assert (done.num_sent, done.is_again, HistoryReader(shelf, RUN).read().end) == (0, False, 0)
    assert sent(book) == [1, 2, 3, 4, 5]


def test_a_run_without_metrics_is_described(shelf: Shelf) -> None:
    """It has no step yet."""
    bare, book = Shelf(), Book()
    say(bare)
    assert sync_run(bare, RUN, book).step == -1
    assert book.described == ["training"]
    with pytest.raises(InvalidParamsError, match="there is no record of run 'other'"):
        sync_run(shelf, "other", book)


def test_unknown_and_missing_trackers_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is read or sent."""
    with pytest.raises(InvalidParamsError, match="no tracker mlfow; did you mean mlflow"):
        open_tracker("mlfow", Shelf())
    for name in ("mlflow", "tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InvalidParamsError, match=r"`pip install mlflow-skinny`.*extra `trackers`"):
        open_tracker("mlflow", Shelf())
    with pytest.raises(InvalidParamsError, match=r"tensorboard.*its extra `tensorboard`"):
        open_tracker("tensorboard", Shelf())


def test_mlflow_names_that_would_be_the_same_are_refused() -> None:
    """MLflow takes fewer characters; two metrics in one series would be a lie."""
    named = mlflow_tracker._allowed_name
    assert series_names("MLflow", ["acc@1", "val/loss"], named) == {
        "acc@1": "acc_1",
        "val/loss": "val/loss",
    }
    with pytest.raises(TrackerError, match="several metrics 'acc_1': acc@1, acc#1"):
        series_names("MLflow", ["acc@1", "acc#1"], named)


def test_mlflow_parameters_that_would_be_the_same_are_told_apart() -> None:
    """A name that needs no change is kept; the others are numbered, in the same order at each
    sync. MLflow refused them, and with them all parameters of the run."""
    long = "x" * 300
    table = {"<": 0, ">": 1, "_": 2, "_.2": 3}
    values = {"table": table, f"{long}a": 4, f"{long}b": 5}
    names = {
        "options.table._": "2",
        "options.table._.2": "3",
        "options.table._.3": "0",
        "options.table._.4": "1",
        f"options.{long}"[:250]: "4",
        f"options.{long}"[:248] + ".2": "5",
    }
    backwards = {**dict(reversed(values.items())), "table": dict(reversed(table.items()))}
    for options in (values, backwards):
        run = RunRecord(**ABOUT, began=BEGAN, options=options)
        found = dict(mlflow_tracker._params(run))
        assert {name: found[name] for name in found if name.startswith("options.")} == names


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("/loss", "_loss"), ("loss/", "loss_"), ("a//b", "a__b"), ("", "_"), ("../b", "___b")],
)
def test_mlflow_names_that_are_no_plain_paths_are_changed(ours: str, theirs: str) -> None:
    """MLflow refuses them, and with them all metrics of the run."""
    assert mlflow_tracker._allowed_name(ours) == theirs


@pytest.mark.parametrize("ours", ["val/loss", "a.b", "a/..b", "_loss", ".a", "layer.0/norm"])
def test_other_mlflow_names_are_kept(ours: str) -> None:
    """Points may have been sent by them before."""
    assert mlflow_tracker._allowed_name(ours) == ours


def test_scores_that_a_tracker_would_call_the_same_are_told_apart() -> None:
    """A score gets the prefix once more if a metric or an earlier score has its name there; one
    whose name the tracker doesn't change keeps it."""
    scores = {"acc@1": 0.5, "acc_1": 0.25, "acc#1": 0.125, "mae": 1.0}
    evaluation = Report(num_samples=8, metrics=scores)
    run = RunRecord(**ABOUT, began=BEGAN, evaluation=evaluation)
    assert evaluated(run, ["evaluation/mae", "loss"], mlflow_tracker._allowed_name) == {
        "evaluation/acc_1": 0.25,
        "evaluation/evaluation/acc_1": 0.5,
        "evaluation/evaluation/evaluation/acc_1": 0.125,
        "evaluation/evaluation/mae": 1.0,
    }


def test_a_run_is_followed_until_it_has_completed(shelf: Shelf) -> None:
    """Each checkpoint, and the end, is sent when it is there; nothing is sent in between."""
    book, news, done = Book(), [], []

    def another_checkpoint() -> None:
        checkpoint(shelf, 9)

    def a_failure() -> None:
        say(shelf, "failed", is_tried_again=True)

    def an_outage_and_the_end() -> None:
        book.is_away = True
        say(shelf, "completed")

    def the_tracker_again() -> None:
        book.is_away = False

    events = iter(
        [None, another_checkpoint, None, a_failure, an_outage_and_the_end, the_tracker_again]
    )

    def wait(_: float) -> None:
        if (event := next(events)) is not None:
            event()
        news.append(sent(book)[-1])

    follow_run(shelf, RUN, book, wait=wait, on_synced=lambda synced: done.append(synced.num_sent))
    assert news == [5, 5, 8, 8, 8, 8]
    assert done == [10, 6, 0, 4]
    assert book.series == history(shelf)
    assert next(events, None) is None


def test_floats_that_json_lacks_are_texts_in_trackers() -> None:
    """W&B writes `Infinity` into its JSON, which no other reader takes, and null for NaN."""
    options = {"clip": math.inf, "bounds": [math.nan], "missing": "NaN"}
    told = given(RunRecord(**ABOUT, began=BEGAN, options=options, seed=3))
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    expected = {"clip": "Infinity", "bounds": ["NaN"], "missing": "(text) NaN"}
    assert (told["options"], told["seed"]) == (expected, 3)
