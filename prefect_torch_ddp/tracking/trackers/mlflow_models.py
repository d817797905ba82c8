"""Models in MLflow's registry: a version of each model that a completed run exported, once."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from prefect_torch_ddp.errors import ObjectNotFoundError, TrackerError
from prefect_torch_ddp.records.run_record import RunRecord, flat
from prefect_torch_ddp.storage.formats import CARD, DAMAGE, location
from prefect_torch_ddp.storage.protocol import Storage
from prefect_torch_ddp.tracking.trackers.history import COMPLETED

NAME_VARIABLE = "MLFLOW_REGISTERED_MODEL_NAME"
"""This package reads it; MLflow itself has no such setting."""
RUN_TAG = "prefect_torch_ddp.run_id"
URI_TAG = "prefect_torch_ddp.model_uri"
ON_CARD = ("file", "sha256", "num_bytes", "num_parameters", "step", "epoch", "metrics", "seed")
"""Of a card, what becomes tags of a version."""
MAX_TAG = 5000


class RegisteredModels:
    """Registers models of the runs of a storage under a name."""

    def __init__(self, mlflow: Any, storage: Storage, name: str) -> None:
        """Make it; nothing is asked yet.

        Args:
            mlflow: the package.
            storage: where the runs are.
            name: of the registered model. It is the run's model `model`, or its only one; others
                have their own name added, as in `cats-encoder`.
        """
        self._mlflow, self._client = mlflow, mlflow.MlflowClient()
        self._storage, self._name = storage, name

    def register(self, record: RunRecord, run: Any) -> None:
        """Make the versions that are missing.

        Args:
            record: of our run; nothing is done before it has completed.
            run: MLflow's run of it.

        Raises:
            StorageError: the storage can't be read.
            TrackerError: a card is damaged, or files of a model are gone; the others were
                registered.
            MlflowException, OSError: MLflow doesn't answer, or refuses.
        """
        if record.state != COMPLETED:
            return
        missing = []
        for model, uri in record.model_uris.items():
            is_main = model == "model" or len(record.model_uris) == 1
            name = self._name if is_main else f"{self._name}-{model}"
            if not self._has(name, record.run_id, uri):
                try:
                    self._add(name, record, run, uri)
                except ObjectNotFoundError as error:
                    # Its run's folder may have been deleted; the record stays.
                    missing.append(f"model {uri} isn't registered in MLflow: {error}")
        if missing:
            raise TrackerError("; ".join(missing))

    def _has(self, name: str, run_id: str, uri: str) -> bool:
        ours = f"name = '{name}' and tags.`{RUN_TAG}` = '{run_id}'"
        return any(
            each.tags.get(URI_TAG) == uri for each in self._client.search_model_versions(ours)
        )

    def _add(self, name: str, record: RunRecord, run: Any, uri: str) -> None:
        # The storage may have been moved since: its runs have the same keys.
        key = f"runs/{uri.rpartition('/runs/')[2]}"
        card_key = f"{key.rpartition('.')[0]}.json"
        card = read_card(self._storage, card_key)
        source = self._source(run, key, card_key)
        try:
            self._client.create_registered_model(name)
        except self._mlflow.MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        tags = {RUN_TAG: record.run_id, URI_TAG: uri, **dict(tags_of(card))}
        words = f"{card['workload']}, step {card['step']} of run {record.run_id}"
        about = {"tags": tags, "description": words, "await_creation_for": None}
        self._client.create_model_version(name, source, run.info.run_id, **about)

    def _source(self, run: Any, key: str, card_key: str) -> str:
        """Return where MLflow finds weights and card.

        In a bucket that is their folder itself. A server takes no folder of another machine, so
        files are copied to where the run has its artifacts.
        """
        if self._storage.local_folder is None:
            return location(self._storage, key.rpartition("/")[0])
        folder = key.rpartition(".")[0].partition("/models/")[2]
        for each in (key, card_key):
            path = self._storage.local_folder / each
            if not path.is_file():
                msg = f"there is no {each} in {self._storage.uri}"
                raise ObjectNotFoundError(msg)
            self._client.log_artifact(run.info.run_id, str(path), f"models/{folder}")
        return f"{run.info.artifact_uri}/models/{folder}"


def read_card(storage: Storage, key: str) -> Mapping[str, Any]:
    """Return a model card.

    Raises:
        NewerFormatError: a later version wrote it.
        StorageError: it can't be read.
        TrackerError: it is damaged.
    """
    try:
        card = CARD.from_bytes(storage.read(key), location(storage, key))
        card["workload"], card["step"]
    except DAMAGE as error:
        msg = f"the model card {key} in {storage.uri} is damaged: {error}"
        raise TrackerError(msg) from error
    return card


def tags_of(card: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what a version is tagged with."""
    given = {name: card.get(name) for name in ON_CARD}
    given["dataset"] = (card.get("dataset") or {}).get("dataset_id")
    given["options"] = json.dumps(card.get("options"), default=str)
    for name, value in flat(given):
        if value is not None:
            yield f"prefect_torch_ddp.{name}", str(value)[:MAX_TAG]
