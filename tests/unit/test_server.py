"""How long Prefect's embedded server may take to start, and that it sends no telemetry."""

import pytest
from prefect.context import SettingsContext, get_settings_context
from prefect.settings import PREFECT_SERVER_ANALYTICS_ENABLED as TELEMETRY
from prefect.settings import (
    PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS as LIMIT,
)
from prefect.settings import Settings, get_current_settings, temporary_settings

from prefect_torch_ddp.server import EMBEDDED_START_S, adjust_embedded_server

NAME = "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"


def test_what_the_user_has_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in what other processes are given of the settings, and in a copy of them."""
    for name in (NAME, TELEMETRY.name):
        monkeypatch.delenv(name)  # the tests' own
    with SettingsContext(profile=get_settings_context().profile, settings=Settings()):
        assert (LIMIT.value(), TELEMETRY.value()) == (20, True)
        adjust_embedded_server()
        assert (LIMIT.value(), TELEMETRY.value()) == (EMBEDDED_START_S, False)
        given = get_current_settings().to_environment_variables(exclude_unset=True)
        assert given[NAME] == str(EMBEDDED_START_S)
        assert given[TELEMETRY.name] == "False"
        with temporary_settings({"api.url": "http://127.0.0.1:9/api"}):
            assert (LIMIT.value(), TELEMETRY.value()) == (EMBEDDED_START_S, False)


@pytest.mark.parametrize("seconds", [20, 7])
def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch, seconds: int) -> None:
    """Prefect's own value too, if somebody has chosen it; from the environment or elsewhere."""
    with temporary_settings({LIMIT: seconds, TELEMETRY: True}):
        adjust_embedded_server()
        assert (LIMIT.value(), TELEMETRY.value()) == (seconds, True)
    monkeypatch.setenv(NAME, str(seconds))
    assert "startup_timeout_seconds" in Settings().server.ephemeral.model_fields_set
