"""The end of a rank: as Python ends, as far as a forked process can.

Python joins threads, runs exit handlers, and frees modules, which closes the files in them. Here
the modules of the user are freed and every open file is flushed. Torch and what else was
installed is not taken apart, which would take 0.3 s of each rank. What C libraries keep in
their own buffers is written only if the Python object that holds it is freed.
"""

import atexit
import contextlib
import gc
import io
import logging
import os
import sys
import threading
import weakref
from collections.abc import Collection, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from prefect_torch_ddp.protocol.rank import is_installed, package_folders

logger = logging.getLogger(__name__)

THREADS_NOTE_S = 10.0
"""After how long the log names the threads that a rank waits for at its end."""
_NATIVE = ("_io", "io")
"""Modules of the classes of files whose buffers are flushed; others may write more on a close."""
_OURS = str(Path(__file__).resolve().parents[2]) + os.sep


def join_threads() -> None:
    """Wait for the user's threads, as the interpreter does at its end; daemons aren't waited for.

    They may work for as long as they want: one that uploads a result must not be cut off.
    """
    note = threading.Timer(THREADS_NOTE_S, _name_threads)
    note.daemon = True
    note.start()
    threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001
    note.cancel()


def _name_threads() -> None:
    main = threading.main_thread()
    alive = [each for each in threading.enumerate() if not each.daemon and each is not main]
    if names := ", ".join(each.name for each in alive):
        text = "the function has ended, and its rank waits for these threads to end: %s"
        logger.warning(text, names)


def finish(inherited: Collection[str]) -> None:
    """Run exit handlers, free the user's modules and flush what is open. Never raises.

    Args:
        inherited: names of the modules that were there before the user's code; they stay.
    """
    for step in (flush_files, join_threads, atexit._run_exitfuncs, flush_files):  # noqa: SLF001
        # Exit handlers report errors themselves; Python continues after them too.
        with contextlib.suppress(BaseException):
            step()
    atexit._clear()  # noqa: SLF001 - what handlers hold is to be freed too
    with contextlib.suppress(BaseException):
        _free_modules(inherited)
    for close in (_close_wrappers, flush_files):
        with contextlib.suppress(BaseException):
            close()


def flush_files() -> None:
    """Flush every file that this process has opened; those of the fork server are frozen."""
    files: list[Any] = [sys.stdout, sys.stderr]
    # From the outside in: a text file hands on what it holds to a buffer.
    for kind in (io.TextIOWrapper, (io.BufferedWriter, io.BufferedRandom, io.BufferedRWPair)):
        files += [each for each in gc.get_objects() if issubclass(type(each), kind)]
    for file in files:
        # Closed, a pipe that nobody reads, or whatever user code put in place of the stream.
        with contextlib.suppress(Exception):
            file.flush()


def _close_wrappers() -> None:
    """Close what writes through other files, such as a gzip file, and is still held by someone."""
    for each in gc.get_objects():
        is_wrapper = issubclass(type(each), io.IOBase) and type(each).__module__ not in _NATIVE
        if is_wrapper and each is not sys.stdout and each is not sys.stderr:
            with contextlib.suppress(Exception):
                each.close()


def _free_modules(inherited: Collection[str]) -> None:
    """Free the user's modules as the interpreter does, newest first."""
    # A daemon thread may miss names from now on; Python would have stopped it.
    threading.excepthook = lambda _: None
    refs = []
    for name, module in reversed(list(sys.modules.items())):
        if name not in inherited and _is_the_users(module):
            refs.append(weakref.ref(module))
            sys.modules[name] = None  # type: ignore[assignment]  # as the interpreter does
    gc.collect()
    for module in _alive(refs):
        _clear(module)
    gc.collect()


def _alive(refs: list["weakref.ref[ModuleType]"]) -> Iterator[ModuleType]:
    for ref in refs:
        if (module := ref()) is not None:
            yield module


def _is_the_users(module: Any) -> bool:
    file = getattr(module, "__file__", None) if isinstance(module, ModuleType) else None
    if not isinstance(file, str) or file.startswith((_OURS, *_installed())):
        return False
    return not is_installed(file)


def _installed() -> tuple[str, ...]:
    libraries = (f"{root}{os.sep}lib" for root in (sys.prefix, sys.base_prefix))
    return tuple(folder + os.sep for folder in (*libraries, *map(str, package_folders())))


def _clear(module: ModuleType) -> None:
    """Drop what a module holds: its private names first, as the interpreter does."""
    names = vars(module)
    private = [name for name in names if name.startswith("_") and not name.startswith("__")]
    for name in (*private, *names):
        if name != "__builtins__":
            names[name] = None
