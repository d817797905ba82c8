"""TensorBoard's files of a flow whose ranks are killed have each step once."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from prefect_torch_ddp import list_runs, read_metrics
from tests.support.waiting import HANG_S

PAGE = Path(__file__).parents[3] / "docs" / "trackers.md"
pytestmark = [pytest.mark.extended, pytest.mark.timeout(600)]


@pytest.mark.long
def test_a_flow_writes_its_runs(prefect_api: str, tmp_path: Path) -> None:
    """Two runs of a task, in each of which a rank is killed three times, at different steps."""
    store = tmp_path / "store"
    command = [sys.executable, "-m", "tests.workloads.fed_flows", "task", str(store), "tensorboard"]
    folder = tmp_path / "logs"
    environment = {**os.environ, "TENSORBOARD_LOGGING_DIR": str(folder)}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=4 * HANG_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    runs = list_runs(store)
    assert sorted(runs.state) == ["completed"] * 2
    assert sorted(each.name for each in folder.iterdir()) == sorted(runs.run_id)
    for run_id in runs.run_id:
        rows = read_metrics(store, run_id, by="step")
        assert max(rows.attempt) == 4
        found = EventAccumulator(
            str(folder / run_id), size_guidance={"scalars": 0}, purge_orphaned_data=False
        )
        found.Reload()
        assert sorted(found.Tags()["scalars"]) == ["loss", "step_plus_rank"]
        for name in ("loss", "step_plus_rank"):
            points = [(each.step, each.value) for each in found.Scalars(name)]
            assert points == list(zip(rows.step, rows[name].astype(np.float32), strict=True))


@pytest.mark.long
@pytest.mark.usefixtures("prefect_api")
def test_the_program_of_the_page_has_its_run_in_the_tracker(tmp_path: Path) -> None:
    """docs/trackers.md's program feeds the tracker that it names, here TensorBoard for MLflow."""
    (code,) = re.findall(
        r"^```python\n(# tracked.*?)^```$",
        PAGE.read_text(encoding="utf-8"),
        re.MULTILINE | re.DOTALL,
    )
    program = tmp_path / "tracked.py"
    program.write_text(code.replace("mlflow", "tensorboard"), encoding="utf-8")
    environment = {**os.environ, "HOME": str(tmp_path)}
    subprocess.run([sys.executable, program], env=environment, timeout=4 * HANG_S, check=True)
    storage = tmp_path / "prefect-torch-ddp"
    (run_id,) = list_runs(storage).run_id
    found = EventAccumulator(str(storage / "tensorboard" / run_id))
    found.Reload()
    assert {"loss", "evaluation/accuracy"} <= set(found.Tags()["scalars"])
