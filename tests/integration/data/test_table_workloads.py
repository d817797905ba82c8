"""The workloads whose data Dask generates and writes: trained, and better than their baselines."""

import json
from pathlib import Path
from typing import Any

import pytest

from flows.generated import PAYMENTS
from prefect_torch_ddp import (
    ClusterParams,
    RankFailedError,
    TrainParams,
    TrainReport,
    train_flow,
)

pytest.importorskip("zarr")
pytest.importorskip("xarray")
pytestmark = [
    pytest.mark.extended,
    pytest.mark.timeout(400),
    pytest.mark.usefixtures("prefect_api"),
]


def trained(
    workload: str,
    world_size: int,
    cluster: ClusterParams,
    folder: Path,
    resume_from: str | None = None,
    **changed: Any,
) -> TrainReport:
    """Train on little data."""
    data_options, options = {
        "tabular": ({"days": 20}, {"epochs": 4}),
        "gridded": ({"times": 80}, {"epochs": 3, "global_batch_size": 32}),
    }[workload]
    return train_flow(
        TrainParams(
            workload=f"flows.{workload}",
            storage=str(folder),
            world_size=world_size,
            cluster=cluster,
            data_options=data_options,
            options=options | changed,
            resume_from=resume_from,
        )
    )


def card_of(report: TrainReport) -> dict[str, Any]:
    """Return the card of the exported model."""
    weights = Path(report.training.model_uris["model"])
    card: dict[str, Any] = json.loads(weights.with_suffix(".json").read_bytes())
    return card


@pytest.mark.long
@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.more), 2])
def test_gridded(world_size, shared: ClusterParams, tmp_path: Path) -> None:
    """Each lead time is forecast better than by persistence; the card has mean and std."""
    report = trained("gridded", world_size, shared, tmp_path)
    found = report.evaluation.metrics
    for hours in (6, 12, 18, 24):
        assert found[f"rmse_{hours}h"] < found[f"persistence_rmse_{hours}h"]
    assert found["rmse_6h"] < 0.6 * found["persistence_rmse_6h"]
    statistics = card_of(report)["dataset"]["statistics"]["height"]
    assert statistics["num_values"] == 80 * 32 * 64
    assert 5000 < statistics["mean"] < 5500
    assert statistics["num_not_finite"] == 0
    longer = trained("gridded", world_size, shared, tmp_path, report.training.run_id, epochs=4)
    assert longer.training.num_epochs == 4


def test_gridded_says_what_has_no_score(shared: ClusterParams, tmp_path: Path) -> None:
    """A test part that is too short is refused before a step is made; forecasts of a model that has
    diverged are counted."""
    with pytest.raises(RankFailedError, match="time has 8 positions, and a sample takes 14"):
        trained("gridded", 1, shared, tmp_path, times=80, leads=12, held_out=0.1)
    report = trained("gridded", 1, shared, tmp_path, epochs=1, lr=1e30)
    assert report.evaluation.metrics["persistence_rmse_6h"] > 0
    assert report.evaluation.metrics["non_finite_predictions_6h"] > 0
    assert "rmse_6h" not in report.evaluation.metrics


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.more), 2])
def test_tabular(world_size, shared: ClusterParams, tmp_path: Path) -> None:
    """Fares are better than the mean fare, tips than the majority, on days never trained on; the
    card has the texts of each code."""
    report = trained("tabular", world_size, shared, tmp_path)
    assert card_of(report)["categories"]["payment"]["values"] == list(PAYMENTS)
    assert report.evaluation.metrics["r2"] > 0.8
    assert report.evaluation.accuracy > report.evaluation.metrics["majority_accuracy"] + 0.02
    assert report.training.value["num_trips"] + report.evaluation.num_samples == 9_820
    longer = trained("tabular", world_size, shared, tmp_path, report.training.run_id, epochs=5)
    assert longer.training.num_epochs == 5
