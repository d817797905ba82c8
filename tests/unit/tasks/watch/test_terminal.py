"""What the terminal shows, without one: when it takes a bar, and what a narrow one leaves out."""

import io

import pytest

from prefect_torch_ddp.protocol.events import AttemptBegan, Progress, Waiting
from prefect_torch_ddp.tasks.report.progress import TrainingProgress
from prefect_torch_ddp.tasks.watch import terminal
from prefect_torch_ddp.tasks.watch.terminal import Display, Teller, fitted, mode


class Screen(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("changes", "is_terminal", "expected"),
    [
        ({}, True, "bar"),
        ({}, False, "lines"),
        ({"FORCE_COLOR": "1"}, False, "lines"),
        ({"NO_COLOR": "1"}, True, "lines"),
        ({"TERM": "dumb"}, True, "lines"),
        ({"CI": "true"}, True, "lines"),
    ],
)
def test_a_bar_only_where_a_person_looks(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], is_terminal: bool, expected: str
) -> None:
    """NO_COLOR, dumb terminals, CI and everything that is no terminal get plain lines."""
    for name in ("NO_COLOR", "CI"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"TERM": "xterm", **changes}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stderr", Screen() if is_terminal else io.StringIO())
    assert mode() == expected


def test_a_narrow_terminal_keeps_the_position_and_the_time_left() -> None:
    """What matters less goes first; a text without parts stays."""
    line = "epoch 3/10 · step 120/400 · loss 0.31 · 812 samples/s · 4 min left"
    assert fitted(line, 80) == line
    assert fitted(line, 50) == "epoch 3/10 · step 120/400 · loss 0.31 · 4 min left"
    assert fitted(line, 10) == "epoch 3/10 · step 120/400 · 4 min left"
    assert fitted("waiting for workers", 5) == "waiting for workers"


def test_a_task_called_in_the_flows_process_shows_attempts_and_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which attempt, and what a metric's name holds, as text: no escape code of a user's."""
    monkeypatch.setattr(terminal, "TELL_EVERY_S", 0.0)
    training = TrainingProgress()
    with Display("fit") as display:
        teller = Teller(training)
        said = []
        for event in (
            Waiting("waiting for workers: 3 of 8 after 4 s (limit 60 s)"),
            AttemptBegan(2, 4),
            Progress(40, 1, 400),
        ):
            if isinstance(event, AttemptBegan):
                training.begin_attempt(event)
            elif isinstance(event, Progress):
                training.add(event, 0.0)
                training.metrics = {"loss\x1b[2J": 0.5}
            teller.receive(event)
            said.append(display._as_line())
    assert said[0] == "fit: waiting for workers: 3 of 8 after 4 s (limit 60 s)"
    assert said[1].startswith("fit: attempt 2 · 4 ranks · ")
    assert said[2] == "fit: 10 % · attempt 2 · epoch 1 · step 40/400 · loss [2J 0.5"
