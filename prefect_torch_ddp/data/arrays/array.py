"""`array()`: Zarr, .npy and xarray as a dataset for `ctx.loader`."""

import logging
import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from prefect_torch_ddp.data.sampler import whole_number
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.lazy import exported_by
from prefect_torch_ddp.storage.protocol import Readable

if TYPE_CHECKING:
    from prefect_torch_ddp.data.arrays.dataset import Arrays

logger = logging.getLogger(__name__)

WINDOW_BYTES = 128 * 2**20
"""Of samples that are shuffled among one another; two such windows are in memory."""


@exported_by("prefect_torch_ddp.data")
def array(  # noqa: PLR0913 - what is read, how it is cut, and the way to a bucket, all by name
    where: Any,
    variables: str | Sequence[str] | AbstractSet[str] | None = None,
    *,
    window: Mapping[str, int] | None = None,
    patch: Mapping[str, int] | None = None,
    stride: int | Mapping[str, int] | None = None,
    select: Mapping[str, slice] | None = None,
    nan: Literal["refuse", "keep"] | float = "refuse",
    missing: Literal["refuse", "fill"] = "refuse",
    normalize: bool | Mapping[str, tuple[float, float]] = False,
    numbered: bool = False,
    shuffle_buffer: int | None = None,
    storage: Readable | None = None,
    anonymous: bool = False,
    endpoint_url: str | None = None,
    region: str | None = None,
) -> "Arrays":
    """Return Zarr, .npy or xarray as a dataset for `ctx.loader`.

    By default a sample is one position of the first dimension, with all of the other dimensions.
    With `window` or `patch`, a sample has as many positions of a dimension as they say. A batch of
    a single array is a tensor [samples, ...], otherwise a dict of tensors by variable. The
    dimensions keep their order. A variable such as a mask, which has none of the dimensions along
    which samples are cut, is whole in each sample.

    The order is exact: every sample comes once per epoch, in the same global batches for any number
    of ranks and loader workers. A resume in the middle of an epoch doesn't read earlier samples
    again. Samples that begin in the same chunks are read together, as a piece. The pieces are
    shuffled, and then the samples within several pieces. Threads read ahead, so leave `num_workers`
    at 0.

    Args:
        where: a path, `s3://bucket/prefix` or a storage such as `ctx.source`, of a Zarr group or
            array (formats 2 and 3), of a .npy file, or of a folder with `part-*.npy`, which are
            one array, as a Bag of arrays is written. With `storage`, a path in that storage. Or a
            NumPy array, or an xarray Dataset or DataArray without Dask, equal on all ranks.
        variables: names of the variables of a group to read, those of a set in the order of the
            alphabet. None: all except coordinates. A single array takes only its own name.
        window: number of positions in a sample, by dimension. By default a sample begins at each
            position, so samples overlap. Dimensions without names are `dim_0`, `dim_1`, ...
        patch: number of positions in a sample, by dimension. By default samples don't overlap. The
            end of a dimension that doesn't fill a window or patch is in no sample; the log and the
            dataset's `left_out` say how much that is.
        stride: distance from the beginning of one sample to that of the next: a number for the
            dimensions of `window` (without it, for the first dimension), or a dict by dimension.
        select: the part to read, by dimension: a slice of coordinates that includes both ends, as
            in `xarray.Dataset.sel`; for a dimension without coordinates, a slice of positions.
        nan: what happens to a NaN. "refuse": an error when it is read. "keep": it stays. A number
            replaces it.
        missing: what happens if chunks aren't stored. "refuse": an error before work starts, which
            names them; also for every array in shards, where missing ones can't be seen. "fill":
            they have the array's fill value. With xarray this may be NaN, to which `nan` then
            applies.
        normalize: whether values become (value - mean) / std, as float32, or as float64 if they
            are float64. True: by the mean and std in the dataset's folder. They are there if
            `prepare` returned Dask arrays, and are those of the whole dataset, regardless of
            `select`. A dict has (mean, std) by variable; other variables stay as they are. A std of
            0 counts as 1. `nan` is applied first.
        numbered: whether a batch also has the numbers of its samples, int64 [samples]: in a dict as
            `index`; of a single array, the batch is then (values, numbers).
            `dataset.where(number)` returns where a sample lies.
        shuffle_buffer: largest number of samples that are shuffled together. Up to twice as many
            are in memory. None: as many as take 128 MiB.
        storage: the storage to read from, with its credentials; not for an object in memory.
        anonymous: send unsigned requests, for public data.
        endpoint_url: URL of an S3 store other than AWS.
        region: region of the bucket.

    Raises:
        InvalidParamsError: zarr or xarray is missing; arguments contradict each other; there is no
            such array, variable or sample; a chunk is missing; values can't become tensors; or
            there are no statistics.
        StorageError: the arrays can't be read.

    Example:
        Six hours of 64 x 64 points, of which the last is to be forecast:

            from prefect_torch_ddp.data import array

            area = {"lat": 64, "lon": 64}
            weather = array(ctx.data, ["t2m", "z500"], window={"time": 6}, patch=area)
            for batch in ctx.steps(ctx.loader(weather, global_batch_size=64), epochs=5):
                history, future = batch["t2m"][:, :5], batch["t2m"][:, 5]
    """
    if isinstance(nan, np.generic):  # such as a variable's own mean
        nan = nan.item()  # type: ignore[unreachable]  # no float32 is a float
    _check(nan, missing)
    _check_dicts(window=window, patch=patch, select=select)
    # They load what they need of zarr and xarray.
    from prefect_torch_ddp.data.arrays import axes, dataset, pieces  # noqa: PLC0415
    from prefect_torch_ddp.data.arrays.opening import kinds  # noqa: PLC0415
    from prefect_torch_ddp.data.arrays.scales import checked, normalized  # noqa: PLC0415
    from prefect_torch_ddp.data.arrays.variables import (  # noqa: PLC0415
        refuse_unheld,
        used_positions,
    )

    ways = {"anonymous": anonymous, "endpoint_url": endpoint_url, "region": region}
    by = checked(normalize)
    names = sorted(variables, key=str) if isinstance(variables, AbstractSet) else variables
    found = kinds.open_arrays(where, names, storage, **ways)
    refuse_unheld(found, nan)
    used = used_positions(found, select or {})
    for variable in found.variables:
        if missing == "refuse" and variable.stored is not None:
            variable.stored.refuse_missing([used[dim] for dim in variable.dims])
    cut = axes.axes_of(found.dims, used, window or {}, patch or {}, stride)
    scaled = normalized(found, by)
    samples = pieces.ArrayPieces(scaled, cut, used, nan, is_numbered=numbered)
    fits = max(1, WINDOW_BYTES // max(1, samples.form.row_bytes))
    buffer = fits if shuffle_buffer is None else whole_number("shuffle_buffer", shuffle_buffer, 1)
    arrays = dataset.Arrays(samples, buffer)
    if arrays.left_out:
        logger.info("%s: the end of a dimension is in no sample: %s", found.uri, arrays.left_out)
    return arrays


def _check(nan: object, missing: object) -> None:
    # Not math.isfinite, for which a whole number may be too large.
    is_number = isinstance(nan, int | float) and not isinstance(nan, bool) and abs(nan) < math.inf
    if not is_number and nan not in {"refuse", "keep"}:
        msg = f"nan is {nan!r}; choose 'refuse', 'keep' or a number"
        raise InvalidParamsError(msg)
    if missing not in {"refuse", "fill"}:
        msg = f"missing is {missing!r}; choose 'refuse' or 'fill'"
        raise InvalidParamsError(msg)


def _check_dicts(**given: object) -> None:
    """Refuse a window, a patch or a selection that names no dimensions."""
    for name, value in given.items():
        is_dict = isinstance(value, Mapping) and all(isinstance(dim, str) for dim in value)
        if value is not None and not is_dict:
            such_as = "{'time': slice('2000', '2015')}" if name == "select" else "{'time': 6}"
            msg = (
                f"{name} is {value!r}; give a dict by dimension, such as {such_as}; dimensions "
                "without names are 'dim_0', 'dim_1', ..."
            )
            raise InvalidParamsError(msg)
