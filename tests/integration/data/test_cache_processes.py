"""Processes share the cache, keep its limit, and may be killed at any moment."""

import multiprocessing
import os
import random
import signal

from prefect_torch_ddp.data.images.cache import CachedReads
from tests.support.waiting import HANG_S
from tests.unit.data.images.test_cache import (
    content,
    entries,
    filled,
    parts_of,
    size_of,
    unfinished_in,
)

FORK = multiprocessing.get_context("fork")


def test_what_nobody_has_open_makes_room_and_what_is_in_use_stays(tmp_path):
    """Entries of an ended run are removed, and those of a running reader stay for a day."""
    limit = 45 * 1032
    ended, mine, new = (filled(tmp_path / name / "x", salt=name) for name in ("end", "me", "new"))
    for source in (mine, ended):
        _in_child(CachedReads(source, tmp_path / "cache", limit).read_many, parts_of(source))
        for path in entries(tmp_path / "cache"):
            os.utime(path, (path.stat().st_mtime - 10 * 3600,) * 2)
    CachedReads(mine, tmp_path / "cache", limit).read_many(parts_of(mine)[:1])
    CachedReads(new, tmp_path / "cache", limit).read_many(parts_of(new))
    kept = {path.read_bytes()[:1000] for path in entries(tmp_path / "cache")}
    assert {content(f"{name}{n}") for name in ("me", "new") for n in range(20)} <= kept
    assert 0 < sum(content(f"end{n}") in kept for n in range(20)) < 20
    assert size_of(tmp_path / "cache") <= limit


def _in_child(function, *args):
    child = FORK.Process(target=function, args=args)
    child.start()
    child.join(HANG_S)
    assert child.exitcode == 0


def _read_by_chance(cached, parts, seed):
    rng = random.Random(seed)
    for _ in range(40):
        chosen = rng.sample(parts, 8)
        assert cached.read_many(chosen) == [content(int(part.key), 20_000) for part in chosen]


def test_many_processes_at_once_keep_the_limit(tmp_path):
    """Six processes share a cache that is too small, get the right bytes and keep the limit."""
    storage = filled(tmp_path / "objects", num=60, num_bytes=20_000)
    limit = 30 * 20_032
    cached, parts = CachedReads(storage, tmp_path / "cache", limit), parts_of(storage)
    children = [
        FORK.Process(target=_read_by_chance, args=(cached, parts, seed)) for seed in range(6)
    ]
    for child in children:
        child.start()
    while any(child.is_alive() for child in children):
        assert size_of(tmp_path / "cache") <= limit
        children[0].join(0.01)
    assert [child.exitcode for child in children] == [0] * 6
    assert 20 <= len(entries(tmp_path / "cache")) <= 30


def test_killed_in_the_midst_no_half_file_is_read(tmp_path):
    """After fifteen random kills of processes that fill the cache, its content is right."""
    storage = filled(tmp_path / "objects", num=60, num_bytes=200_000)
    cached, parts = CachedReads(storage, tmp_path / "cache"), parts_of(storage)
    for number in range(15):
        child = FORK.Process(target=_fill_for_ever, args=(cached, parts))
        child.start()
        while (
            not unfinished_in(tmp_path / "cache")
            and child.is_alive()
            and len(entries(tmp_path / "cache")) < number * 2
        ):
            pass
        os.kill(child.pid, signal.SIGKILL)
        child.join(HANG_S)
        assert child.exitcode == -signal.SIGKILL
    for path in entries(tmp_path / "cache"):
        assert path.stat().st_size == 200_032
    assert cached.read_many(parts) == [content(number, 200_000) for number in range(60)]


def _fill_for_ever(cached, parts):
    while True:
        for part in parts:
            cached.read_many([part])
        for path in entries(cached.folder):
            path.unlink()
