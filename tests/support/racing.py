"""Attempts of one training that run at the same time, each in a separate process."""

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import psutil

from prefect_torch_ddp.storage.protocol import Storage
from tests.support.waiting import HANG_S, wait_until
from tests.workloads.stored import Course, race


class Attempt:
    """A process that trains on request."""

    def __init__(self, storage: Storage, course: Course) -> None:
        context = multiprocessing.get_context("forkserver")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_be_attempt, args=(theirs, storage, course), daemon=True
        )
        self._process.start()
        theirs.close()
        assert self._hear() == "ready"

    def begin(self) -> None:
        self._pipe.send("begin")

    def wait_until_stopped(self) -> None:
        process = psutil.Process(self._process.pid)
        wait_until(lambda: process.status() == psutil.STATUS_STOPPED)

    def go_on(self) -> None:
        """Let it run again; it may be held up another time, and isn't then."""
        wait_until(self._has_ended_or_goes_on)

    def _has_ended_or_goes_on(self) -> bool:
        if not self._process.is_alive() or self._pipe.poll():
            return True
        os.kill(self._process.pid or 0, signal.SIGCONT)
        return False

    def outcome(self) -> Any:
        """Return what `train` returned; None if the process died."""
        try:
            return self._hear()
        except EOFError:
            return None

    def _hear(self) -> Any:
        assert self._pipe.poll(HANG_S), "the attempt said nothing"
        return self._pipe.recv()

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self._process.close()
        self._pipe.close()


@contextmanager
def attempt(storage: Storage, course: Course, *, begins: bool = True) -> Iterator[Attempt]:
    """Give a process that trains."""
    made = Attempt(storage, course)
    try:
        if begins:
            made.begin()
        yield made
    finally:
        made.end()


def run_to_its_end(storage: Storage, course: Course) -> Any:
    """Train in a separate process; return the outcome."""
    with attempt(storage, course) as made:
        return made.outcome()


def _be_attempt(pipe: Connection, storage: Storage, course: Course) -> None:
    pipe.send("ready")
    pipe.recv()
    pipe.send(race(storage, course))
