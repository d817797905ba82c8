"""A flow is retried after its `ddp_task` has ended: the README's example, as a script."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from prefect_torch_ddp import list_runs
from prefect_torch_ddp.storage.directory import DirectoryStorage
from tests.unit.test_pages import EXAMPLES

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("prefect_api")]

LATER = """
    value = fit.submit(lr=0.1).result()
    print(f"run {flow_run.run_count} got {value}")
    if flow_run.run_count == 1:
        raise ConnectionError("a later step fails once")
    return value
"""
CHANGES = {
    "import torch\n": "import torch\nfrom prefect.runtime import flow_run\n",
    "}))\n": "}), retries=1)\n",
    "    return fit.submit(lr=0.1).result()\n": LATER,
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "num_attempts", "says"),
    [
        pytest.param(
            'run_key="fit", persist_result=True', 1, "in state Cached", id="its value is kept"
        ),
        pytest.param(
            'run_key="fit"',
            2,
            "resuming from the checkpoint of step 80",
            id="its value isn't kept",
            marks=pytest.mark.more,
        ),
    ],
)
def test_readmes_task_when_its_flow_is_retried_after_its_end(
    tmp_path: Path, options: str, num_attempts: int, says: str
) -> None:
    """Both runs of the flow get the same value, and a kept value starts no gang."""
    (code,) = (example for example in EXAMPLES if "@ddp_task" in example)
    for old, new in {**CHANGES, "retries=2": options}.items():
        assert code.count(old) == 1, old
        code = code.replace(old, new)
    script = tmp_path / "line.py"
    script.write_text(code, encoding="utf-8")
    env = {**os.environ, "HOME": str(tmp_path)}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200, check=True)

    values = re.findall(r"^run (\d) got (.*)$", done.stdout, re.MULTILINE)
    assert [number for number, _ in values] == ["1", "2"]
    assert values[0][1] == values[1][1]
    assert says in done.stderr
    storage = DirectoryStorage(tmp_path / "prefect-torch-ddp")
    (run,) = list_runs(storage).itertuples()
    assert (run.state, run.attempts) == ("completed", num_attempts)
