"""Both UIs of a real Prefect server show the run form of a deployment."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.deployed import digits
from prefect_torch_ddp.run_form import OTHERS
from tests.support.browser import browser
from tests.support.servers import prefect_server_in
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]

SHOTS = Path(__file__).parents[3] / "build" / "screenshots"
UIS = {"v1": "", "v2": "/v2"}
WHOLE_FORM = 8000
"""The height of a window that shows all of it, in pixels."""
FIXED = "prefect_torch_ddp.examples.digits"
OF_WORKLOAD = f"""[...document.querySelectorAll("input, textarea, select, button")].filter(
    each => [each.value, each.innerText.trim()].includes("{FIXED}"))"""
CHOICES = """[...(%s[0].options ?? document.querySelectorAll("[role=option]"))].map(
    each => each.innerText.trim()).filter(text => text)"""
OPTIONAL = " (Optional)"
"""What both UIs append to a field's title."""
FIRST = [
    "Workload",
    "Ranks",
    "Options of the workload",
    "Options of the data",
    "Raw data",
    "Storage",
    "Resume from",
    "Seed",
    "Checkpoints",
    "Cluster",
]


def test_both_uis_show_ten_fields_and_then_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each field is there by its title, in order, and without angle brackets and backticks."""
    for folder in ("server", "browser"):
        (tmp_path / folder).mkdir()
    with (
        prefect_server_in(tmp_path / "server", ui=True) as api,
        temporary_settings({PREFECT_API_URL: api}),
        browser(tmp_path / "browser") as page,
    ):
        monkeypatch.setenv("PREFECT_API_URL", api)
        deployment_id: Any = digits.to_deployment("digits").apply()  # type: ignore[union-attr]
        with get_client(sync_client=True) as client:
            schema: Any = client.read_deployment(deployment_id).parameter_openapi_schema
        models = schema["definitions"]
        own, whole = list(titles_of(models, depth=1)), list(titles_of(models))
        *firsts, first_of_others = own[: len(FIRST) + 1]
        assert firsts == FIRST
        num_before = whole.index(first_of_others) + 1
        for ui, path in UIS.items():
            page.open("about:blank", "light")
            address = f"{api.removesuffix('/api')}{path}/deployments/deployment/{deployment_id}/run"
            page.open(address, "light", height=WHOLE_FORM)
            page.wait_for(f"document.body?.innerText.includes({json.dumps(whole[-1] + OPTIONAL)})")
            page.screenshot(SHOTS / f"form-{ui}.png")
            text = page.evaluate("document.body.innerText")
            assert not [line for line in text.splitlines() if set("<>`") & set(line)], ui
            before, others = (
                [line.removesuffix(OPTIONAL) for line in part.splitlines() if OPTIONAL in line]
                for part in text.split(OTHERS)
            )
            assert before == ["params", *whole[:num_before]], ui
            assert others == whole[num_before:], ui
            # The digits' workload is fixed: no field to write into, and no other choice.
            assert page.evaluate(f"{OF_WORKLOAD}.map(each => each.tagName)") in (
                ["SELECT"],
                ["BUTTON"],
            )
            page.evaluate(f"{OF_WORKLOAD}[0].click()")
            wait_until(lambda: page.evaluate(CHOICES % OF_WORKLOAD) == [FIXED])
            assert page.evaluate(f"{OF_WORKLOAD}[0].matches(':disabled')") is (ui == "v1")


def titles_of(models: dict[str, Any], name: str = "DigitsParams", depth: int = 2) -> Iterator[str]:
    """Yield the titles of a model's fields in the order of the form, with those of its groups."""
    fields = models[name]["properties"].values()
    for field in sorted(fields, key=lambda field: int(field["position"])):
        yield field["title"]
        if depth > 1 and "$ref" in field:
            yield from titles_of(models, field["$ref"].rpartition("/")[2], depth - 1)
