"""The table of `make bench-peers`, from runs as they are recorded."""

import json
from pathlib import Path

import pytest

from tests.benchmarks.peers import figures
from tests.benchmarks.peers.figures import Recorded

BEGAN = 1000.0


def record(
    folder: Path,
    attempts: list[tuple[int, float, range]],
    *,
    kills: tuple[float, ...] = (),
    ended: float = 100.0,
    exit_code: int | None = None,
    log: str = "",
) -> Recorded:
    """Write what a run leaves: a step takes 100 ms, one after a multiple of 10 another 50 ms."""
    lines = []
    for pid, began, steps in attempts:
        at = BEGAN + began
        for step in steps:
            lines.append(f"{at} {step} {2e-5 if step % 5 == 0 else 0.0} {pid}\n")
            at += 0.1 if step % 10 else 0.15
    folder.mkdir()
    (folder / "marks").write_text("".join(lines))
    (folder / "log").write_text(log)
    observed = {
        "began": BEGAN,
        "ended": BEGAN + ended,
        "exit_code": exit_code,
        "limit_s": 100.0,
        "kills": [BEGAN + kill for kill in kills],
        "memory_mb": {"ranks": 500.0, "others": 100.0},
    }
    (folder / "run.json").write_text(json.dumps(observed))
    return figures.read(folder)


def test_a_job_has_its_times(tmp_path: Path) -> None:
    """Start, step, whole job, stall of a save and report come from the marks."""
    job = record(tmp_path / "job", [(1, 2.5, range(1, 101))], ended=20.0, exit_code=0)
    assert figures.start_s(job) == 2.5
    assert figures.step_ms(job) == pytest.approx(100, abs=0.1)
    assert figures.stall_ms(job, 10) == pytest.approx(50, abs=0.1)
    assert figures.whole_s(job) == 20.0
    assert figures.report_us(job) == pytest.approx(20)


def test_steps_done_again_are_not_useful(tmp_path: Path) -> None:
    """Each step counts once, and a restart lasts from the kill to the first step of new ranks."""
    attempts = [(1, 2.0, range(1, 41)), (2, 32.0, range(21, 61)), (3, 70.0, range(51, 61))]
    killed = record(tmp_path / "killed", attempts, kills=(30.0, 60.0, 90.0))
    assert figures.useful(killed) == 60
    assert figures.redone(killed) == 30
    assert figures.restarts_s(killed) == [2.0, 10.0]
    assert figures.lost_s(killed) == pytest.approx(6 + 10 * 0.1)


def test_goodput_does_not_change_with_the_speed_of_the_machine(tmp_path: Path) -> None:
    """A run with kills whose steps happened to be twice as fast isn't better for that."""
    fast = record(tmp_path / "fast", [(1, 0.0, range(1, 401)), (2, 50.0, range(401, 801))])
    slow = [f"{BEGAN + 0.2 * (step - 1)} {step} 0.0 1\n" for step in range(1, 501)]
    record(tmp_path / "slow", [])
    (tmp_path / "slow" / "marks").write_text("".join(slow))
    found = figures.column(figures.Runs([], figures.read(tmp_path / "slow"), fast), 10)
    assert found["goodput"] == "1.600"
    assert found["goodput at each run's own speed"] == "0.800"


def test_steps_after_the_time_do_not_count(tmp_path: Path) -> None:
    """A run is stopped a moment later than its time is over."""
    late = record(tmp_path / "late", [(1, 99.95, range(1, 9))])
    assert figures.useful(late) == 1


def test_a_peer_that_never_starts_is_in_the_table(tmp_path: Path) -> None:
    """Its figures are dashes, its goodput too, and its log says why."""
    log = "loading\nModuleNotFoundError: gone\n"
    runs = {}
    for name in ("job", "long", "killed"):
        runs[name] = record(tmp_path / name, [], exit_code=1, log=log)
        (tmp_path / name / "marks").unlink()
        runs[name] = figures.read(tmp_path / name)
    found = figures.column(figures.Runs([runs["job"]], runs["long"], runs["killed"]), 10)
    assert found["start, s"] == found["whole job, s"] == "-"
    assert found["goodput"] == found["goodput at each run's own speed"] == "-"
    assert "| start, s | - | - |" in figures.table({"a": found, "b": found})


def test_a_table_has_medians_and_spread(tmp_path: Path) -> None:
    """A figure of several runs is the median, with the least and the most."""
    jobs = [
        record(tmp_path / f"{n}", [(1, n, range(1, 101))], ended=20.0 + n, exit_code=0)
        for n in (1, 2, 4)
    ]
    long = record(tmp_path / "long", [(1, 1.0, range(1, 901))])
    log = "fine\nrank 1 was killed by SIGKILL\nrank 1 was killed by SIGKILL\n"
    attempts = [(1, 1.0, range(1, 281)), (2, 31.0, range(271, 641))]
    killed = record(tmp_path / "killed", attempts, kills=(30.0,), log=log)
    found = figures.column(figures.Runs(jobs, long, killed), 10)
    assert found["start, s"] == "2.0 (1.0 to 4.0)"
    assert found["whole job, s"] == "22.0 (21.0 to 24.0)"
    assert found["goodput"] == found["goodput at each run's own speed"] == f"{640 / 900:.3f}"
    assert found["steps done again, a kill"] == "10"
    assert found["restarts of kills"] == "1 of 1"
    assert figures.said(killed) == ["rank 1 was killed by SIGKILL"]


def test_lines_of_user_code_are_those_that_do_something() -> None:
    """Docstrings, comments, blank lines and imports aren't counted."""
    source = '"""What.\n\nMore.\n"""\n\nfrom a import (\n    b,\n)\n\n# why\nx = b(\n    1\n)\n'
    assert figures.code_lines(source) == 3
