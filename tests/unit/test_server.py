"""How long Prefect's embedded server may take to start."""

import pytest
from prefect.context import SettingsContext, get_settings_context
from prefect.settings import (
    PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS as LIMIT,
)
from prefect.settings import Settings, get_current_settings, temporary_settings

from prefect_torch_ddp.server import EMBEDDED_START_S, allow_slow_start

NAME = "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"


def test_nothing_set_by_the_user_means_300_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in what other processes are given of the settings, and in a copy of them."""
    monkeypatch.delenv(NAME)  # the tests' own
    with SettingsContext(profile=get_settings_context().profile, settings=Settings()):
        assert LIMIT.value() == 20
        allow_slow_start()
        assert LIMIT.value() == EMBEDDED_START_S
        given = get_current_settings().to_environment_variables(exclude_unset=True)
        assert given[NAME] == str(EMBEDDED_START_S)
        with temporary_settings({"api.url": "http://127.0.0.1:9/api"}):
            assert LIMIT.value() == EMBEDDED_START_S


@pytest.mark.parametrize("seconds", [20, 7])
def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch, seconds: int) -> None:
    """Prefect's own value too, if somebody has chosen it; from the environment or elsewhere."""
    with temporary_settings({LIMIT: seconds}):
        allow_slow_start()
        assert LIMIT.value() == seconds
    monkeypatch.setenv(NAME, str(seconds))
    assert "startup_timeout_seconds" in Settings().server.ephemeral.model_fields_set
