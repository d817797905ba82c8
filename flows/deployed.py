"""A flow for each example workload, whose run form shows and checks that workload's own options.

`deployments/prefect.yaml` deploys them; `python -m flows.deployed` serves them from this machine,
as `digits-laptop` and so on, without a work pool. A flow for your own workload is four lines
of parameters and three of flow; its options must be importable without torch, which neither flows
nor Dask workers load.
"""

import os
from typing import Annotated, Any, Literal

from prefect import flow, serve
from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy
from prefect_dask import DaskTaskRunner
from pydantic import Field

from flows.options import (
    Cifar10Data,
    Cifar10Training,
    GriddedData,
    GriddedTraining,
    LandUseData,
    LandUseTraining,
    PetNamesData,
    PetNamesTraining,
    TabularData,
    TabularTraining,
)
from prefect_torch_ddp import TrainParams, TrainReport, train_flow
from prefect_torch_ddp.examples.digits_options import DigitsData, DigitsTraining

Source = Annotated[str, Field(min_length=1)]


class DigitsParams(TrainParams):
    """Parameters of a run with the digits."""

    workload: Literal["prefect_torch_ddp.examples.digits"] = "prefect_torch_ddp.examples.digits"
    options: DigitsTraining = DigitsTraining()  # type: ignore[assignment]
    data_options: DigitsData = DigitsData()  # type: ignore[assignment]


class Cifar10Params(TrainParams):
    """Parameters of a run with CIFAR-10."""

    workload: Literal["flows.cifar10"] = "flows.cifar10"
    source: Source
    """The folder cifar-10-batches-bin or -py: a path, s3://bucket/prefix or a block."""
    options: Cifar10Training = Cifar10Training()  # type: ignore[assignment]
    data_options: Cifar10Data = Cifar10Data()  # type: ignore[assignment]


class PetNamesParams(TrainParams):
    """Parameters of a run with names."""

    workload: Literal["flows.pet_names"] = "flows.pet_names"
    source: Source
    """The folder of the list: a path, s3://bucket/prefix or a block."""
    options: PetNamesTraining = PetNamesTraining()  # type: ignore[assignment]
    data_options: PetNamesData = PetNamesData()  # type: ignore[assignment]


class LandUseParams(TrainParams):
    """Parameters of a run with aerial images."""

    workload: Literal["flows.land_use"] = "flows.land_use"
    source: Source
    """The folder of the classes' folders: a path, s3://bucket/prefix or a block."""
    options: LandUseTraining = LandUseTraining()  # type: ignore[assignment]
    data_options: LandUseData = LandUseData()  # type: ignore[assignment]


class GriddedParams(TrainParams):
    """Parameters of a run with a generated field."""

    workload: Literal["flows.gridded"] = "flows.gridded"
    options: GriddedTraining = GriddedTraining()  # type: ignore[assignment]
    data_options: GriddedData = GriddedData()  # type: ignore[assignment]


class TabularParams(TrainParams):
    """Parameters of a run with generated trips."""

    workload: Literal["flows.tabular"] = "flows.tabular"
    options: TabularTraining = TabularTraining()  # type: ignore[assignment]
    data_options: TabularData = TabularData()  # type: ignore[assignment]


@flow(name="train-ddp", task_runner=DaskTaskRunner())  # type: ignore[arg-type]
def digits(params: DigitsParams = DigitsParams()) -> TrainReport:  # noqa: B008 - it is frozen
    """Train on handwritten digits, which come with scikit-learn."""
    return train(params)


@flow(name="train-ddp", task_runner=DaskTaskRunner())  # type: ignore[arg-type]
def cifar10(params: Cifar10Params) -> TrainReport:
    """Train on CIFAR-10."""
    return train(params)


@flow(name="train-ddp", task_runner=DaskTaskRunner())  # type: ignore[arg-type]
def pet_names(params: PetNamesParams) -> TrainReport:
    """Train on names, and make up new ones."""
    return train(params)


@flow(name="train-ddp", task_runner=DaskTaskRunner())  # type: ignore[arg-type]
def land_use(params: LandUseParams) -> TrainReport:
    """Train on aerial images."""
    return train(params)


@flow(name="train-ddp", task_runner=DaskTaskRunner())  # type: ignore[arg-type]
def gridded(params: GriddedParams = GriddedParams()) -> TrainReport:  # noqa: B008 - it is frozen
    """Forecast a field on a grid, which Dask generates."""
    return train(params)


@flow(name="train-ddp", task_runner=DaskTaskRunner())  # type: ignore[arg-type]
def tabular(params: TabularParams = TabularParams()) -> TrainReport:  # noqa: B008 - it is frozen
    """Predict fares and tips of taxi trips, which Dask generates and cleans."""
    return train(params)


def train(params: TrainParams) -> TrainReport:
    """Do in the calling flow what train_flow does, with each option given."""
    given = {name: getattr(params, name) for name in params.model_fields_set | {"workload"}}
    options = params.model_dump(mode="json", include={"options", "data_options"})
    return train_flow.fn(TrainParams(**{**given, **options}))


if __name__ == "__main__":
    strategy = ConcurrencyLimitStrategy(os.environ.get("WHEN_BUSY", "ENQUEUE"))
    alone = ConcurrencyLimitConfig(limit=1, collision_strategy=strategy)
    made: list[Any] = [  # RunnerDeployments; typed as what an event loop would get
        digits.to_deployment("digits-laptop", concurrency_limit=alone),
        cifar10.to_deployment("cifar10-laptop", concurrency_limit=alone),
        pet_names.to_deployment("pet-names-laptop", concurrency_limit=alone),
        land_use.to_deployment("land-use-laptop", concurrency_limit=alone),
        gridded.to_deployment("gridded-laptop", concurrency_limit=alone),
        tabular.to_deployment("tabular-laptop", concurrency_limit=alone),
    ]
    serve(*made)
