"""Owns the record of where each attempt of a run went on, which voids what an older one commits beyond that, however late."""

import json
import logging
from collections.abc import Callable

from prefect_torch_ddp.checkpoint.keys import attempts_prefix, beginning_key
from prefect_torch_ddp.errors import ObjectNotFoundError
from prefect_torch_ddp.storage.protocol import Storage

logger = logging.getLogger(__name__)

FROM_NOTHING = -1
"""The step of an attempt that found no checkpoint."""


def record_beginning(storage: Storage, run_id: str, attempt: int, step: int) -> None:
    """Put on record behind which step an attempt goes on, before it makes its first one.

    A process that is held up between its look for newer attempts and its commit may commit hours later. Its checkpoint is no
    part of the run's history then: the newer attempt made those steps itself.

    Raises:
        StorageError: it can't be written.
    """
    storage.write(beginning_key(run_id, attempt), json.dumps({"step": step}).encode())


def void_test(storage: Storage, run_id: str) -> Callable[[int, int], bool]:
    """Return the test whether a checkpoint, by attempt and step, is void: a newer attempt began further back."""
    prefix = attempts_prefix(run_id)
    keys = [found.key for found in storage.list(prefix) if found.key.endswith(".json")]
    steps = {int(key.removeprefix(prefix).removesuffix(".json")): _step(storage, key) for key in keys}

    def is_void(attempt: int, step: int) -> bool:
        return any(attempt < newer and step > begun for newer, begun in steps.items() if begun is not None)

    return is_void


def _step(storage: Storage, key: str) -> int | None:
    try:
        return int(json.loads(storage.read(key))["step"])
    except ObjectNotFoundError:
        return None
    except (ValueError, TypeError, KeyError) as error:
        logger.warning("%s is damaged and left out: %r", key, error)
        return None
