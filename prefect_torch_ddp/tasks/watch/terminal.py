"""Progress where the flow runs: a bar in a terminal or a notebook, plain lines elsewhere.

A task reports its progress through Dask's events, at most once a second. The flow that waits for it
shows the progress. Neither leaves anything open.
"""

import logging
import os
import sys
import threading
import time
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from typing import Any, Literal, Self
from uuid import UUID

from distributed import Client, Worker, get_worker
from prefect.context import TaskRunContext
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from prefect_torch_ddp.protocol.events import AttemptBegan, GangEvent, LogLine, Progress, Waiting
from prefect_torch_ddp.tasks.cancel.api import run_logger
from prefect_torch_ddp.tasks.report.markdown import duration
from prefect_torch_ddp.tasks.report.progress import TrainingProgress
from prefect_torch_ddp.tasks.watch.task_watch import ANSWER_S, answer_of

TOPIC = "prefect-torch-ddp-progress"
"""One for all runs: a scheduler keeps the last events of each topic for as long as it lives."""
TELL_EVERY_S = 0.75
"""Less than the second after which ranks tell their progress, which would else be left out."""
LINE_EVERY_S = 10.0
REFRESHES_PER_S = 4.0
TEXT_COLUMNS = 92
"""What all but the bar takes; the bar gets the rest of the terminal's width, 8 to 30."""
MIN_PARTS = 3
"""Of `attempt 2 · epoch 3 · step 120 · loss 0.31 · 812 samples/s · 4 min left` the first ones
and the last one stay in a narrow terminal."""
ERASE_LINE = "\r\x1b[2K"

_one_at_a_time = threading.Lock()


class Teller:
    """Tells the flow that waits for this task how far it is. Made in the task's thread."""

    def __init__(self, training: TrainingProgress | None = None) -> None:
        """Tell that the task has begun.

        Args:
            training: of which each event says how far it is.
        """
        self._training = training
        self._next_s = 0.0
        context = TaskRunContext.get()
        self._task_run = str(context.task_run.id) if context else ""
        self._worker: Worker | None = None
        with suppress(ValueError):  # it is called in the flow's own process
            self._worker = get_worker()
            log_above_bar()  # the worker may have the flow's terminal
        self._tell("")

    def receive(self, event: GangEvent) -> None:
        """Take in what the gang says; costs microseconds."""
        training = self._training
        if isinstance(event, AttemptBegan):
            self._next_s = 0.0
            ranks = "1 rank" if event.world_size == 1 else f"{event.world_size} ranks"
            self._tell(f"attempt {event.attempt} · {ranks}" if event.attempt > 1 else ranks)
        elif isinstance(event, Waiting):
            self._tell(event.text)
        elif isinstance(event, Progress) and training and time.monotonic() >= self._next_s:
            attempt = f"attempt {training.attempt} · " if training.attempt > 1 else ""
            self._tell(f"{attempt}{training.line}", training.percent)

    def show(self, line: str, percent: float) -> None:
        """Tell how far a task is that doesn't train; costs microseconds."""
        self._tell(line, percent)

    def _tell(self, line: str, percent: float | None = None) -> None:
        if time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + TELL_EVERY_S
        news = {"task_run": self._task_run, "line": line, "percent": percent}
        if self._worker is not None:
            self._worker.log_event(TOPIC, news)
        elif Display.current is not None:
            Display.current.hear((0.0, news))
            Display.current.turn()


