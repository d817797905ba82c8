"""Two attempts of one training that run at the same time, and a storage that holds its
process up at a request."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import psutil
import torch
from torch.utils.data import TensorDataset

from prefect_torch_ddp import RankContext
from prefect_torch_ddp.checkpoint.attempts import newest_attempt
from prefect_torch_ddp.errors import SupersededError
from prefect_torch_ddp.params import CheckpointParams
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.storage.protocol import Storage
from tests.workloads.healthy import sha256_of_weights

PATIENCE_S = 60.0
NUM_SAMPLES = 4


@dataclass(frozen=True)
class PausingStorage(DirectoryStorage):
    """A directory whose process stops (SIGSTOP) right before a request for a key that contains
    a text."""

    request: str = ""
    text: str = ""

    def _maybe_stop(self, request: str, key: str) -> None:
        if request == self.request and self.text in key:
            os.kill(os.getpid(), signal.SIGSTOP)

    def write(self, key: str, data: bytes) -> None:
        """Write it."""
        self._maybe_stop("write", key)
        super().write(key, data)

    def write_if_absent(self, key: str, data: bytes) -> bool:
        """Write it."""
        self._maybe_stop("write_if_absent", key)
        return super().write_if_absent(key, data)

    def delete(self, key: str) -> None:
        """Delete it."""
        self._maybe_stop("delete", key)
        super().delete(key)


@dataclass(frozen=True)
class Course:
    """How an attempt goes."""

    num_steps: int
    every_steps: int = 1
    die_at: int | None = None
    """Die after this step, without a word."""
    wait_at: int | None = None
    """Make no further step before there is a newer attempt."""


def train(storage: Storage, course: Course) -> tuple[str, str]:
    """Claim an attempt and train; return "done" and the weights' digest, or "superseded" and
    the error's text."""
    torch.set_num_threads(1)
    policy = CheckpointParams(every_steps=course.every_steps, every_s=None, keep_last=2)
    try:
        with RankContext.local(storage=storage, run_id="run", checkpoint=policy) as ctx:
            return "done", _steps(ctx, course)
    except SupersededError as error:
        return "superseded", str(error)


def _steps(ctx: RankContext, course: Course) -> str:
    model = torch.nn.Linear(3, 2).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    ctx.track(model=model, optimizer=optimizer)
    inputs = torch.arange(3.0 * NUM_SAMPLES, dtype=torch.float64).reshape(NUM_SAMPLES, 3)
    loader = ctx.loader(TensorDataset(inputs), global_batch_size=1)
    for (batch,) in ctx.steps(loader, epochs=course.num_steps // NUM_SAMPLES):
        ctx._parts.tracker._checkpointer.wait()  # what became of the checkpoint before is known
        loss = torch.nn.functional.dropout(model(batch), 0.3).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ctx.report(loss=loss)
        ctx.save("newest.txt", f"attempt {ctx.attempt}")
        if ctx.step == course.die_at:
            os._exit(1)
        if ctx.step == course.wait_at:
            wait_until(lambda: newest_attempt(ctx.config.storage, "run") > ctx.attempt)
    return sha256_of_weights(model)


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait until it is so."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


class Attempt:
    """A process that trains when it is told to."""

    def __init__(self, storage: Storage, course: Course) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(
            ["torch", "torchvision", "prefect_torch_ddp.rank.stages", "tests.workloads.healthy"]
        )
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_be_attempt, args=(theirs, storage, course), daemon=True
        )
        self._process.start()
        theirs.close()
        assert self._hear() == "ready"

    def begin(self) -> None:
        """Have it claim its attempt and train."""
        self._pipe.send("begin")

    def wait_until_stopped(self) -> None:
        """Wait until its storage holds it up."""
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
        """Return what `train` returned; None where the process died."""
        try:
            return self._hear()
        except EOFError:
            return None

    def _hear(self) -> Any:
        assert self._pipe.poll(PATIENCE_S), "the attempt said nothing"
        return self._pipe.recv()

    def end(self) -> None:
        """Kill it, if it still runs."""
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
    """Train in a process of its own; return the outcome."""
    with attempt(storage, course) as made:
        return made.outcome()


def _be_attempt(pipe: Connection, storage: Storage, course: Course) -> None:
    pipe.send("ready")
    pipe.recv()
    pipe.send(train(storage, course))
