"""Owns the manifest that makes a checkpoint complete, and what is read of a run's checkpoints without torch."""

import hashlib
import json
import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Self

from prefect_torch_ddp.checkpoint.beginnings import void_test
from prefect_torch_ddp.checkpoint.keys import checkpoints_prefix, manifest_key
from prefect_torch_ddp.errors import CheckpointError, ObjectNotFoundError
from prefect_torch_ddp.results import CheckpointRef
from prefect_torch_ddp.storage.protocol import Storage

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ManifestObject:
    """One object of a checkpoint."""

    name: str
    key: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """All that a checkpoint consists of."""

    run_id: str
    step: int
    attempt: int
    epoch: int
    position: Mapping[str, Any]
    """Where the training goes on; plain JSON values, understood by who wrote them."""
    world_size: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The newest values at the time."""
    objects: tuple[ManifestObject, ...] = ()

    def find(self, name: str) -> ManifestObject | None:
        """Return the object of that name."""
        return next((item for item in self.objects if item.name == name), None)

    def as_bytes(self) -> bytes:
        """Return it as JSON."""
        metrics = {name: value if math.isfinite(value) else str(value) for name, value in self.metrics.items()}
        values = {**asdict(self), "metrics": metrics}
        return json.dumps({**values, "sha256": _digest(values)}, indent=1, allow_nan=False).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read the JSON back; raises ValueError, TypeError or KeyError on anything else."""
        values = json.loads(data)
        if values.pop("sha256") != _digest(values):
            msg = "its content isn't that of its sha256"
            raise ValueError(msg)
        objects = tuple(ManifestObject(**item) for item in values.pop("objects"))
        metrics = {str(name): float(value) for name, value in values.pop("metrics").items()}
        return cls(**values, metrics=metrics, objects=objects)


def read_manifest(storage: Storage, run_id: str, step: int) -> Manifest:
    """Return a checkpoint's manifest.

    Raises:
        CheckpointError: there is no such checkpoint, or its manifest is damaged.
    """
    key = manifest_key(run_id, step)
    try:
        manifest = Manifest.from_bytes(storage.read(key))
    except ObjectNotFoundError as error:
        msg = f"run {run_id} has no checkpoint of step {step}: there is no {key} in {storage.uri}"
        raise CheckpointError(msg) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        msg = f"the manifest {key} is damaged: {error!r}"
        raise CheckpointError(msg) from error
    if (manifest.run_id, manifest.step) != (run_id, step):
        msg = f"the manifest {key} is that of step {manifest.step} of run {manifest.run_id}"
        raise CheckpointError(msg)
    return manifest


def _digest(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True, allow_nan=False).encode()).hexdigest()


def all_manifests(storage: Storage, run_id: str, faults: list[str] | None = None) -> list[Manifest]:
    """Return the manifests that there are, by step; a damaged one is left out with a warning, and added to the faults."""
    prefix = checkpoints_prefix(run_id)
    keys = [found.key for found in storage.list(prefix) if found.key.endswith("/manifest.json")]
    manifests = []
    for key in keys:
        step = key.removeprefix(prefix).removesuffix("/manifest.json").removeprefix("step-")
        try:
            manifests.append(read_manifest(storage, run_id, int(step)))
        except (CheckpointError, ValueError) as error:
            if not isinstance(error.__cause__, ObjectNotFoundError):  # else it was deleted between the listing and now
                logger.warning("checkpoint left out: %s", error)
                if faults is not None:
                    faults.append(str(error))
    return sorted(manifests, key=lambda manifest: manifest.step)


def list_manifests(storage: Storage, run_id: str, faults: list[str] | None = None) -> list[Manifest]:
    """Return the manifests of a run's complete checkpoints, by step; damaged ones are left out with a warning, and void ones."""
    manifests = all_manifests(storage, run_id, faults)
    is_void = void_test(storage, run_id)
    return [manifest for manifest in manifests if not is_void(manifest.attempt, manifest.step)]


def checkpoint_ref(storage: Storage, manifest: Manifest) -> CheckpointRef:
    """Return what results say of a checkpoint."""
    return CheckpointRef(
        step=manifest.step,
        attempt=manifest.attempt,
        uri=f"{storage.uri.rstrip('/')}/{manifest_key(manifest.run_id, manifest.step)}",
        metrics={name: value for name, value in manifest.metrics.items() if math.isfinite(value)},
    )


def list_checkpoints(storage: Storage, run_id: str) -> list[CheckpointRef]:
    """Return a run's complete checkpoints, by step."""
    return [checkpoint_ref(storage, manifest) for manifest in list_manifests(storage, run_id)]


def newest(storage: Storage, run_id: str) -> CheckpointRef | None:
    """Return a run's newest complete checkpoint."""
    return next(reversed(list_checkpoints(storage, run_id)), None)


def best(storage: Storage, run_id: str, metric: str, mode: Literal["max", "min"] = "max") -> CheckpointRef | None:
    """Return a run's best checkpoint by a metric, the oldest of equals (see `ranked`); None where none has the metric."""
    order = ranked(list_manifests(storage, run_id), metric, mode)
    return checkpoint_ref(storage, order[0]) if order else None


def ranked(manifests: Iterable[Manifest], metric: str, mode: Literal["max", "min"]) -> list[Manifest]:
    """Return those that have a finite value of the metric, the best first, the older first of equals.

    Each checkpoint has the newest value there was: those that follow a validation all have the same, the first is nearest to it.
    """
    sign = -1.0 if mode == "max" else 1.0
    rated = [(sign * value, manifest) for manifest in manifests if math.isfinite(value := manifest.metrics.get(metric, math.nan))]
    return [manifest for _, manifest in sorted(rated, key=lambda pair: (pair[0], pair[1].step))]