class Display:
    """Shows one stage of a run while a thread waits for it; of several at a time, the first.

    A context manager: `turn` is called about once a second, and at the end nothing is left.
    """

    current: "Display | None" = None
    """The one that is shown in this process."""

    def __init__(
        self, stage: str, client: Client | None = None, task_run_id: UUID | None = None
    ) -> None:
        """Show a stage by name, and what this task run tells through the client's cluster."""
        self.has_news = False
        """Whether the task has told anything, and so has begun."""
        self._stage, self._client, self._task_run = stage, client, str(task_run_id or "")
        self._line = ""
        self._percent: float | None = None
        self._mode = mode()
        self._stack = ExitStack()
        self._console = Console(stderr=True)
        self._shown: Any = None
        self._started_s = self._last_line_s = time.monotonic()

    def __enter__(self) -> Self:
        if _one_at_a_time.acquire(blocking=False):
            Display.current = self
            try:
                self._listen()
            except BaseException:  # Ctrl-C: nobody leaves what wasn't entered
                self.__exit__()
                raise
        return self

    def _listen(self) -> None:
        with suppress(Exception):  # the client may be closed: who waits finds out
            if self._client is not None:
                self._client.subscribe_topic(TOPIC, self.hear)
                # What it told while the flow waited for another.
                scheduler: Any = self._client.scheduler
                told = self._client.sync(lambda: answer_of(scheduler.events(topic=TOPIC), ANSWER_S))
                for event in told or ():
                    self.hear(event)

    @property
    def is_shown(self) -> bool:
        """Whether it is the one that is shown."""
        return Display.current is self

    def __exit__(self, *_: object) -> None:
        if not self.is_shown:
            return
        try:
            with suppress(Exception):  # the terminal may be gone
                self._stack.close()
            with suppress(Exception):  # the scheduler, too
                if self._client is not None:
                    self._client.unsubscribe_topic(TOPIC)
        finally:
            Display.current = None
            _one_at_a_time.release()

    def hear(self, event: tuple[float, Any]) -> None:
        """Take in what a task tells; comes in a thread of Dask's."""
        if event[1]["task_run"] == self._task_run:
            self.has_news = True
            self._percent = event[1]["percent"]
            self.show(event[1]["line"])

    def take(self, event: GangEvent) -> None:
        """Show what the task waits for before it has begun, and log it to the run."""
        if isinstance(event, Waiting):
            self.show(event.text)
        elif isinstance(event, LogLine):
            run_logger().log(event.level, "%s", event.text)

    def show(self, line: str) -> None:
        """Take a line, whose control characters are none of the terminal's business."""
        self._line = "".join(each if each.isprintable() else " " for each in line)

    def turn(self) -> None:
        """Show what is known, if it isn't shown by itself; a thread that waits calls this."""
        with suppress(Exception):  # a display that fails doesn't hurt the run
            if self.is_shown:
                ways = {"lines": self._log, "notebook": self._update_cell, "bar": self._begin}
                ways[self._mode]()

    def _log(self) -> None:
        if time.monotonic() - self._last_line_s >= LINE_EVERY_S:
            self._last_line_s = time.monotonic()
            # Only for the console: the run's log has its own.
            run_logger().info("%s", self._as_line(), extra={"send_to_api": False})

    def _update_cell(self, text: str | None = None) -> None:
        from IPython.display import display  # noqa: PLC0415 - only there in a notebook

        data = {"text/plain": self._as_line() if text is None else text}
        if self._shown is None:
            self._shown = display(data, raw=True, display_id=True)
            self._stack.callback(self._update_cell, "")
        else:
            self._shown.update(data, raw=True)

    def _begin(self) -> None:
        if self._shown is None:
            log_above_bar()
            self._shown = self._stack.enter_context(
                Live(
                    get_renderable=self._bar,
                    console=self._console,
                    refresh_per_second=REFRESHES_PER_S,
                    transient=True,
                    redirect_stdout=_takes_bar(sys.stdout),  # what goes into a file stays there
                )
            )

    def _as_line(self) -> str:
        percent = "" if self._percent is None else f"{self._percent:.0f} % · "
        return f"{self._stage}: {percent}{self._text()}"

    def _text(self) -> str:
        if self._percent is not None or self._line.startswith("waiting"):
            return self._line
        seconds = time.monotonic() - self._started_s
        elapsed = duration(seconds) if seconds >= 10 else f"{seconds:.0f} s"  # noqa: PLR2004
        return f"{self._line} · {elapsed}" if self._line else elapsed

    def _bar(self) -> Table:
        """Lay out one line: everything that erases the bar erases one."""
        width = max(8, min(30, self._console.width - TEXT_COLUMNS))
        percent = "" if self._percent is None else f"{self._percent:3.0f} %"
        room = self._console.width - width - len(self._stage) - len(percent) - 4
        grid = Table.grid(padding=(0, 1))
        for _ in range(4):
            grid.add_column(no_wrap=True, overflow="ellipsis")
        total = None if self._percent is None else 100.0
        bar = ProgressBar(total=total, completed=self._percent or 0.0, width=width)
        grid.add_row(Text(self._stage), bar, Text(percent), Text(fitted(self._text(), room)))
        return grid


def display_here() -> AbstractContextManager[Display | None]:
    """Show this task if no flow waits for it: it was called, not submitted."""
    with suppress(ValueError):
        get_worker()
        return nullcontext()
    context = TaskRunContext.get()
    return Display(context.task.name, task_run_id=context.task_run.id) if context else nullcontext()


def mode() -> Literal["bar", "notebook", "lines"]:
    """Choose how this process shows progress."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if getattr(shell, "kernel", None) is not None:
        return "notebook"
    return "bar" if _takes_bar(sys.stderr) else "lines"


def _takes_bar(stream: Any) -> bool:
    # A file that was closed, or None under pythonw, is no terminal.
    with suppress(AttributeError, ValueError):
        plain = os.environ.get("NO_COLOR") or os.environ.get("CI")
        return stream.isatty() and not plain and os.environ.get("TERM", "dumb") != "dumb"
    return False


def fitted(line: str, room: int) -> str:
    """Leave out the less important parts of a line that is too long. Pure."""
    parts = line.split(" · ")
    while len(" · ".join(parts)) > room and len(parts) > MIN_PARTS:
        del parts[-2]
    return " · ".join(parts)


class _AboveBar:
    """A stream whose every write, a record, erases the bar in the line below all others.

    In one call: several processes write to the terminal.
    """

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        return int(self.stream.write(f"{ERASE_LINE}{text}" if text else ""))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def log_above_bar() -> None:
    """Have the console handlers of this process write above a bar, which may be another's."""
    for name in ("", "prefect", "distributed"):
        for handler in logging.getLogger(name).handlers:
            console = getattr(handler, "console", None)  # Prefect's writes by one of rich
            owner, where = (handler, "stream") if console is None else (console, "file")
            stream = getattr(owner, where, None)
            if _takes_bar(stream) and not isinstance(stream, _AboveBar):
                setattr(owner, where, _AboveBar(stream))
