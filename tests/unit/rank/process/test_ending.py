"""The end of a rank: which threads it waits for, and which modules it frees."""

import json
import logging
import threading
from types import ModuleType

import pytest

import tests.workloads.plain
from prefect_torch_ddp.rank.process import ending, main


def test_threads_that_a_rank_waits_for_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """Those that are no daemons: Python's own end would wait for them too."""
    over = threading.Event()
    threads = [
        threading.Thread(target=over.wait, name=name, daemon=name == "daemon")
        for name in ("uploads", "daemon")
    ]
    for thread in threads:
        thread.start()
    with caplog.at_level(logging.WARNING, "prefect_torch_ddp"):
        ending._name_threads()
    over.set()
    assert "waits for these threads to end: " in caplog.text
    assert "uploads" in caplog.text
    assert "daemon" not in caplog.text


@pytest.mark.parametrize(
    ("module", "is_freed"),
    [(tests.workloads.plain, True), (json, False), (pytest, False), (main, False), (None, False)],
    ids=["the user's", "Python's", "an installed package's", "our own", "a name without a module"],
)
def test_only_modules_of_the_user_are_freed(module: ModuleType | None, *, is_freed: bool) -> None:
    """To take torch apart would cost each rank 0.3 s."""
    assert ending._is_the_users(module) is is_freed
