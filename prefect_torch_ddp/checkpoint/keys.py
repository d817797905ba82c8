"""The names of a run's objects in the storage."""

import re

from prefect_torch_ddp.errors import InvalidParamsError

_OBJECT = re.compile(r"step-(\d+)/(\d+)/[^/]+")
_MANIFEST = "manifest.json"
_NAME = re.compile(r"[A-Za-z0-9_]{1,100}")


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


def model_prefix(run_id: str) -> str:
    """Return where a finished training's model is exported to."""
    return f"runs/{run_id}/model/"


def checkpoints_prefix(run_id: str) -> str:
    """Return where a run's checkpoints are."""
    return f"runs/{run_id}/checkpoints/"


def manifest_key(run_id: str, step: int, attempt: int) -> str:
    """Return the object whose presence makes an attempt's checkpoint complete."""
    return f"{checkpoints_prefix(run_id)}step-{step:08d}/{attempt:06d}/{_MANIFEST}"


def is_manifest(key: str) -> bool:
    """Tell by its name whether an object of a run's checkpoints is a manifest."""
    return key.endswith(f"/{_MANIFEST}")


def object_key(run_id: str, step: int, attempt: int, name: str) -> str:
    """Return an object of a checkpoint; no two attempts write the same one."""
    return f"{checkpoints_prefix(run_id)}step-{step:08d}/{attempt:06d}/{name}.pt"


def owner_of(run_id: str, key: str) -> tuple[int, int] | None:
    """Return step and attempt of a checkpoint's object or manifest; None for anything else."""
    match = _OBJECT.fullmatch(key.removeprefix(checkpoints_prefix(run_id)))
    return (int(match[1]), int(match[2])) if match else None


def rank_name(rank: int) -> str:
    """Return the name of the object that holds a rank's random generators."""
    return f"rank-{rank:05d}"


def check_name(name: str) -> None:
    """Refuse a name that can't be part of a key; InvalidParamsError says which can."""
    if not _NAME.fullmatch(name):
        msg = f"{name!r} can't name a tracked object: use letters, digits and underscores"
        raise InvalidParamsError(msg)
