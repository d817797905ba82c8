"""How a rank's death is put into words, and how many of its lines reach the run's log."""

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import dask
import pytest

from prefect_torch_ddp.gang.worker import rank_process
from prefect_torch_ddp.gang.worker.child import rank_environment
from prefect_torch_ddp.gang.worker.rank_process import (
    LAST_LINES,
    MOST_LINES,
    SHARE,
    RankLines,
    hint_at_death,
    oom_kills,
    words_of_death,
)
from prefect_torch_ddp.protocol.events import LogLine
from prefect_torch_ddp.protocol.rank import GangShape, RankPlace
from tests.support.launches import launch_of

EVENTS = "low 0\nhigh 0\nmax 31\noom 2\noom_kill 3\noom_group_kill 0\n"


KILLED = "was killed by SIGKILL (9) before its function returned"
MEMORY = (
    "probably because memory ran out: the kernel's OOM killer reports 1 kill in this Dask worker's "
    "control group since the rank started"
)


@pytest.mark.parametrize(
    ("status", "kills", "words"),
    [
        (3, 0, "left with exit code 3 before its function returned"),
        (-11, 0, "was killed by SIGSEGV (11) before its function returned"),
        (-9, 0, KILLED),
        (-9, 1, f"{KILLED}, {MEMORY}"),
    ],
)
def test_words_of_death(status: int, kills: int, words: str) -> None:
    """The text has the signal's name, and memory if the kernel counted kills."""
    assert words_of_death(status, kills) == words


def test_a_kill_that_nobody_explains_has_a_hint() -> None:
    """It names who may have sent the signal; nobody is blamed, least of all after a proof."""
    hint = hint_at_death(-9, 0, "node3")
    assert hint.startswith("who sent it isn't known: ")
    assert "`dmesg` on node3" in hint
    assert "\n" not in hint
    for status, kills in ((-9, 1), (-11, 0), (-15, 0), (3, 0)):
        assert not hint_at_death(status, kills, "node3")


@pytest.mark.parametrize("folder", ["jobs/worker.service", "."])
def test_the_kernels_count(tmp_path: Path, folder: str) -> None:
    """The count is of this process's group, or 0 without groups of version 2."""
    membership, events = tmp_path / "cgroup", tmp_path / folder / "memory.events"
    assert oom_kills(membership, tmp_path) == 0
    membership.write_text("4:memory:/old\n0::/jobs/worker.service\n")
    assert oom_kills(membership, tmp_path) == 0
    events.parent.mkdir(parents=True, exist_ok=True)
    events.write_text("oom 1\n")
    assert oom_kills(membership, tmp_path) == 0
    events.write_text(EVENTS, encoding="utf-8")
    assert oom_kills(membership, tmp_path) == 3
    assert isinstance(oom_kills(), int)


def test_a_rank_has_its_workers_environment_without_prefects_credentials() -> None:
    """Whatever Prefect itself holds for a secret; the rest stays, other people's keys with it."""
    from prefect.settings import Settings
    from prefect.settings.legacy import _get_settings_fields

    settings = _get_settings_fields(Settings)
    secret = {name for name in settings if name.isupper() and settings[name].is_secret}
    secret |= {"PREFECT_CLIENT_CUSTOM_HEADERS", "PREFECT_API_DATABASE_CONNECTION_URL"}
    assert {"PREFECT_API_KEY", "PREFECT_API_AUTH_STRING"} < secret
    kept = {"HOME": "/home/me", "AWS_SECRET_ACCESS_KEY": "own", "PREFECT_API_URL": "http://a/api"}
    made = rank_environment({**kept, **dict.fromkeys(secret, "hunter2")}, launch_of(1, 2))
    assert made.items() >= kept.items()
    assert "hunter2" not in made.values()


def test_a_rank_knows_its_place_in_an_uneven_gang() -> None:
    """Of five ranks four are on the first host."""
    place, shape = RankPlace(4, 0, 1, worker="tcp://b:1", host="b"), GangShape(5, 2, (4, 1))
    made = rank_environment({}, replace(launch_of(4, 5), place=place, shape=shape))
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    assert [made[name] for name in (*names, "GROUP_WORLD_SIZE")] == ["4", "5", "0", "1", "1", "2"]


def test_a_rank_has_not_the_malloc_of_a_dask_worker() -> None:
    """Dask's own setting would make its steps slower; another value is the user's."""
    dasks = dask.config.get("distributed.nanny.pre-spawn-environ")
    name = "MALLOC_TRIM_THRESHOLD_"
    made = rank_environment({name: str(dasks[name])}, launch_of(1, 2))
    assert name not in made
    assert rank_environment({name: "1000000"}, launch_of(1, 2))[name] == "1000000"


def numbered(first: int, last: int) -> list[str]:
    """Return lines with their numbers."""
    return [f"line {number}" for number in range(first, last)]


def texts(lines: list[LogLine]) -> list[str]:
    """Return what they say."""
    return [line.text for line in lines]


def test_a_flood_is_cut_counted_and_its_end_is_shown() -> None:
    """The first lines and the last ones, and how many were in between."""
    lines = RankLines(3, 2, None)
    assert texts([*lines.take(numbered(0, 600))]) == numbered(0, 600)
    assert texts([*lines.take(numbered(600, 20_000))]) == numbered(600, MOST_LINES)
    assert [*lines.tell_left_out()] == []
    note, *last = lines.end()
    num_left_out = 20_000 - MOST_LINES - LAST_LINES
    assert note == LogLine(3, logging.WARNING, f"{num_left_out:,} lines left out")
    assert texts(last) == numbered(20_000 - LAST_LINES, 20_000)


def test_periods_get_longer_while_the_flood_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each begins with the count of the one before, and admits a fifth as many lines."""
    now_s = 0.0
    monkeypatch.setattr(rank_process, "time", SimpleNamespace(monotonic=lambda: now_s))
    lines = RankLines(0, 2, None)
    counts: list[tuple[float, str]] = []
    passed: list[int] = []
    for second in range(400):
        now_s = float(second)
        counts += [(now_s, line.text) for line in lines.tell_left_out()]
        passed.append(len([*lines.take(numbered(0, 1_000))]))
    assert counts == [
        (11.0, "10,000 lines left out"),
        (32.0, "20,800 lines left out"),
        (73.0, "40,800 lines left out"),
        (154.0, "80,800 lines left out"),
        (315.0, "160,800 lines left out"),
    ]
    assert sum(passed) == MOST_LINES + len(counts) * MOST_LINES // SHARE


def test_prints_records_and_warnings_share_the_limit() -> None:
    """The note counts them together, and the last of them are shown at the end."""
    lines = RankLines(0, 2, None)
    assert len([*lines.take(numbered(0, 5_000))]) == MOST_LINES
    assert [*lines.take(["epoch 1"], logging.INFO, "user.code")] == []
    assert [*lines.take(["loss is nan"], logging.WARNING, "user.code")] == []
    note, *last = lines.end()
    assert note.text == f"{4_002 - LAST_LINES:,} lines left out"
    assert texts(last)[-2:] == ["epoch 1", "loss is nan"]
    assert last[-1] == LogLine(0, logging.WARNING, "loss is nan", "user.code")


@pytest.mark.parametrize(("world_size", "most"), [(1, 1_000), (8, 1_000), (64, 125), (512, 100)])
def test_large_gangs_have_less_for_each_rank(world_size: int, most: int) -> None:
    """The run's log belongs to all ranks together."""
    assert len([*RankLines(0, world_size, None).take(numbered(0, 5_000))]) == most
