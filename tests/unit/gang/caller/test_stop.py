"""A caller that leaves stops its ranks, wherever it was interrupted."""

import asyncio
import ctypes
import dis
import queue
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any

import pytest

import prefect_torch_ddp
from prefect_torch_ddp.gang.caller.stop import StopSwitch, follow
from prefect_torch_ddp.protocol.events import GangEvent, LogLine
from tests.support.waiting import HANG_S, wait_until


class TaskTimeout(BaseException):
    """What Prefect raises in the thread of a task whose time is over."""


def test_a_timeout_from_another_thread_stops_a_quiet_gang() -> None:
    """Raised in the caller's thread while no event comes, it reaches the ranks as a stop."""
    heard: list[str] = []
    followers: list[int] = []
    events: queue.SimpleQueue[GangEvent | None] = queue.SimpleQueue()
    stop = StopSwitch(HANG_S)

    async def gang() -> list[bytes]:
        events.put(LogLine(0, 20, "the only event"))
        heard.append(await stop.wait())
        return []

    def leave() -> None:
        with pytest.raises(TaskTimeout):
            follow(client, gang(), events, lambda _: followers.append(threading.get_ident()), stop)

    def is_quiet() -> bool:
        return bool(followers) and sys._current_frames()[followers[0]].f_code is follow.__code__

    loop = asyncio.new_event_loop()
    client: Any = SimpleNamespace(loop=SimpleNamespace(asyncio_loop=loop))
    running = threading.Thread(target=loop.run_forever)
    running.start()
    try:
        with ThreadPoolExecutor(1) as pool:
            outcome = pool.submit(leave)
            wait_until(is_quiet)
            raised = ctypes.py_object(TaskTimeout)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(followers[0]), raised)
            outcome.result(HANG_S)
        assert heard == ["TaskTimeout in its caller"]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        running.join()
        loop.close()


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="looks for the handler at the jump itself")
def test_no_loop_leaves_its_try_at_the_jump_back() -> None:
    """An interrupt arrives there, and Python looks one instruction before the jump's target."""
    root = Path(prefect_torch_ddp.__file__).parent
    for path in root.rglob("*.py"):
        assert list(_escapes(compile(path.read_text(), str(path), "exec"))) == []


def _escapes(code: CodeType) -> Iterator[str]:
    regions = dis._parse_exception_table(code)  # type: ignore[attr-defined]

    def handler(at: int) -> int | None:
        return next((each.target for each in regions if each.start <= at < each.end), None)

    for jump in dis.get_instructions(code):
        if "JUMP_BACKWARD" in jump.opname and handler(jump.argval) != handler(jump.argval - 2):
            yield f"{code.co_filename}: {code.co_qualname}"
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield from _escapes(part)
