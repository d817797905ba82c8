"""Manifests: what makes a checkpoint complete, and which of a run's checkpoints count."""

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple, Self

from prefect_torch_ddp.checkpoint.attempts import superseded_test
from prefect_torch_ddp.checkpoint.keys import (
    CheckpointId,
    checkpoints_prefix,
    is_manifest,
    manifest_key,
    owner_of,
)
from prefect_torch_ddp.checkpoint.shard import Layout, Shard
from prefect_torch_ddp.errors import CheckpointError, NewerFormatError, ObjectNotFoundError
from prefect_torch_ddp.lazy import __version__
from prefect_torch_ddp.results import CheckpointRef
from prefect_torch_ddp.storage.formats import DAMAGE, MANIFEST, build, location, sha256_in
from prefect_torch_ddp.storage.protocol import Storage

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ManifestObject:
    """One shard of an object of a checkpoint, or the whole of it, or a file of a folder."""

    object: str
    """The tracked object's name; of a file that `ctx.commit` was given, its path."""
    key: str
    num_bytes: int
    digest: str
    """The BLAKE3 of its content."""
    is_module: bool = False
    """Whether its tensors are copied when it is restored; an optimizer keeps those it is given."""
    rank: int | None = None
    """Whose shard it is; None: it is the whole object. Of a file, who committed it."""
    path: str | None = None
    """Of a file that `ctx.commit` was given: where it lies in `ctx.checkpoint_folder`, as a key."""
    layout: Layout = Layout.WHOLE
    """How the object consists of this shard and the others of its name."""

    @property
    def shard(self) -> Shard:
        """Which shard of which object it is."""
        return Shard(self.object, self.layout, self.rank)

    @property
    def name(self) -> str:
        """Its stored name, which no other one of the checkpoint has."""
        return self.shard.name

    def as_stored(self) -> dict[str, Any]:
        """Return its entry in a manifest."""
        return {"name": self.name, **asdict(self)}

    @classmethod
    def from_stored(cls, values: Mapping[str, Any], where: str = "this file") -> Self:
        """Read an entry of a manifest; `where` is for the error.

        Raises:
            NewerFormatError: its layout is one of a later version.
            ValueError, TypeError, KeyError, AttributeError: it is damaged.
        """
        name = values["name"]
        if "layout" not in values:  # an earlier version's, in which only names told shards apart
            is_file = values.get("path") is not None
            shard = Shard(name, rank=values.get("rank")) if is_file else Shard.named(name)
        elif values["layout"] in set(Layout):
            shard = Shard(values["object"], Layout(values["layout"]), values["rank"])
        else:
            msg = (
                f"{where} has {name!r} in the layout {values['layout']!r}, which prefect-torch-ddp "
                f"{__version__} doesn't know. Install the version that wrote it, or a newer one; "
                "the file is left as it is"
            )
            raise NewerFormatError(msg)
        more = {key: value for key, value in values.items() if key != "name"}
        return build(cls, {**more, **shard._asdict()})


class Reported(NamedTuple):
    """When a metric was reported, which distinguishes this report from others."""

    checkpoint: int
    """The number of the next checkpoint."""
    step: int


NOT_REPORTED = Reported(0, 0)


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
    """The newest values, each the mean over the ranks that reported it last."""
    objects: tuple[ManifestObject, ...] = ()
    reports: Mapping[str, Reported] = field(default_factory=dict)
    """When each metric was reported."""
    sha256: str = field(default="", compare=False, repr=False)
    """Of the manifest that was read, as it says itself; a field of no file."""

    @property
    def id(self) -> CheckpointId:
        """Which checkpoint it is."""
        return CheckpointId(self.step, self.attempt)

    @property
    def folder(self) -> str | None:
        """Which folder in `ctx.checkpoint_folder` it is, "" for all of it; None: it is none."""
        return self.position.get("folder")

    def find(self, name: str, rank: int | None = None) -> ManifestObject | None:
        """Return a tracked object that is there as a whole, or a rank's shard of it."""
        here = (item for item in self.objects if (item.object, item.rank) == (name, rank))
        return next(here, None)

    def num_owners(self, name: str) -> int:
        """Return how many ranks have their own state of an object there; 0: there is none."""
        here = (item for item in self.objects if item.object == name)
        return sum(item.layout is Layout.BY_RANK for item in here)

    def as_bytes(self) -> bytes:
        """Return it as checksummed JSON."""
        metrics = {
            name: value if math.isfinite(value) else str(value)
            for name, value in self.metrics.items()
        }
        objects = [item.as_stored() for item in self.objects]
        values = {**asdict(self), "metrics": metrics, "objects": objects}
        values.pop("sha256")
        return MANIFEST.to_bytes(values)

    @classmethod
    def from_bytes(cls, data: bytes, where: str = "this file") -> Self:
        """Read the JSON back; raises as `Format.from_bytes`, which `where` is for."""
        values = MANIFEST.from_bytes(data, where)
        more: dict[str, Any] = {
            "metrics": {str(name): float(value) for name, value in values["metrics"].items()},
            "objects": tuple(ManifestObject.from_stored(each, where) for each in values["objects"]),
            "reports": {name: Reported(*at) for name, at in values["reports"].items()},
            "sha256": sha256_in(data),
        }
        return build(cls, {**values, **more})


