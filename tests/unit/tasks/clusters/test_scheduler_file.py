"""The file in which a Dask scheduler wrote its address."""

from pathlib import Path

import pytest

from prefect_torch_ddp import ClusterParams, InvalidParamsError
from prefect_torch_ddp.tasks.clusters.scheduler_file import scheduler_address


def test_the_file_of_a_scheduler_has_its_address(tmp_path: Path) -> None:
    """A file that doesn't appear, and one of something else, are refused by name."""
    file = tmp_path / "scheduler.json"
    cluster = ClusterParams(scheduler_file=str(file))
    with pytest.raises(InvalidParamsError, match=r"scheduler.json' didn't appear within 0.1 s"):
        scheduler_address(cluster, 0.1)
    file.write_text('{"id": "x"}')
    with pytest.raises(InvalidParamsError, match=r"isn't the file of a Dask scheduler: KeyError"):
        scheduler_address(cluster, 0.1)
    file.write_text('{"address": "tcp://10.0.0.1:8786"}')
    assert scheduler_address(cluster, 0.1) == "tcp://10.0.0.1:8786"
    assert scheduler_address(ClusterParams(address="tcp://a:1"), 0.1) == "tcp://a:1"
    assert scheduler_address(ClusterParams(), 0.1) is None
