"""What a library that is loaded ahead has read, and Python code can't see."""

import ctypes
import shutil
from pathlib import Path

import psutil

from prefect_torch_ddp.rank.libraries import _sizes_of_pools, _thread_pools


def test_a_pool_of_threads_that_an_import_brings_is_noticed(tmp_path: Path) -> None:
    """By its name alone: its C code has read OMP_NUM_THREADS. One that was there is none."""
    before = _thread_pools()
    assert _sizes_of_pools(before) == set()
    library = tmp_path / "libgomp-odd.so.1"
    shutil.copy(next(Path(psutil.__file__).parent.glob("*.so")), library)
    ctypes.CDLL(str(library))
    assert _sizes_of_pools(before) == {"OMP_NUM_THREADS"}
