"""The names of a run's objects in the storage."""

import re
from typing import NamedTuple

_OBJECT = re.compile(r"step-(\d+)/(\d+)/[^/]+")
_MANIFEST = "manifest.json"


class CheckpointId(NamedTuple):
    """Which checkpoint of a run; a later one of the same step is of a newer attempt."""

    step: int
    attempt: int
    """The attempt that made it, from 1."""


FROM_NOTHING = CheckpointId(-1, 0)
"""What an attempt resumes from if there is no checkpoint; it is older than any."""


def attempts_prefix(run_id: str) -> str:
    """Return where a run's attempts are claimed."""
    return f"runs/{run_id}/attempts/"


def attempt_key(run_id: str, attempt: int) -> str:
    """Return the object that claims an attempt, from 1."""
    return f"{attempts_prefix(run_id)}{attempt:06d}"


def resume_key(run_id: str, attempt: int) -> str:
    """Return an attempt's resume record."""
    return f"{attempt_key(run_id, attempt)}.json"


def finished_key(run_id: str) -> str:
    """Return the record that a run's training has finished, with its report."""
    return f"runs/{run_id}/training.json"


def ended_key(run_id: str) -> str:
    """Return the record of the checkpoint with which the training's function had ended."""
    return f"runs/{run_id}/ended"


def models_prefix(run_id: str, attempt: int) -> str:
    """Return where the attempt that finishes a training exports its models to."""
    return f"runs/{run_id}/models/{attempt:06d}/"


def checkpoints_prefix(run_id: str) -> str:
    """Return where a run's checkpoints are."""
    return f"runs/{run_id}/checkpoints/"


def checkpoint_prefix(run_id: str, step: int, attempt: int) -> str:
    """Return where an attempt's checkpoint is; no two attempts write the same one."""
    return f"{checkpoints_prefix(run_id)}step-{step:08d}/{attempt:06d}/"


def manifest_key(run_id: str, step: int, attempt: int) -> str:
    """Return the object whose presence makes an attempt's checkpoint complete."""
    return checkpoint_prefix(run_id, step, attempt) + _MANIFEST


def is_manifest(key: str) -> bool:
    """Tell by its name whether an object of a run's checkpoints is a manifest."""
    return key.endswith(f"/{_MANIFEST}")


def object_key(run_id: str, step: int, attempt: int, name: str) -> str:
    """Return a shard of a checkpoint's object, by its `Shard.name`."""
    return f"{checkpoint_prefix(run_id, step, attempt)}{name}.pt"


def file_key(run_id: str, step: int, attempt: int, rank: int, number: int) -> str:
    """Return a file of a checkpoint that is a folder, by its number among those of its rank."""
    return f"{checkpoint_prefix(run_id, step, attempt)}file-{rank:05d}-{number:05d}"


def owner_of(run_id: str, key: str) -> CheckpointId | None:
    """Return whose object or manifest it is; None if it is no checkpoint's."""
    match = _OBJECT.fullmatch(key.removeprefix(checkpoints_prefix(run_id)))
    return CheckpointId(int(match[1]), int(match[2])) if match else None
