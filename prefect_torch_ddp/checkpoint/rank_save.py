"""What each rank wrote of a checkpoint, and whether all of it together is one."""

import json
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from prefect_torch_ddp.checkpoint.attempts import refuse_superseded
from prefect_torch_ddp.checkpoint.keys import checkpoint_prefix
from prefect_torch_ddp.checkpoint.manifest import Manifest, ManifestObject
from prefect_torch_ddp.checkpoint.shard import uncovered
from prefect_torch_ddp.checkpoint.state.replicas import Digests
from prefect_torch_ddp.errors import CheckpointError, InvalidParamsError
from prefect_torch_ddp.storage.protocol import Storage

LOOK_S = 30.0
"""For how long rank 0 looks for what other ranks wrote: a network's folder may show it late."""

RankMetrics = Mapping[str, tuple[float, tuple[int, int], int]]
"""A rank's newest value of each metric, the interval between checkpoints in which it was reported,
and its weight: the samples of that step, or 0."""


@dataclass
class RankSave:
    """What one rank tells rank 0 of a checkpoint."""

    host: str
    tracked: list[str]
    """The names of its tracked objects, in the order in which they are shared out."""
    metrics: RankMetrics
    stall_s: float
    """How long the step waited."""
    cpu_s: float = 0.0
    """CPU time of the thread that wrote."""
    objects: list[ManifestObject] = field(default_factory=list)
    """What it wrote."""
    error: str | None = None
    """Why it couldn't write everything."""
    replicas: Digests | None = None
    """What tells whether all ranks hold the same, if that is compared."""

    def to_json(self) -> str:
        """Return it as a text for the rank store."""
        return json.dumps({**vars(self), "objects": [item.as_stored() for item in self.objects]})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` of another rank of this attempt returned."""
        values: dict[str, Any] = json.loads(text)
        objects = [ManifestObject.from_stored(item) for item in values.pop("objects")]
        metrics = {
            name: (value, (checkpoint, step), weight)
            for name, (value, (checkpoint, step), weight) in values.pop("metrics").items()
        }
        return cls(**values, metrics=metrics, objects=objects)


def refuse_unequal(saves: Sequence[RankSave]) -> None:
    """Refuse different objects by InvalidParamsError, and a rank that failed by CheckpointError."""
    # The objects are shared out by their order.
    names = saves[0].tracked
    for rank, save in enumerate(saves):
        if save.tracked != names:
            msg = (
                f"the ranks track different objects: rank 0 {', '.join(names)}; rank {rank} "
                f"{', '.join(save.tracked)}; call ctx.track with the same names in one order "
                "on every rank, also for what only rank 0 uses, such as averaged weights"
            )
            raise InvalidParamsError(msg)
        if save.error:
            msg = f"rank {rank}: {save.error}"
            raise CheckpointError(msg)
    # Of a folder's files several ranks may commit the same one.
    shards = (item.shard for save in saves for item in save.objects if item.path is None)
    if found := uncovered(names, shards, len(saves)):
        name, fault = found
        msg = (
            f"the tracked object {name!r} differs between the ranks ({fault}): it has buffers on "
            "some of them only, or ctx.track on some and ctx.track_each on others; build and track "
            "it the same way on every rank"
        )
        raise InvalidParamsError(msg)


def mean_metrics(
    saves: Sequence[RankSave],
) -> tuple[dict[str, float], dict[str, tuple[int, int]]]:
    """Return each metric's mean over the ranks that reported it last, and when that was.

    By samples, if some are known; otherwise each rank counts the same, as `read_metrics` has it.
    """
    values: dict[str, float] = {}
    intervals: dict[str, tuple[int, int]] = {}
    for name in dict.fromkeys(name for save in saves for name in save.metrics):
        found = [save.metrics[name] for save in saves if name in save.metrics]
        last = intervals[name] = max(interval for _value, interval, _weight in found)
        of_last = [(value, weight) for value, interval, weight in found if interval == last]
        if not any(weight for _, weight in of_last):
            of_last = [(value, 1) for value, _ in of_last]
        terms = [(value, weight) for value, weight in of_last if weight]
        if len({value for value, _ in terms}) == 1:
            values[name] = terms[0][0]  # not another one by a rounding
        else:
            total = sum(weight for _, weight in terms)
            values[name] = sum(value * weight for value, weight in terms) / total
    return values, intervals


def refuse_unshared(storage: Storage, manifest: Manifest, saves: Sequence[RankSave]) -> None:
    """Raise InvalidParamsError if rank 0 doesn't find what other ranks wrote, by name and size.

    Or SupersededError: a newer attempt has begun, which deletes what this one wrote.
    """
    prefix = checkpoint_prefix(manifest.run_id, manifest.step, manifest.attempt)
    ends_at = time.monotonic() + LOOK_S
    while True:
        there = {(found.key, found.num_bytes) for found in storage.list(prefix)}
        lacking = [
            f"rank {rank} on {save.host}"
            for rank, save in enumerate(saves)
            if {(item.key, item.num_bytes) for item in save.objects} - there
        ]
        if not lacking:
            return
        refuse_superseded(storage, manifest.run_id, manifest.attempt)
        if time.monotonic() > ends_at:
            msg = (
                f"the hosts don't share the storage {storage.uri}: rank 0 on "
                f"{socket.gethostname()} doesn't find there what was written by "
                f"{', '.join(lacking[:8])}{', ...' if lacking[8:] else ''}; use a folder that all "
                "hosts mount under this path, or s3://bucket/prefix"
            )
            raise InvalidParamsError(msg)
        threading.Event().wait(LOOK_S / 30)
