"""Manifests: what makes a checkpoint complete, and which of a run's checkpoints count."""

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Self

from prefect_torch_ddp.checkpoint.attempts import (
    DAMAGE,
    from_checksummed_json,
    superseded_test,
    to_checksummed_json,
)
from prefect_torch_ddp.checkpoint.keys import (
    checkpoints_prefix,
    is_manifest,
    manifest_key,
    owner_of,
)
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
    digest: str
    """The BLAKE3 of its content."""
    is_module: bool = False
    """Whether its tensors are copied when it is restored; an optimizer keeps those it is given."""


@dataclass(frozen=True)
class Manifest:
    """All that a checkpoint consists of."""

    run_id: str
    step: int
    """Its number: the optimizer steps, plus the checkpoints made outside of `steps`."""
    attempt: int
    epoch: int
    position: Mapping[str, Any]
    """Where the training resumes; plain JSON values, understood by who wrote them."""
    world_size: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The newest values that rank 0 had."""
    objects: tuple[ManifestObject, ...] = ()
    reports: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """What tells each metric's report from other ones: the checkpoint that was next, the step."""

    def find(self, name: str) -> ManifestObject | None:
        """Return the object of that name."""
        return next((item for item in self.objects if item.name == name), None)

    def as_bytes(self) -> bytes:
        """Return it as checksummed JSON."""
        metrics = {
            name: value if math.isfinite(value) else str(value)
            for name, value in self.metrics.items()
        }
        return to_checksummed_json({**asdict(self), "metrics": metrics})

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read the JSON back; raises as `from_checksummed_json`."""
        values = from_checksummed_json(data)
        objects = tuple(ManifestObject(**item) for item in values.pop("objects"))
        metrics = {str(name): float(value) for name, value in values.pop("metrics").items()}
        reports = {name: tuple(place) for name, place in values.pop("reports", {}).items()}
        return cls(**values, metrics=metrics, objects=objects, reports=reports)


def read_manifest(storage: Storage, run_id: str, step: int, attempt: int) -> Manifest:
    """Return an attempt's manifest, superseded or not; CheckpointError: none, or it is damaged."""
    key = manifest_key(run_id, step, attempt)
    what = f"checkpoint of step {step} of attempt {attempt}"
    try:
        manifest = Manifest.from_bytes(storage.read(key))
    except ObjectNotFoundError as error:
        msg = f"run {run_id} has no {what}: there is no {key} in {storage.uri}"
        raise CheckpointError(msg) from error
    except DAMAGE as error:
        msg = f"the manifest {key} is damaged: {error!r}"
        raise CheckpointError(msg) from error
    if (manifest.run_id, manifest.step, manifest.attempt) != (run_id, step, attempt):
        msg = f"the manifest {key} is a copy of another one, of run {manifest.run_id}"
        raise CheckpointError(msg)
    return manifest


def find_manifest(storage: Storage, run_id: str, step: int) -> Manifest:
    """Return a step's manifest, of the newest attempt whose checkpoint of it counts.

    CheckpointError: there is none, or it is damaged; no other one is taken then.
    """
    attempts = [attempt for found, attempt in _owners(storage, run_id) if found == step]
    is_superseded = superseded_test(storage, run_id)
    if live := [attempt for attempt in attempts if not is_superseded(step, attempt)]:
        return read_manifest(storage, run_id, step, live[-1])
    msg = f"run {run_id} has no checkpoint of step {step} in {storage.uri}"
    if attempts:
        msg += f" that counts: attempt {attempts[-1]} made one, and a newer one resumed before it"
    raise CheckpointError(msg)


def live_manifests(
    storage: Storage, run_id: str, faults: list[str] | None = None
) -> list[Manifest]:
    """Return the manifests that no newer attempt superseded, by step and attempt.

    A step is there twice where an attempt made the checkpoint again that it resumed from. Damaged
    ones are left out with a warning, which is added to `faults`.
    """
    # Manifests before resume records: a commit between the two is superseded by any newer
    # attempt that didn't see it.
    owners = _owners(storage, run_id)
    is_superseded = superseded_test(storage, run_id)
    manifests = []
    for step, attempt in owners:
        if is_superseded(step, attempt):
            continue
        try:
            manifests.append(read_manifest(storage, run_id, step, attempt))
        except CheckpointError as error:
            if isinstance(error.__cause__, ObjectNotFoundError):
                continue  # it was deleted since the listing
            logger.warning("checkpoint left out: %s", error)
            if faults is not None:
                faults.append(str(error))
    return manifests


def list_manifests(storage: Storage, run_id: str) -> list[Manifest]:
    """Return the manifests that count, by step; of each step the newest attempt's."""
    return list({manifest.step: manifest for manifest in live_manifests(storage, run_id)}.values())


def _owners(storage: Storage, run_id: str) -> list[tuple[int, int]]:
    keys = (found.key for found in storage.list(checkpoints_prefix(run_id)))
    owners = (owner_of(run_id, key) for key in keys if is_manifest(key))
    return sorted(owner for owner in owners if owner is not None)


def checkpoint_ref(storage: Storage, manifest: Manifest) -> CheckpointRef:
    """Return the reference to a checkpoint that results hold."""
    key = manifest_key(manifest.run_id, manifest.step, manifest.attempt)
    return CheckpointRef(
        step=manifest.step,
        attempt=manifest.attempt,
        uri=f"{storage.uri.rstrip('/')}/{key}",
        metrics={name: value for name, value in manifest.metrics.items() if math.isfinite(value)},
    )


def best(
    storage: Storage, run_id: str, metric: str, mode: Literal["max", "min"] = "max"
) -> Manifest | None:
    """Return a run's best checkpoint, the first of `ranked`; None where none has the metric."""
    return next(iter(ranked(list_manifests(storage, run_id), metric, mode)), None)


def ranked(
    manifests: Iterable[Manifest], metric: str, mode: Literal["max", "min"]
) -> list[Manifest]:
    """Return those with a finite value of the metric, the best first, the older first of equals.

    A checkpoint has the newest value there was: of those that follow a validation only the first
    counts, which is nearest to the weights that were validated.
    """
    sign = -1.0 if mode == "max" else 1.0
    first: dict[object, Manifest] = {}
    for manifest in sorted(manifests, key=lambda manifest: manifest.step):
        if math.isfinite(manifest.metrics.get(metric, math.nan)):
            first.setdefault(manifest.reports.get(metric, manifest.step), manifest)
    return sorted(first.values(), key=lambda each: (sign * each.metrics[metric], each.step))
