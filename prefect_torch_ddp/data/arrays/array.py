"""`array()`: Zarr, .npy and xarray as a dataset for `ctx.loader`."""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

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
    variables: str | Sequence[str] | None = None,
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

    A sample is one position of the first dimension, with all of the other dimensions. A dimension
    in `window` or `patch` is in each sample, with so many positions. A batch is a tensor [samples,
    ...] of a single array, else a dict of tensors by variable; the dimensions keep their order.
    A variable without a dimension that samples lie along, such as a mask, is in each sample.

    The order is exact: every sample once an epoch, in the same global batches on any number of
    ranks and loader workers, and a resume in the middle reads nothing of what came before. The
    samples that begin in the same chunks are read together, these pieces are shuffled, and the
    samples within several pieces. Threads read ahead, so leave `num_workers` at 0.

    Args:
        where: a path, `s3://bucket/prefix` or a storage such as `ctx.source`: of a Zarr group or
            array (formats 2 and 3), or of a .npy file. With `storage`, a path in that. Or an
            xarray Dataset or DataArray that isn't Dask's, or a NumPy array, equal on all ranks.
        variables: names of what is read of a group; None: all but coordinates.
        window: positions of a sample by dimension. By default samples begin at each position.
        patch: positions of a sample by dimension. By default samples lie side by side.
        stride: positions between the begins of samples: a number for those of `window`, or by
            dimension.
        select: which part is used, by dimension: slices of coordinates, with both ends, as
            `xarray.Dataset.sel` takes them; of positions for a dimension without coordinates.
        nan: what a NaN becomes: "refuse" is an error when it is read, "keep" leaves it, and a
            number replaces it.
        missing: what becomes of chunks that aren't stored: "refuse" is an error before work
            starts, which names them; "fill": they have the array's fill value. It may be NaN for
            xarray, and is then a matter of `nan`.
        normalize: whether values become (value - mean) / std, in float32, or float64 if they are.
            True takes the statistics that the dataset has if Dask wrote it for `prepare`; they
            are over all of it, whatever `select` says. Or a (mean, std) by variable, and the
            others stay. A std of 0 counts as 1. `nan` is replaced before that.
        numbered: whether a batch has the numbers of its samples too, int64 [samples], as `index`
            or as a second tensor. `dataset.where(number)` tells where a sample lies.
        shuffle_buffer: most samples that are shuffled among one another, and of which two such
            windows are in memory. None: as many as take 128 MiB.
        storage: what to read from, with its credentials.
        anonymous: whether requests aren't signed, as for public data.
        endpoint_url: of a store other than AWS.
        region: of the bucket.

    Raises:
        InvalidParamsError: zarr or xarray is missing; arguments don't fit together; there is no
            such array, variable or sample; a chunk is missing; values can't be tensors; there
            are no statistics.
        StorageError: it can't be read.

    Example:
        Six hours of 64 x 64 points, of which the last is to be forecast:

            from prefect_torch_ddp.data import array

            area = {"lat": 64, "lon": 64}
            weather = array(ctx.data, ["t2m", "z500"], window={"time": 6}, patch=area)
            for batch in ctx.steps(ctx.loader(weather, global_batch_size=64), epochs=5):
                history, future = batch["t2m"][:, :5], batch["t2m"][:, 5]
    """
    _check(nan, missing)
    # They load what they need of zarr and xarray.
    from prefect_torch_ddp.data.arrays import axes, dataset, pieces  # noqa: PLC0415
    from prefect_torch_ddp.data.arrays.opening import sources  # noqa: PLC0415
    from prefect_torch_ddp.data.arrays.scales import normalized  # noqa: PLC0415
    from prefect_torch_ddp.data.arrays.variables import used_positions  # noqa: PLC0415

    ways = {"anonymous": anonymous, "endpoint_url": endpoint_url, "region": region}
    found = sources.open_arrays(where, variables, storage, **ways)
    used = used_positions(found, select or {})
    for variable in found.variables:
        if missing == "refuse" and variable.stored is not None:
            variable.stored.refuse_missing([used[dim] for dim in variable.dims])
    cut = axes.axes_of(found.dims, used, window or {}, patch or {}, stride)
    scaled = normalized(found, normalize)
    samples = pieces.ArrayPieces(scaled, cut, used, nan, is_numbered=numbered)
    fits = max(1, WINDOW_BYTES // max(1, samples.form.row_bytes))
    buffer = fits if shuffle_buffer is None else whole_number("shuffle_buffer", shuffle_buffer, 1)
    arrays = dataset.Arrays(samples, buffer)
    if arrays.left_out:
        logger.info("%s: the end of a dimension is in no sample: %s", found.uri, arrays.left_out)
    return arrays


def _check(nan: object, missing: object) -> None:
    is_number = isinstance(nan, int | float) and not isinstance(nan, bool) and math.isfinite(nan)
    if not is_number and nan not in {"refuse", "keep"}:
        msg = f"nan is {nan!r}; choose 'refuse', 'keep' or a number"
        raise InvalidParamsError(msg)
    if missing not in {"refuse", "fill"}:
        msg = f"missing is {missing!r}; choose 'refuse' or 'fill'"
        raise InvalidParamsError(msg)
