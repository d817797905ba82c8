"""Owns a cluster of four workers that die and come again while a gang trains on it, as a test's
script says."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distributed import Client, LocalCluster

from tests.integration.gang.test_restarts import extra_worker


@dataclass
class Workers:
    """What a script may do."""

    folder: Path
    extra: list[Any]
    """Three processes, one worker each; a fourth worker is the cluster's own."""
    come_again: Callable[[], None]
    """Starts three new ones."""

    def waiting(self, attempt: int, num_ranks: int) -> list[int]:
        """Wait until all ranks of an attempt wait to be killed; return their pids."""
        deadline = time.monotonic() + 90
        while len(found := list(self.folder.glob(f"waits-{attempt}-*"))) < num_ranks or not all(
            path.read_text() for path in found
        ):
            assert time.monotonic() < deadline, f"attempt {attempt} did not come so far"
            time.sleep(0.02)
        return [int(path.read_text()) for path in found]

    def come_again_to_the_last(self, attempt: int) -> None:
        """Start three new workers while an attempt of one rank waits, then kill that rank."""
        (pid,) = self.waiting(attempt, 1)
        self.come_again()
        os.kill(pid, signal.SIGKILL)


@contextmanager
def dying_workers(
    folder: Path, script: Callable[[Workers], None]
) -> Iterator[tuple[Client, Callable[[], None]]]:
    """Give a client, and what waits for the script's end and shows its failure; the script runs
    beside the test."""
    failures: list[BaseException] = []
    with ExitStack() as stack:
        cluster = stack.enter_context(
            LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=":0")
        )
        client = stack.enter_context(Client(cluster))

        def three() -> list[Any]:
            return [stack.enter_context(extra_worker(cluster, 2 + i)) for i in range(3)]

        workers = Workers(folder, three(), lambda: workers.extra.extend(three()))

        def run() -> None:
            try:
                script(workers)
            except BaseException as error:  # noqa: BLE001 - the test shall show it
                failures.append(error)

        def over() -> None:
            thread.join()
            assert not failures, failures

        thread = threading.Thread(target=run)
        thread.start()
        yield client, over
