"""Python sources are parsed beside threads that parse as well, and let others in as they do."""

import gc
import threading
import time
from pathlib import Path

import prefect_torch_ddp.flow
from prefect_torch_ddp.lazy import parse_python


class _Garbage:
    """A cycle, whose finalizer lets another thread run in the midst of what allocates."""

    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        time.sleep(0.0002)


def test_threads_parse_at_once() -> None:
    """In Python 3.11 ast.parse fails here: "AST constructor recursion depth mismatch"."""
    source = Path(prefect_torch_ddp.flow.__file__).read_bytes()
    parsed = []

    def parse() -> None:
        for _ in range(30):
            for _ in range(50):
                _Garbage()
            parsed.append(parse_python(source))

    before = gc.get_threshold()
    gc.set_threshold(50, 5, 5)
    try:
        threads = [threading.Thread(target=parse) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        gc.set_threshold(*before)
    assert len(parsed) == 90
