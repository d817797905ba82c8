"""Owns the record of where each attempt of a run went on, which voids what an older one commits beyond that, however late."""

import logging
from collections.abc import Callable, Mapping

from prefect_torch_ddp.checkpoint.keys import attempts_prefix, beginning_key
from prefect_torch_ddp.checkpoint.sealed import sealed, unsealed
from prefect_torch_ddp.errors import DamagedObjectError, ObjectNotFoundError
from prefect_torch_ddp.storage.protocol import Storage

logger = logging.getLogger(__name__)

FROM_NOTHING = -1
"""The step of an attempt that found no checkpoint."""


def record_beginning(storage: Storage, run_id: str, attempt: int, step: int, of_attempt: int) -> None:
    """Put on record behind which checkpoint an attempt goes on, before it makes its first step.

    A process that is held up between its look for newer attempts and its commit may commit hours later. Its checkpoint is no
    part of the run's history then: the newer attempt made those steps itself.

    Args:
        storage: where the run is.
        run_id: the run.
        attempt: the attempt that begins.
        step: the checkpoint's.
        of_attempt: who made it; 0 where it is another run's, or there is none.

    Raises:
        StorageError: it can't be written.
    """
    storage.write(beginning_key(run_id, attempt), sealed({"step": step, "of_attempt": of_attempt}))


def void_test(storage: Storage, run_id: str) -> Callable[[int, int], bool]:
    """Return the test whether a checkpoint, by step and attempt, is void: a newer attempt went on from one before it."""
    prefix = attempts_prefix(run_id)
    keys = [found.key for found in storage.list(prefix)]
    numbers = {key: number for key in keys if (number := key.removeprefix(prefix).removesuffix(".json")).isdecimal()}
    read = {int(number): _beginning(storage, key) for key, number in numbers.items() if key.endswith(".json")}
    beginnings = _in_force({attempt: begun for attempt, begun in read.items() if begun is not None})

    def is_void(step: int, attempt: int) -> bool:
        return any(attempt < newer and (step, attempt) > begun for newer, begun in beginnings.items())

    return is_void


def _in_force(beginnings: Mapping[int, tuple[int, int]]) -> dict[int, tuple[int, int]]:
    """Leave out what attempts put on record too late: after a newer one had gone on from a checkpoint that it would have voided.

    Such an attempt was held up between its choice and the record. It has been superseded and commits nothing, and the newer
    one's checkpoint counts.
    """
    in_force: dict[int, tuple[int, int]] = {}
    for attempt in sorted(beginnings, reverse=True):
        begun = beginnings[attempt]
        if not any(newer[1] < attempt and newer > begun for newer in in_force.values()):
            in_force[attempt] = begun
    return in_force


def _beginning(storage: Storage, key: str) -> tuple[int, int] | None:
    """Return the checkpoint that an attempt began with; of another run's it doesn't count how far that run was."""
    try:
        values = unsealed(storage.read(key))
        return (int(values["step"]), int(values["of_attempt"])) if values["of_attempt"] else (FROM_NOTHING, 0)
    except ObjectNotFoundError:
        return None
    except (DamagedObjectError, ValueError, TypeError, KeyError, AttributeError) as error:
        logger.warning("%s is damaged and left out: %r", key, error)
        return None
