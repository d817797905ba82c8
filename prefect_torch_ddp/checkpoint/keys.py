"""Owns the names of a run's objects in the storage. Pure."""

import re

from prefect_torch_ddp.errors import InvalidParamsError

_OBJECT = re.compile(r"step-(\d+)/(\d+)/[^/]+")
_MANIFEST = "manifest.json"
_NAME = re.compile(r"[A-Za-z0-9_]{1,100}")


def attempts_prefix(run_id: str) -> str:
    """Return where a run's attempts are claimed."""
    return f"runs/{run_id}/attempts/"


def attempt_key(run_id: str, attempt: int) -> str:
    """Return what claims an attempt, from 1."""
    return f"{attempts_prefix(run_id)}{attempt:06d}"


def resume_key(run_id: str, attempt: int) -> str:
    """Return what says where an attempt went on."""
    return f"{attempt_key(run_id, attempt)}.json"


def finished_key(run_id: str) -> str:
    """Return what says that a run's training has finished, and what came of it."""
    return f"runs/{run_id}/training.json"


def results_prefix(run_id: str) -> str:
    """Return where the files of ctx.save are."""
    return f"runs/{run_id}/results/"


def result_key(run_id: str, attempt: int, path: str) -> str:
    """Return a file of ctx.save; each attempt has its own."""
    return f"{results_prefix(run_id)}{attempt:06d}/{path}"


def result_of(run_id: str, key: str) -> tuple[int, str] | None:
    """Return attempt and path of a file of ctx.save; None for anything else that lies there."""
    attempt, _, path = key.removeprefix(results_prefix(run_id)).partition("/")
    return (int(attempt), path) if attempt.isdecimal() and path else None


def failures_prefix(run_id: str) -> str:
    """Return where a run's failed attempts are on record."""
    return f"runs/{run_id}/failures/"


def failure_key(run_id: str, attempt: int) -> str:
    """Return what says how an attempt failed."""
    return f"{failures_prefix(run_id)}{attempt:06d}.json"


def checkpoints_prefix(run_id: str) -> str:
    """Return where a run's checkpoints are."""
    return f"runs/{run_id}/checkpoints/"


def manifest_key(run_id: str, step: int, attempt: int) -> str:
    """Return the object whose presence makes a checkpoint complete; each attempt has its own,
    which no other one writes.
    """
    return f"{checkpoints_prefix(run_id)}step-{step:08d}/{attempt:06d}/{_MANIFEST}"


def is_manifest(key: str) -> bool:
    """Tell whether an object of a run's checkpoints is a manifest, by its name."""
    return key.endswith(f"/{_MANIFEST}")


def object_key(run_id: str, step: int, attempt: int, name: str) -> str:
    """Return an object of a checkpoint; each attempt has its own, so that two never write the
    same one.
    """
    return f"{checkpoints_prefix(run_id)}step-{step:08d}/{attempt:06d}/{name}.pt"


def model_prefix(run_id: str) -> str:
    """Return where a finished training leaves its model to others."""
    return f"runs/{run_id}/model/"


def owner_of(run_id: str, key: str) -> tuple[int, int] | None:
    """Return step and attempt of a checkpoint's object or manifest; None for anything else."""
    match = _OBJECT.fullmatch(key.removeprefix(checkpoints_prefix(run_id)))
    return (int(match[1]), int(match[2])) if match else None


def rank_name(rank: int) -> str:
    """Return the name under which a rank keeps what is its own, its random generators."""
    return f"rank-{rank:05d}"


def check_name(name: str) -> None:
    """Refuse a name that can't be part of a key.

    Raises:
        InvalidParamsError: says which names work.
    """
    if not _NAME.fullmatch(name):
        msg = f"{name!r} can't name a tracked object: use letters, digits and underscores"
        raise InvalidParamsError(msg)
