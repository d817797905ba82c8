"""What trackers are told of a run besides its metrics, from its record."""

from collections.abc import Mapping
from typing import Any

from prefect_torch_ddp.records.hiding import without_credentials
from prefect_torch_ddp.records.run_record import RunRecord


def given(record: RunRecord) -> Mapping[str, Any]:
    """Return what a run was given; nested."""
    return {
        **record.parameters,
        "options": record.options,
        "data_options": record.data_options,
        "arguments": record.arguments,
        "seed": record.seed,
    }


def evaluated(record: RunRecord) -> dict[str, float]:
    """Return what the evaluation measured, by names that begin with `evaluation/`; {}: nothing."""
    scores = {} if record.evaluation is None else record.evaluation.scores
    return {f"evaluation/{name}": value for name, value in scores.items()}


def facts(record: RunRecord) -> dict[str, str]:
    """Return where the run is and how it went, as far as it is known."""
    known = {
        "experiment": record.experiment,
        "workload": record.workload,
        "storage": without_credentials(record.storage),
        "state": record.state,
        "cause": record.cause,
        "flow_run_id": record.flow_run_id,
        "dataset": record.dataset and record.dataset.dataset_id,
        "checkpoint": record.checkpoint and record.checkpoint.uri,
        **{f"model.{name}": uri for name, uri in record.model_uris.items()},
    }
    return {name: str(value) for name, value in known.items() if value}
