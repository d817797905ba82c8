"""The cache among processes: they share it, keep its limit, and may be killed at any moment."""

import hashlib
import multiprocessing
import os
import random
import signal
import time

import pytest

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


@pytest.fixture
def storage(tmp_path):
    """Give a storage with 20 objects of 1,000 bytes."""
    return filled(tmp_path / "objects")


def test_what_nobody_uses_makes_room(tmp_path, monkeypatch):
    """Sources that no process has open go, least recently used first; sources in use stay."""
    limit = 45 * 1032
    sources = [filled(tmp_path / name / "x", salt=name) for name in ("old", "older", "used")]
    for source in sources[:2]:  # in processes that have ended since
        _in_child(CachedReads(source, tmp_path / "cache", limit).read_many, parts_of(source))
    for path in entries(tmp_path / "cache"):
        owner = path.parent.parent.name
        is_older = owner == _folder_name(sources[1])
        os.utime(path, (time.time() - (20 if is_older else 10) * 3600,) * 2)
    held = CachedReads(sources[2], tmp_path / "cache", limit)
    held.read_many(parts_of(sources[2]))
    left = {
        name: len(list((tmp_path / "cache/v1" / _folder_name(source)).glob("??/*")))
        for name, source in zip("oru", sources, strict=True)
    }
    assert left["u"] == 20
    assert left["o"] == 20
    assert 0 < left["r"] < 20
    assert size_of(tmp_path / "cache") <= limit


def test_what_is_only_read_is_in_use_too(tmp_path):
    """A process in its second epoch writes nothing: its entries stay, and another dataset gets
    the room that is left."""
    limit = 25 * 1032
    mine, other = filled(tmp_path / "mine" / "x"), filled(tmp_path / "other" / "x", salt="other")
    _in_child(CachedReads(mine, tmp_path / "cache", limit).read_many, parts_of(mine))
    before = mine.num_reads
    cached = CachedReads(mine, tmp_path / "cache", limit)
    cached.read_many(parts_of(mine)[:1])
    CachedReads(other, tmp_path / "cache", limit).read_many(parts_of(other))
    cached.read_many(parts_of(mine))
    assert mine.num_reads == before
    assert len(entries(tmp_path / "cache")) == 25


def _folder_name(source):
    return hashlib.sha256(CachedReads(source, "x").content_id.encode()).hexdigest()[:32]


def _in_child(function, *args):
    child = FORK.Process(target=function, args=args)
    child.start()
    child.join(HANG_S)
    assert child.exitcode == 0


def _read_all(cached, parts, rounds):
    for _ in range(rounds):
        assert cached.read_many(parts) == [content(int(part.key)) for part in parts]


def test_processes_share_it(storage, tmp_path):
    """What this process read, another one finds, and the other way round."""
    cached, parts = CachedReads(storage, tmp_path / "cache"), parts_of(storage)
    cached.read_many(parts[:10])
    _in_child(_read_all, cached, parts, 2)
    _read_all(cached, parts, 1)
    assert storage.num_reads == 20


def _read_by_chance(cached, parts, seed):
    rng = random.Random(seed)
    for _ in range(40):
        chosen = rng.sample(parts, 8)
        assert cached.read_many(chosen) == [content(int(part.key), 20_000) for part in chosen]


def test_many_processes_at_once_keep_the_limit(tmp_path):
    """Six processes read and write the same entries in a cache that is too small: right bytes,
    and never above the limit."""
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
    """Processes that fill the cache are killed (-9) at random moments, fifteen times: what is
    there afterwards is right."""
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


def test_what_a_killed_process_left_makes_room(storage, tmp_path):
    """Half files of storages that nobody has open go when the cache is full, like entries."""
    other = filled(tmp_path / "other" / "x", salt="other")
    _in_child(CachedReads(other, tmp_path / "cache").read_many, parts_of(other)[:1])
    (path,) = entries(tmp_path / "cache")
    path.with_suffix(".half").write_bytes(bytes(5000))
    CachedReads(storage, tmp_path / "cache", 20 * 1032).read_many(parts_of(storage))
    assert not unfinished_in(tmp_path / "cache")
