"""The mean and the spread of a variable: measured block by block, merged, kept in the dataset."""

import logging
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import reduce
from typing import Any

import numpy as np

from prefect_torch_ddp.data.arrays.variables import Array
from prefect_torch_ddp.data.datasets.dataset_manifest import published_manifest
from prefect_torch_ddp.errors import StorageError
from prefect_torch_ddp.storage.formats import DAMAGE, STATISTICS, build, location
from prefect_torch_ddp.storage.protocol import Storage

logger = logging.getLogger(__name__)

AT_ONCE = 2**18
"""Values that are converted to float64 at a time."""


@dataclass(frozen=True)
class Statistics:
    """What is known of a variable's values. Those that are nan or infinite only count as such."""

    num_values: int
    """Number of finite values. If it is 0, so are all that follow `num_not_finite`."""
    num_not_finite: int
    mean: float
    std: float
    """Of all values, not of a sample: divided by `num_values`."""
    minimum: float
    maximum: float

    def to_bytes(self) -> bytes:
        """Return it as it is stored."""
        return STATISTICS.to_bytes(asdict(self))

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> "Statistics":
        """Read it as it is stored.

        Raises:
            NewerFormatError: it is of a newer format.
            StorageError: it is damaged.
        """
        try:
            return build(cls, STATISTICS.from_bytes(data, where))
        except DAMAGE as error:
            msg = f"{where} can't be read: {error!r}; prepare the dataset again"
            raise StorageError(msg) from error


NONE = Statistics(0, 0, 0.0, 0.0, 0.0, 0.0)


def statistics_key(variable: str) -> str:
    """Return the key of a variable's statistics in its Zarr group.

    It is in the array's own folder: among the group's members Zarr would warn of it.
    """
    return f"{variable}/statistics.json"


def statistics_in(storage: Storage, dataset_id: str) -> dict[str, dict[str, float]]:
    """Return the statistics that a published dataset has, as plain numbers by variable.

    What can't be read as such is left out, with a warning: prepare may have written a file of the
    same name.

    Raises:
        StorageError: there is no such dataset, or the storage failed.
    """
    manifest = published_manifest(storage, dataset_id)
    suffix = statistics_key("")
    found = {}
    for file in manifest.files:
        if file.key.endswith(suffix) and file.key.count("/") == 1:
            key = f"{manifest.files_key}/{file.key}"
            content = storage.read(key)
            try:
                read = Statistics.from_bytes(content, location(storage, key))
            except StorageError as error:
                logger.warning("the model's card lacks some statistics: %s", error)
            else:
                found[file.key.removesuffix(suffix)] = asdict(read)
    return found


def measured(values: Any) -> Statistics | None:
    """Measure values of any shape; None if a mean of them means nothing, as of booleans or times.

    Needs little memory in addition to the values.
    """
    given: Array = np.asarray(values)
    if given.dtype.kind not in "iuf":
        return None
    flat = given.ravel(order="K")
    slices = (flat[start : start + AT_ONCE] for start in range(0, flat.size, AT_ONCE))
    return merged(map(_of_some, slices))


def merged(parts: Iterable[Statistics]) -> Statistics:
    """Return the statistics of all parts together."""
    return reduce(_both, parts, NONE)


def _of_some(values: Array) -> Statistics:
    found = values.astype("float64")
    finite = found[np.isfinite(found)]
    num_not_finite = len(found) - len(finite)
    if not len(finite):
        return Statistics(0, num_not_finite, 0.0, 0.0, 0.0, 0.0)
    mean, std = float(finite.mean()), float(finite.std())
    least, most = float(finite.min()), float(finite.max())
    return Statistics(len(finite), num_not_finite, mean, std, least, most)


def _both(a: Statistics, b: Statistics) -> Statistics:
    num, num_not_finite = a.num_values + b.num_values, a.num_not_finite + b.num_not_finite
    if not a.num_values or not b.num_values:
        one = b if b.num_values else a
        return Statistics(num, num_not_finite, one.mean, one.std, one.minimum, one.maximum)
    # Two sets' means and spreads merged: Chan, Golub, LeVeque, 1979.
    apart = b.mean - a.mean
    mean = a.mean + apart * (b.num_values / num)
    squares = a.std**2 * a.num_values + b.std**2 * b.num_values
    squares += apart**2 * (a.num_values * (b.num_values / num))
    least, most = min(a.minimum, b.minimum), max(a.maximum, b.maximum)
    return Statistics(num, num_not_finite, mean, math.sqrt(squares / num), least, most)
