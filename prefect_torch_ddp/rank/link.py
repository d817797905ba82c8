"""Owns the link by which a rank's context talks to the process around it."""

from pathlib import Path
from typing import Protocol

from prefect_torch_ddp.messages import Progress, Stopped
from prefect_torch_ddp.rank.pulse import PulseBoard


class ControlLink(Protocol):
    """What the supervisor's side offers to a rank; no call blocks."""

    pulse: PulseBoard
    """Where the rank marks what it is at."""
    copies: Path | None
    """Where copies of records outlive this process until the storage has them; None: nobody would look there."""

    def send_progress(self, progress: Progress) -> None:
        """Send it if there is room, else drop it."""
        ...

    def stop_requested(self) -> bool:
        """Tell whether the training is to stop at the next step that all ranks agree on."""
        ...

    def listens(self) -> None:
        """Say that this rank's training reacts to a stop from now on."""
        ...

    def send_stopped(self, stopped: Stopped) -> None:
        """Say that the training stopped before its end."""
        ...

    def function_ended(self) -> None:
        """Say that the user's function is over: a peer that waits for this rank in a collective waits in vain."""
        ...


class NoLink:
    """The link of a rank that nobody supervises (`RankContext.local()`)."""

    def __init__(self) -> None:
        """Mark on a page that nobody reads."""
        self.pulse = PulseBoard()
        self.copies: Path | None = None

    def send_progress(self, progress: Progress) -> None:
        """Drop it."""

    def stop_requested(self) -> bool:
        """Never."""
        return False

    def listens(self) -> None:
        """Tell nobody."""

    def send_stopped(self, stopped: Stopped) -> None:
        """Tell nobody."""

    def function_ended(self) -> None:
        """Tell nobody."""


_link: ControlLink = NoLink()


def set_link(link: ControlLink) -> None:
    """Install the link; called once, by the rank's main."""
    global _link  # noqa: PLW0603 - one process is one rank
    _link = link


def current_link() -> ControlLink:
    """Return this process's link."""
    return _link


def report_progress() -> None:
    """Tell the supervisor that this rank makes progress, from a plain function that neither steps nor reports.

    Costs less than a microsecond. Once a rank has called it, its gang is expected to go on making progress, where its
    `progress_timeout_s` is set. Outside of a gang it does nothing.
    """
    _link.pulse.progress()
