"""How the death of a rank's process is put into words, and what the kernel says of it."""

import os
from pathlib import Path

import pytest

from prefect_torch_ddp.gang.worker.child import has_pidfd, rank_environment
from prefect_torch_ddp.gang.worker.rank_process import oom_kills, words_of_death
from prefect_torch_ddp.protocol.rank import CodePaths, GangShape, RankLaunch, RankPlace

EVENTS = "low 0\nhigh 0\nmax 31\noom 2\noom_kill 3\noom_group_kill 0\n"


KILLED = "was killed by SIGKILL (9) before its function returned"
MEMORY = (
    "probably for want of memory: the kernel's OOM killer reports 1 kill in this Dask worker's "
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
    """The signal by its name, and memory where the kernel counted kills."""
    assert words_of_death(status, kills) == words


@pytest.mark.parametrize("folder", ["jobs/worker.service", "."])
def test_the_kernels_count(tmp_path: Path, folder: str) -> None:
    """Of this process's own group, or of the mount where a container shows the host's path."""
    membership, events = tmp_path / "cgroup", tmp_path / folder / "memory.events"
    membership.write_text("4:memory:/old\n0::/jobs/worker.service\n")
    events.parent.mkdir(parents=True, exist_ok=True)
    events.write_text(EVENTS)
    assert oom_kills(membership, tmp_path) == 3


def test_a_kernel_that_counts_nothing(tmp_path: Path) -> None:
    """No control groups of version 2, no file, or no such line: nothing is said."""
    membership = tmp_path / "cgroup"
    assert oom_kills(membership, tmp_path) is None
    membership.write_text("4:memory:/jobs\n")
    assert oom_kills(membership, tmp_path) is None
    membership.write_text("0::/\n")
    assert oom_kills(membership, tmp_path) is None
    (tmp_path / "memory.events").write_text("oom 1\n")
    assert oom_kills(membership, tmp_path) is None
    assert oom_kills() is None or isinstance(oom_kills(), int)


@pytest.mark.parametrize("refusal", [OSError(38, "ENOSYS"), PermissionError(1, "EPERM")])
def test_a_system_without_pidfd_open(refusal: OSError, monkeypatch: pytest.MonkeyPatch) -> None:
    """An old kernel, or a sandbox that refuses: asked by calling, since Python always has it."""

    def refuse(_pid: int) -> int:
        raise refusal

    monkeypatch.setattr(os, "pidfd_open", refuse)
    assert not has_pidfd.__wrapped__()


def test_a_rank_has_its_workers_environment_without_prefects_credentials() -> None:
    """Whatever Prefect itself holds for a secret; the rest stays, other people's keys with it."""
    from prefect.settings import Settings
    from prefect.settings.legacy import _get_settings_fields

    launch = RankLaunch(
        place=RankPlace(1, 0, 0, 0, worker="tcp://a:1", host="a"),
        shape=GangShape(2, 1, (2,)),
        gang_id="g",
        attempt=1,
        max_restarts=0,
        master_addr="a",
        master_port=1,
        store_fd=None,
        process_group="default",
        backend="auto",
        rendezvous_timeout_s=20.0,
        agent_timeout_s=1.5,
        code_paths=CodePaths(),
        launcher="auto",
    )
    settings = _get_settings_fields(Settings)
    secret = {name for name in settings if name.isupper() and settings[name].is_secret}
    secret |= {"PREFECT_CLIENT_CUSTOM_HEADERS", "PREFECT_API_DATABASE_CONNECTION_URL"}
    assert {"PREFECT_API_KEY", "PREFECT_API_AUTH_STRING"} < secret
    kept = {"HOME": "/home/me", "AWS_SECRET_ACCESS_KEY": "own", "PREFECT_API_URL": "http://a/api"}
    made = rank_environment({**kept, **dict.fromkeys(secret, "hunter2")}, launch)
    assert made.items() >= {**kept, "RANK": "1", "WORLD_SIZE": "2"}.items()
    assert "hunter2" not in made.values()