def read_manifest(storage: Storage, run_id: str, step: int, attempt: int) -> Manifest:
    """Return an attempt's manifest, superseded or not.

    Raises:
        CheckpointError: there is none, or it is damaged.
        NewerFormatError: it is of a newer format.
        StorageError: the storage can't be read.
    """
    key = manifest_key(run_id, step, attempt)
    what = f"checkpoint of step {step} of attempt {attempt}"
    try:
        manifest = Manifest.from_bytes(storage.read(key), location(storage, key))
    except ObjectNotFoundError as error:
        msg = f"run {run_id} has no {what}: there is no {key} in {storage.uri}"
        raise CheckpointError(msg) from error
    except DAMAGE as error:
        msg = f"the manifest {key} is damaged: {error!r}"
        raise CheckpointError(msg) from error
    if (manifest.run_id, manifest.id) != (run_id, CheckpointId(step, attempt)):
        msg = f"the manifest {key} is a copy of another one, of run {manifest.run_id}"
        raise CheckpointError(msg)
    return manifest


def find_manifest(storage: Storage, run_id: str, step: int) -> Manifest:
    """Return a step's manifest, of the newest attempt whose checkpoint of it counts.

    CheckpointError: there is none, or it is damaged; no other one is taken then.
    """
    made = [each for each in _stored(storage, run_id) if each.step == step]
    is_superseded = superseded_test(storage, run_id)
    if live := [each for each in made if not is_superseded(each)]:
        return read_manifest(storage, run_id, *live[-1])
    msg = f"run {run_id} has no checkpoint of step {step} in {storage.uri}"
    if made:
        by = made[-1].attempt
        msg += f" that counts: attempt {by} made one, and a newer one resumed before it"
    raise CheckpointError(msg)


def live_manifests(
    storage: Storage,
    run_id: str,
    faults: list[str] | None = None,
    *,
    allow_newer: bool = False,
) -> list[Manifest]:
    """Return the manifests that no newer attempt superseded, by step and attempt.

    A step is there twice if an attempt made the checkpoint again that it resumed from. Damaged
    ones are left out with a warning, which is added to `faults`. `allow_newer` leaves out those
    of a newer format too: only for who deletes, and then deletes nothing of theirs.

    Raises:
        NewerFormatError: one of them is of a newer format; it may be the one that was asked for.
        StorageError: the storage can't be read.
    """
    # Manifests before resume records: a commit between the two is superseded by any newer
    # attempt that didn't see it.
    stored = _stored(storage, run_id)
    is_superseded = superseded_test(storage, run_id)
    manifests = []
    for each in stored:
        if is_superseded(each):
            continue
        try:
            manifests.append(read_manifest(storage, run_id, *each))
        except NewerFormatError:
            if not allow_newer:
                raise
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


def _stored(storage: Storage, run_id: str) -> list[CheckpointId]:
    keys = (found.key for found in storage.list(checkpoints_prefix(run_id)))
    owners = (owner_of(run_id, key) for key in keys if is_manifest(key))
    return sorted(owner for owner in owners if owner is not None)


def checkpoint_ref(storage: Storage, manifest: Manifest) -> CheckpointRef:
    """Return the reference to a checkpoint that results hold."""
    key = manifest_key(manifest.run_id, manifest.step, manifest.attempt)
    return CheckpointRef(
        step=manifest.step,
        attempt=manifest.attempt,
        uri=location(storage, key),
        metrics={name: value for name, value in manifest.metrics.items() if math.isfinite(value)},
    )


def best(
    storage: Storage, run_id: str, metric: str, mode: Literal["max", "min"] = "max"
) -> Manifest | None:
    """Return a run's best checkpoint, the first of `ranked`; None if none has the metric."""
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
