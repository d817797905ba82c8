"""How long Prefect's embedded server may take to start, and that it sends no telemetry."""

import os
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from prefect.context import SettingsContext, get_settings_context
from prefect.settings import (
    PREFECT_API_DATABASE_CONNECTION_URL,
    PREFECT_API_URL,
    PREFECT_HOME,
    PREFECT_SERVER_ALLOW_EPHEMERAL_MODE,
    Settings,
    get_current_settings,
    temporary_settings,
)
from prefect.settings import PREFECT_SERVER_ANALYTICS_ENABLED as TELEMETRY
from prefect.settings import PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS as LIMIT

from prefect_torch_ddp.server import (
    START_S,
    ServerError,
    _lock,
    adjust_embedded_server,
    check_embedded_server,
    refuse_strangers_server,
)

NAME = "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"


def test_what_the_user_has_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in what other processes are given of the settings, and in a copy of them."""
    for name in (NAME, TELEMETRY.name):
        monkeypatch.delenv(name)  # the tests' own
    with SettingsContext(profile=get_settings_context().profile, settings=Settings()):
        assert (LIMIT.value(), TELEMETRY.value()) == (20, True)
        adjust_embedded_server()
        assert (LIMIT.value(), TELEMETRY.value()) == (START_S, False)
        given = get_current_settings().to_environment_variables(exclude_unset=True)
        assert given[NAME] == str(START_S)
        assert given[TELEMETRY.name] == "False"
        with temporary_settings({"api.url": "http://127.0.0.1:9/api"}):
            assert (LIMIT.value(), TELEMETRY.value()) == (START_S, False)


@pytest.mark.parametrize("seconds", [20, 7])
def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch, seconds: int) -> None:
    """Prefect's own value too, if somebody has chosen it; from the environment or elsewhere."""
    with temporary_settings({LIMIT: seconds, TELEMETRY: True}):
        adjust_embedded_server()
        assert (LIMIT.value(), TELEMETRY.value()) == (seconds, True)
    monkeypatch.setenv(NAME, str(seconds))
    assert "startup_timeout_seconds" in Settings().server.ephemeral.model_fields_set


@pytest.fixture
def no_folder(tmp_path: Path) -> Path:
    """Name a folder that nobody can make, not even root."""
    (tmp_path / "file").touch()
    return tmp_path / "file" / "prefect"


@pytest.mark.usefixtures("_embedded")
def test_a_home_that_cannot_be_written_is_refused(
    no_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusal names the folder; a server that must fail isn't given more time to do so."""
    monkeypatch.delenv(NAME)
    monkeypatch.setenv("PREFECT_HOME", str(no_folder))
    with SettingsContext(profile=get_settings_context().profile, settings=Settings()):
        says = re.escape(f"{no_folder}: Not a directory. Set PREFECT_HOME to a folder that")
        with pytest.raises(ServerError, match=says):
            check_embedded_server()
        adjust_embedded_server()
        assert LIMIT.value() == 20


@pytest.mark.usefixtures("_embedded")
@pytest.mark.parametrize(
    "elsewhere",
    [
        {PREFECT_API_URL: "http://127.0.0.1:9/api"},
        {PREFECT_API_DATABASE_CONNECTION_URL: "postgresql+asyncpg://127.0.0.1:9/prefect"},
        {PREFECT_API_DATABASE_CONNECTION_URL: "postgresql+asyncpg://a:${PASSWORD}@b:9/prefect"},
        {PREFECT_SERVER_ALLOW_EPHEMERAL_MODE: False},
    ],
    ids=["a server", "a database", "a database with a password", "no embedded server"],
)
def test_a_home_that_no_server_needs_is_not_looked_at(
    no_folder: Path, elsewhere: dict[Any, str | bool]
) -> None:
    """A Prefect server that is configured, or a database, is somewhere else."""
    with temporary_settings({PREFECT_HOME: no_folder, **elsewhere}):
        check_embedded_server()


@pytest.mark.usefixtures("_embedded")
def test_a_home_is_made_and_left_empty(tmp_path: Path) -> None:
    """What tries to write there leaves no file."""
    with temporary_settings({PREFECT_HOME: tmp_path / "a" / "b"}):
        check_embedded_server()
    assert list((tmp_path / "a" / "b").iterdir()) == []


@pytest.fixture
def _embedded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Prefect embed a server, as without any configuration."""
    monkeypatch.setenv(PREFECT_SERVER_ALLOW_EPHEMERAL_MODE.name, "true")


@pytest.mark.parametrize(("owner", "is_refused"), [(12345, True), (os.getuid(), False), (0, False)])
def test_a_server_of_another_user_is_not_used(owner: int, is_refused: bool, tmp_path: Path) -> None:
    """On a login node its database, and who may cancel a run, is somebody else's."""
    table = tmp_path / "tcp"
    line = "   0: 0100007F:{port:04X} 00000000:0000 {state} 00000000:00000000 00:00000000 00000000"
    elsewhere = line.replace("0100007F:", "0200007F:", 1)
    lines = [
        f"{line.format(port=4200, state='01')} 777 0 1 1",  # a connection
        f"{line.format(port=4201, state='0A')} 777 0 1 1",
        f"{elsewhere.format(port=4200, state='0A')} 777 0 1 1",
        f"{line.format(port=4200, state='0A')} {owner} 0 1 1",
    ]
    table.write_text("\n".join(["  sl  local_address rem_address   st", *lines]), "ascii")
    tables = [str(tmp_path / "none"), str(table)]
    says = "at 127.0.0.1:4200 is that of user 12345: .* `export PREFECT_SERVER_API_PORT=4201`"
    with pytest.raises(ServerError, match=says) if is_refused else nullcontext():
        refuse_strangers_server(4200, tables)


@pytest.mark.parametrize("has_locks", [True, False])
def test_a_home_without_locks_is_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *, has_locks: bool
) -> None:
    """Commands started servers at the same time, one of which failed, and nothing said why."""
    (tmp_path / "server.lock").touch()
    # The kernel refuses the lock of an O_PATH, as of a file on some NFS.
    flags = os.O_RDONLY if has_locks else os.O_PATH
    with os.fdopen(os.open(tmp_path / "server.lock", flags), "rb", buffering=0) as file:
        _lock(file, tmp_path)
    said = capsys.readouterr().err
    assert bool(said) is not has_locks
    if said:
        assert said.startswith(f"{tmp_path} can't be locked (Bad file descriptor): commands that")
        assert "Set PREFECT_HOME to a folder" in said
