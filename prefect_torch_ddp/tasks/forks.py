"""A fix for Prefect 3.8: forks of a process where Prefect has run, such as DataLoader workers."""

import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

# Prefect 3.8 resets its senders of logs and events in a forked child, and what they have
# registered for the exit stumbles over the reset (an assertion in
# _internal/concurrency/services.py). A child of multiprocessing then ends with exit code 1,
# which a DataLoader takes for a crash in the middle of its batches. 3.8.8, the newest 3.8, still
# does (tried); 3.9 mends it. This module goes when the lower bound is 3.9.


def mend_forks() -> None:
    """Have children that are forked from now on end as they would without Prefect."""
    os.register_at_fork(after_in_child=_forget_prefects_exits)


def _forget_prefects_exits() -> None:
    calls: list[Callable[[], Any]] = vars(threading)["_threading_atexits"]
    calls[:] = [call for call in calls if not _is_prefects(call)]


def _is_prefects(call: Callable[[], Any]) -> bool:
    function = call.func if isinstance(call, partial) else call
    owner = getattr(function, "__self__", None)
    return owner is not None and type(owner).__module__.startswith("prefect.")
