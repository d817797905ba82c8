"""What the kernel says of a killed process: parsed from its own formats, read where it can
be."""

from pathlib import Path

import pytest

from prefect_torch_ddp.gang.worker.oom import OomWatch, count_of_kills, find_kill, memory_group

V2_EVENTS = "low 0\nhigh 0\nmax 31\noom 2\noom_kill {kills}\noom_group_kill 0\n"
V1_CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n"
LOG = (
    "6,900,900000000,-;eth0: link up\n"
    "3,901,1000000000,-;Out of memory: Killed process 41 (python) total-vm:9kB, anon-rss:2048kB, file-rss:0kB, shmem-rss:0kB\n"
    "3,902,2000000000,-;Memory cgroup out of memory: Killed process 42 (python3 (x)) total-vm:90kB, anon-rss:1048576kB, "
    "file-rss:0kB, shmem-rss:0kB, UID:0 pgtables:1kB oom_score_adj:0\n SUBSYSTEM=memory\n"
)


@pytest.mark.parametrize(
    ("text", "group"),
    [
        ("0::/user.slice/worker.service\n", ("user.slice/worker.service", "memory.events")),
        ("5:cpu:/x\n4:memory:/jobs/a\n0::/\n", ("memory/jobs/a", "memory.oom_control")),
        ("4:hugetlb,memory:/\n", ("memory/", "memory.oom_control")),
        ("5:cpu:/x\n", None),
        ("", None),
    ],
)
def test_the_group_that_counts_is_found(text: str, group: tuple[str, str] | None) -> None:
    """By both versions of control groups, and both at once."""
    assert memory_group(text) == group


def test_counts() -> None:
    """Both versions write the same line; old kernels have none."""
    assert count_of_kills(V2_EVENTS.format(kills=3)) == 3
    assert count_of_kills(V1_CONTROL.format(kills=0)) == 0
    assert count_of_kills("oom_kill_disable 0\nunder_oom 0\n") is None


def test_the_log_names_the_process() -> None:
    """With what it held, and whose limit it was; another process, and an older life of the
    number, are left out."""
    assert (
        find_kill(LOG, 41, 0)
        == "out of memory of the whole machine: killed process 41 (python), which held 2 MiB"
    )
    assert "in its control group" in (find_kill(LOG, 42, 1999) or "")
    assert "1024 MiB" in (find_kill(LOG, 42, 1999) or "")
    assert find_kill(LOG, 42, 2001) is None
    assert find_kill(LOG, 4, 0) is None


@pytest.mark.parametrize(
    ("line", "name", "text"),
    [
        ("0::/w", "w/memory.events", V2_EVENTS),
        ("4:memory:/w", "memory/w/memory.oom_control", V1_CONTROL),
    ],
)
def test_a_count_that_grew_is_reported(tmp_path: Path, line: str, name: str, text: str) -> None:
    """Since the rank started; a count that stayed says nothing."""
    membership, counter = tmp_path / "membership", tmp_path / name
    membership.write_text(line)
    counter.parent.mkdir(parents=True)
    counter.write_text(text.format(kills=1))
    watch = OomWatch(tmp_path, tmp_path / "no log", membership)
    assert watch.report(42) is None
    counter.write_text(text.format(kills=2))
    assert "the kernel's OOM killer reports 1 kill for want of memory" in (watch.report(42) or "")


def test_the_log_goes_before_the_count(tmp_path: Path) -> None:
    """It speaks of this very process."""
    log, membership = tmp_path / "log", tmp_path / "membership"
    membership.write_text("")
    log.write_text(LOG.replace("2000000000", str(10**18)))
    report = OomWatch(tmp_path, log, membership).report(42)
    assert report is not None
    assert report.startswith("the kernel's OOM killer reports: out of memory in its control group")


def test_this_system_can_be_asked() -> None:
    """Whatever it has or lacks: no error, and nothing is said of a process that lives."""
    import os

    assert OomWatch().report(os.getpid()) is None


def test_a_system_without_any_of_it(tmp_path: Path) -> None:
    """No control groups, no log: nothing is said."""
    assert OomWatch(tmp_path, tmp_path / "log", tmp_path / "membership").report(1) is None
