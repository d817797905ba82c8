"""A run record's beginning and end: what was given, without secrets, and what was evaluated."""

import hashlib
import math
from collections import Counter
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from typing import Any, Literal

from prefect.exceptions import CancelledRun, TerminationSignal
from prefect.logging import get_run_logger
from prefect.runtime import deployment, flow_run
from prefect.utilities.context import get_task_and_flow_run_ids
from pydantic_core import to_json, to_jsonable_python

from prefect_torch_ddp.checkpoint.manifest import checkpoint_ref, live_manifests, ranked
from prefect_torch_ddp.data.datasets.dataset_manifest import read_dataset_manifest
from prefect_torch_ddp.errors import (
    GangCancelledError,
    InvalidParamsError,
    StorageError,
    TaskCancelled,
)
from prefect_torch_ddp.params import ContextParams, TrainParams
from prefect_torch_ddp.records.hiding import HIDDEN, hidden, without_credentials
from prefect_torch_ddp.records.run_record import (
    UNUSABLE,
    RunRecord,
    RunState,
    find_run_record,
    flat,
    read_run_record,
    recorded_dataset,
    write_run_record,
)
from prefect_torch_ddp.results import CheckpointRef, DatasetReport, Report
from prefect_torch_ddp.storage.formats import build_model
from prefect_torch_ddp.storage.protocol import Storage
from prefect_torch_ddp.tracking.digest import value_digest

CANCELS = (
    GangCancelledError,
    TaskCancelled,
    CancelledRun,
    KeyboardInterrupt,
    TerminationSignal,
)
"""What ends a run that is cancelled: it has not failed."""
MAX_CAUSE = 500
MAX_CHARACTERS = 2_000
"""Of one option or argument, as JSON."""
MAX_OF_CLUSTER = 10_000
"""Of `cluster`: the pods of `deployments/clusters/kubernetes.yaml` are 1,900."""
MAX_FILES = 100_000
MAX_SPLITS = 10
LEFT_OUT = "(not on record: "


def experiment_of(*names: str) -> str:
    """Return what the runs of one training have in common: flow, deployment, and some names.

    A name such as a task's is not enough: other projects use the same storage and the same names,
    and `latest`, `best` and the page's comparison would take their runs.
    """
    return "/".join(filter(None, (flow_run.flow_name, deployment.name, *names)))


def draft_record(
    params: ContextParams | None, run_id: str, experiment: str, storage: Storage, **more: Any
) -> RunRecord:
    """Return what is known of a run before it begins; secrets in it are hidden."""
    task_run_id, flow_run_id = get_task_and_flow_run_ids()
    fields: dict[str, Any] = {
        "run_id": run_id,
        "experiment": experiment,
        "began": datetime.now(UTC),
        "flow_run_id": flow_run_id and str(flow_run_id),
        "task_run_id": task_run_id and str(task_run_id),
        "storage": storage.uri,
        **more,
    }
    if params is not None:
        given = params.model_dump(exclude={"seed", "options", "data_options"})
        known = values_for_record({**given, "storage": storage.uri})
        if "cluster" in given:
            known["cluster"] = value_for_record(given["cluster"], "cluster", MAX_OF_CLUSTER)
        fields |= {
            "parameters": known,
            "options": values_for_record(params.options),
            "seed": params.seed,
            "best_metric": params.checkpoint.best_metric,
            "best_mode": params.checkpoint.best_is,
        }
    return RunRecord(**fields)


def complete_record(
    storage: Storage, run_id: str, experiment: str, evaluation: Report, checkpoint: CheckpointRef
) -> RunRecord | None:
    """Put on record what was evaluated; None if there is no record, or the storage fails."""
    logger = get_run_logger()
    try:
        record = find_run_record(storage, run_id, experiment)
        if record is not None:
            large: dict[str, Any] = {"confusion_matrix": (), "worst_samples": (), "texts": {}}
            found = evaluation.model_copy(update=large)
            changes: dict[str, Any] = {"evaluation": found, "checkpoint": checkpoint}
            # It may have failed before, and was tried again.
            changes |= {"state": "completed", "cause": "", "is_tried_again": False}
            record = record.model_copy(update=changes)
            write_run_record(storage, record)
    except StorageError as error:
        logger.warning("the evaluation could not be recorded: %s", error)
        return None
    return record


def end_run_record(
    storage: Storage, record: RunRecord, error: BaseException, *, is_tried_again: bool
) -> RunRecord:
    """Put on record how a run ended outside of its training.

    Raises:
        StorageError: the storage fails.
    """
    changes: dict[str, Any] = {"state": state_of(error), "cause": cause_of(error)}
    changes |= {"is_tried_again": is_tried_again, "ended": record.ended or datetime.now(UTC)}
    # If the task that trained was killed, the record lacks the newest ones.
    changes["checkpoint"], changes["best_value"] = stored_checkpoints(storage, record)
    record = record.model_copy(update=changes)
    write_run_record(storage, record)
    return record


