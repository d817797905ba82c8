"""Libraries in a fork server: one is kept only if a rank forked later computes the same with it."""

import builtins
import contextlib
import gc
import importlib
import os
import random
import re
import sys
import tempfile
import weakref
from collections.abc import Collection, Iterator
from importlib.machinery import PathFinder
from pathlib import Path

from prefect_torch_ddp.protocol.rank import ForkServerAnswer, ForkServerOrder, is_installed

_THREAD_POOL = re.compile(r"/lib(?:gomp|iomp5|omp|mkl_rt|\w*openblas)[^/]*\.so\S*$", re.MULTILINE)


def load_ahead(order: ForkServerOrder) -> ForkServerAnswer:
    """Import what the order names, up to the first import that makes this process unfit."""
    with contextlib.suppress(OSError), tempfile.NamedTemporaryFile():
        pass  # tempfile makes its generator, which isn't an import's
    freeze()
    for statement in order.imports:
        before, files, pools = set(sys.modules), _open_files(), _thread_pools()
        reads: set[str] = set()
        try:
            with _noting_reads(reads):
                exec(statement, {"__builtins__": builtins})  # noqa: S102 - the caller's own imports
        except BaseException as error:  # noqa: BLE001 - its rank will meet it too, and says so
            why: str | None = f"{type(error).__name__}: {error}"
        else:
            new = set(sys.modules) - before
            why = (
                why_unfit()
                or ("it opens files" if _open_files() != files else None)
                or _environment_read(reads | _sizes_of_pools(pools), order.rank_variables)
                or _not_the_users(new, order.shadowed_by)
                or ("it keeps random numbers of its own" if new and _has_generator() else None)
            )
        if why is not None:
            return ForkServerAnswer(unfit=why, culprit=statement)
        freeze()
    return ForkServerAnswer()


def why_unfit() -> str | None:
    """Return what makes forking this process unsafe; None when nothing does."""
    import torch  # noqa: PLC0415 - spawned children of a rank import the fork server's module

    num_threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208 - names alone are counted
    if num_threads != 1:
        return f"it runs {num_threads} threads"
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return "CUDA is initialised in it"
    return None


def freeze() -> None:
    """Keep children from copying what they share with this process, or taking it apart at exit."""
    gc.freeze()
    # Torch's alone take 30 ms of each rank's end.
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]  # noqa: SLF001
        finalizer.atexit = False


def _open_files() -> dict[str, str]:
    """Return the open files; ranks would share their offsets, or a connection."""
    files = {}
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            files[fd.name] = str(fd.readlink())
    return files


@contextlib.contextmanager
def _noting_reads(names: set[str]) -> Iterator[None]:
    """Note which environment variables Python code reads."""
    read = os._Environ.__getitem__  # noqa: SLF001 - `get` and `in` end there too

    def note(environ: "os._Environ[str]", name: str) -> str:
        names.add(name)
        return read(environ, name)

    os._Environ.__getitem__ = note  # type: ignore[method-assign, assignment]  # noqa: SLF001
    try:
        yield
    finally:
        os._Environ.__getitem__ = read  # type: ignore[method-assign]  # noqa: SLF001


def _thread_pools() -> set[str]:
    return set(
        _THREAD_POOL.findall(Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace"))
    )


def _sizes_of_pools(before: Collection[str]) -> set[str]:
    """Return the variable that C code has read where a library for thread pools was loaded."""
    return {"OMP_NUM_THREADS"} if _thread_pools() - set(before) else set()


def _environment_read(read: Collection[str], rank_variables: Collection[str]) -> str | None:
    names = sorted(set(read).intersection(rank_variables))
    return f"it reads {', '.join(names)}, which is each rank's own" if names else None


def _not_the_users(new: Collection[str], folders: Collection[str]) -> str | None:
    """Return which new module is the user's own, or stands in the way of one."""
    for name in new:
        file = getattr(sys.modules.get(name), "__file__", None)
        if file and not (name.startswith("prefect_torch_ddp.") or is_installed(file)):
            return f"it imports {name}, which isn't an installed package's"
    importlib.invalidate_caches()
    for top in {name.partition(".")[0] for name in new}:
        spec = PathFinder.find_spec(top, list(folders)) if folders else None
        loaded = getattr(sys.modules.get(top), "__file__", None)
        # The same file, where people work in a checkout of what is installed from there.
        if spec is not None and spec.origin is not None and spec.origin != loaded:
            return f"it imports an installed {top}, and the user's own {top} comes first"
    return None


def _has_generator() -> bool:
    """Tell whether a generator of random numbers was made; seeded or not, nobody can tell."""
    import numpy as np  # noqa: PLC0415

    gc.collect()  # of what was made since the last freeze
    kinds = (random.Random, np.random.Generator, np.random.RandomState)
    made = [
        each
        for each in gc.get_objects()
        if isinstance(each, kinds) and not isinstance(each, random.SystemRandom)
    ]
    # tempfile's own begin anew in another process.
    return any(
        all(type(user).__module__ != "tempfile" for user in gc.get_referrers(each)) for each in made
    )
