"""Owns the life of a rank process, from its launch page to its outcome, however it was
started.
"""

import atexit
import contextlib
import ctypes
import functools
import importlib
import io
import logging
import logging.config
import multiprocessing.process
import os
import pickle
import runpy
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from prefect_torch_ddp.protocol.heartbeat import Phase
from prefect_torch_ddp.protocol.rank import COPIES, LaunchPage, RankLaunch
from prefect_torch_ddp.rank.link import Channel, describe

PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 15, 36  # prctl(2)

LINGER_S = 2.0
"""How long a rank that returned keeps its connections, so that peers finish reading the last
collective."""


class _ChannelHandler(logging.Handler):
    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._channel.send_log(record.levelno, record.name, self.format(record))
        except Exception:  # noqa: BLE001 - logging must never fail the training
            self.handleError(record)


def live(fds: Sequence[int], parent_pid: int, page: LaunchPage, payload: bytes) -> None:
    """Run one rank to its end.

    Args:
        fds: of the events' socket, the outcome's file, the control pipe and the heartbeat's
            page.
        parent_pid: the process to die with.
        page: how to run.
        payload: what to run: the pickled call.
    """
    _die_with(parent_pid)
    channel = Channel(*fds)
    launch = page.launch
    show_name(f"ddp-rank-{launch.place.rank}")
    channel.listen()
    _keep_leftovers_together(Path(page.scratch))
    channel.copies = Path(page.scratch, COPIES)
    _show_output(channel)
    sys.path += [
        path for path in launch.extra_sys_path if path not in sys.path and Path(path).is_dir()
    ]
    try:
        _run(launch, payload, channel)
    except BaseException as error:  # noqa: BLE001 - whatever ends the function is the rank's outcome
        channel.failed(describe(error, launch.place.rank, launch.place.host))
        _flush()
        # The agent kills the whole gang now. Not sys.exit: the interpreter's end may hang on
        # what the failure left behind.
        channel.wait_to_leave(None)
        os._exit(1)
    _leave()


def _run(launch: RankLaunch, payload: bytes, channel: Channel) -> None:
    fn, args, kwargs = pickle.loads(payload)
    # Torch is loaded after the user's own modules had their say in the environment.
    from prefect_torch_ddp.rank import failure as values  # noqa: PLC0415
    from prefect_torch_ddp.rank import link  # noqa: PLC0415
    from prefect_torch_ddp.rank.distributed import backend as device  # noqa: PLC0415
    from prefect_torch_ddp.rank.distributed import group as process_group  # noqa: PLC0415

    link.set_link(channel)
    device.choose_device(launch)
    with process_group.process_group(launch):
        channel.heartbeat.enter(Phase.FUNCTION)
        value = _call(fn, args, kwargs)
    channel.returned(value, lambda value: values.pickle_value(value, launch.place.rank))
    _flush()
    if not channel.wait_to_leave(LINGER_S):
        process_group.close_connections()
        channel.wait_to_leave(None)


def _call(fn: Callable[..., Any] | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if not isinstance(fn, str):
        return fn(*args, **kwargs)
    if fn.endswith(".py"):
        return _run_script(fn, args)
    module_name, _, qualname = fn.partition(":")
    target: Any = importlib.import_module(module_name)
    for part in qualname.split("."):
        target = getattr(target, part)
    return target(*args, **kwargs)


def _run_script(path: str, args: Sequence[Any]) -> None:
    """Run a script as torchrun does; exit code 0 is success."""
    sys.argv = [path, *map(str, args)]
    sys.path.insert(0, str(Path(path).parent))
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            raise


def show_name(name: str) -> None:
    """Name this process in `ps -o comm` and `top`, where all would be called python."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode()[:15])


def adopt_orphans() -> None:
    """Have processes below this one become its children when their parent ends, whatever their
    session.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def _die_with(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends, however it ends: the agent's
    thread, or the rank host.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:
            os._exit(1)  # it ended before we asked


def _keep_leftovers_together(scratch: Path) -> None:
    """Have this process and its children make their sockets and named semaphores where the
    agent finds them if they are killed.
    """
    scratch.mkdir(mode=0o700)
    config = multiprocessing.process.current_process()._config  # type: ignore[attr-defined]
    config["tempdir"] = str(scratch)  # see multiprocessing.util.get_temp_dir
    config["semprefix"] = f"/{scratch.name}"  # see multiprocessing.synchronize.SemLock


def _show_output(channel: Channel) -> None:
    """Send prints at each line's end, and log records with their level."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    logging.basicConfig(
        level=logging.INFO, handlers=[_ChannelHandler(channel)], format="%(message)s"
    )
    _keep_prefect_off_the_root()


def _keep_prefect_off_the_root() -> None:
    """Leave the root logger to us when a workload's module imports Prefect, which configures
    logging as it loads.

    It would put its own handler on the root, at WARNING, and a rank's records would no longer
    reach the run's log.
    """
    configure = logging.config.dictConfig

    @functools.wraps(configure)
    def without_root(config: Any) -> None:
        if "prefect.flow_runs" in config.get("loggers", {}):
            config = {name: part for name, part in config.items() if name != "root"}
        configure(config)

    logging.config.dictConfig = without_root


def _leave() -> None:
    """End as Python does, its exit handlers included, but without taking every module apart,
    which takes torch 0.3 s.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    _flush()
    os._exit(0)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(
            AttributeError, ValueError, OSError
        ):  # user code may have closed or replaced it
            stream.flush()