def stored_checkpoints(
    storage: Storage, record: RunRecord
) -> tuple[CheckpointRef | None, float | None]:
    """Return a run's newest checkpoint and best value, of those that are stored and on record.

    Those of a newer format are left out.

    Raises:
        StorageError: the storage can't be read.
    """
    there = live_manifests(storage, record.run_id, allow_newer=True)
    newest = checkpoint_ref(storage, there[-1]) if there else record.checkpoint
    values = [record.best_value]
    if metric := record.best_metric:
        values += [each.metrics[metric] for each in ranked(there, metric, record.best_mode)]
    return newest, best_of(record.best_mode, *values)


def best_of(mode: Literal["max", "min"], *values: float | None) -> float | None:
    """Return the best of the values that are known and finite."""
    found = [each for each in values if each is not None and math.isfinite(each)]
    pick = max if mode == "max" else min
    return pick(found) if found else None


def state_of(error: BaseException | None) -> RunState:
    """Return the state of a run by what ended it, if anything did."""
    if error is None:
        return "completed"
    return "cancelled" if isinstance(error, CANCELS) else "failed"


def cause_of(error: BaseException | None) -> str:
    """Say in a line, without credentials, why a training ended; nothing if it ended well."""
    if error is None:
        return ""
    first = without_credentials(str(error).partition("\n")[0])
    return f"{type(error).__name__}: {first}"[:MAX_CAUSE]


def recorded_params(
    storage: Storage,
    run_id: str,
    replaced: Collection[str] = (),
    given: Collection[str] = (),
) -> tuple[TrainParams, DatasetReport, str]:
    """Return the parameters of a run of train_flow, its dataset and its experiment.

    Args:
        storage: of the run.
        run_id: of the run.
        replaced: dotted names of parameters that the caller replaces. What isn't on record of them
            is left out, also below one of these names.
        given: dotted names of groups that the caller adds values to. One that isn't on record as a
            whole is left out too. If only some of its values aren't on record, they are still
            needed: the group keeps them.

    Raises:
        InvalidParamsError: it has no record, or an option was hidden; or as `recorded_dataset`.
    """
    record = read_run_record(storage, run_id)
    dataset = recorded_dataset(record)
    known = {"options": record.options, "data_options": record.data_options, **record.parameters}
    values = ((name, str(value)) for name, value in flat(known))
    lacks = [name for name, value in values if HIDDEN in value or LEFT_OUT in value]
    if needed := [name for name in lacks if name not in given and not _is_of(name, replaced)]:
        why = f"{needed} is not on record: it looks like a secret, is long, or no plain value"
        msg = f"run {run_id} {UNUSABLE}: {why}"
        raise InvalidParamsError(msg)
    params, _ = build_model(TrainParams, {**_without(known, lacks), "seed": record.seed})
    return params, dataset, record.experiment


def _is_of(name: str, groups: Collection[str]) -> bool:
    """Tell whether a dotted name is one of the others, or below one."""
    return any(name == group or name.startswith(f"{group}.") for group in groups)


def _without(values: Mapping[str, Any], names: Collection[str], prefix: str = "") -> dict[str, Any]:
    """Return nested values without those of these dotted names."""
    return {
        name: _without(value, names, f"{prefix}{name}.") if isinstance(value, Mapping) else value
        for name, value in values.items()
        if f"{prefix}{name}" not in names
    }


def split_of(storage: Storage, dataset: DatasetReport | None) -> Mapping[str, int]:
    """Count the files in each folder at the top of a dataset; nothing if there are many."""
    if dataset is None or dataset.num_files > MAX_FILES:
        return {}
    manifest = read_dataset_manifest(storage, dataset.dataset_id)
    keys = [file.key for file in manifest.files] if manifest else []
    counts = Counter(key.partition("/")[0] for key in keys if "/" in key)
    return counts if len(counts) <= MAX_SPLITS else {}


def values_for_record(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values as JSON has them; what JSON can't hold, or is long, is named by its type.

    What is named like a secret is hidden, as are credentials in a URL.
    """
    return {str(name): value_for_record(value, str(name)) for name, value in values.items()}


def value_for_record(value: Any, name: str = "", max_characters: int = MAX_CHARACTERS) -> Any:
    """Return one value as `values_for_record` does.

    What is only named has a digest of its content, which tells two apart.
    """
    # Sets of texts have another order in each process.
    ordered = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
    try:
        jsonable = to_jsonable_python(ordered, fallback=_named, inf_nan_mode="constants")
        as_json = to_json(jsonable)
    except Exception:  # noqa: BLE001 - a user's own class may raise anything here
        return hidden(name, _named(value))
    if len(as_json) > max_characters:
        return _type_name(value, hashlib.sha256(as_json).hexdigest())
    return hidden(name, jsonable)


def _named(value: Any) -> str:
    try:
        return _type_name(value, value_digest(value))
    except Exception:  # noqa: BLE001 - one that can't be pickled, such as a lock, has no digest
        return _type_name(value, "")


def _type_name(value: Any, digest: str) -> str:
    size = f" of {len(value)}" if isinstance(value, str | bytes | list | tuple | dict) else ""
    short = f", {digest[:8]}" if digest else ""
    return f"{LEFT_OUT}{type(value).__qualname__}{size}{short})"
